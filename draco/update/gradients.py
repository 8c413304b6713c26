"""Forward and backward passes of micro-batches: what `GRPOModule.update` repeats until a batch is consumed.

Everything is accumulated as sums over step tokens; nothing here divides.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from draco.core.distributed import gather
from draco.policy.attention import packed_inputs
from draco.policy.policy import Policy
from draco.policy.sharding import call_with_head, is_sharded
from draco.policy.structure import hidden_states, output_head
from draco.update.logprobs import step_logprobs
from draco.update.loss import engine_mismatch, token_loss_sum, truncated_importance_weights
from draco.update.options import LossOptions
from draco.update.packing import MicroBatch, Row, balance, collate, micro_batches

__all__ = ["Totals", "Worker"]


@dataclass(slots=True)
class Totals:
    """Sums and maxima over the step tokens of a micro-batch, a share of a batch, a batch or all ranks."""

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    maxima: dict[str, float] = field(default_factory=dict)

    def add(self, other: Totals) -> None:
        """Add those of another part."""
        for name, value in other.sums.items():
            self.sums[name] += value
        for name, value in other.maxima.items():
            self.maxima[name] = max(self.maxima.get(name, 0.0), value)


class Worker:
    """Runs rows through the policy.

    Args:
        policy: the policy; its gradients are accumulated into.
        loss: loss options.
        temperature: at which rollouts were sampled.
        max_tokens: of one forward pass.
        packed: the policy's attention is prepared for packed rows.
        backward: runs the backward pass of a summed loss.
    """

    def __init__(
        self,
        policy: Policy,
        loss: LossOptions,
        *,
        temperature: float,
        max_tokens: int,
        packed: bool,
        backward: Callable[[Tensor], None],
    ) -> None:
        self.policy, self.loss, self.temperature = policy, loss, temperature
        self.max_tokens, self.packed, self.backward = max_tokens, packed, backward
        self.version = policy.version  #: of the weights before the first update of the batch
        self.busy = 0.0  #: seconds spent in here

    def accumulate(self, rows: Sequence[Row], micros: Sequence[tuple[Row, ...]] | None = None) -> Totals:
        """Add the gradient of the rows' *summed* loss to the adapter's `.grad`.

        Args:
            rows: of any number of groups.
            micros: the same rows, split into micro-batches by the caller; None: split here.
        """
        micros = list(self._split(rows)) if micros is None else micros
        started, totals = time.perf_counter(), Totals()
        batches = [collate(micro, self.policy.device, packed=self.packed) if micro else None for micro in micros]
        references = self._references(batches)
        totals.sums["reference_s"] = time.perf_counter() - started
        for micro, batch, reference in zip(micros, batches, references, strict=True):
            totals.add(self._micro_batch(micro, batch, reference) if batch else self._empty())
        self.busy += time.perf_counter() - started
        return totals

    def _split(self, rows: Sequence[Row]) -> Iterable[tuple[Row, ...]]:
        """Micro-batches. The passes of a sharded policy are collectives: there every rank gets equally many, some of
        them empty."""
        own = list(micro_batches(rows, self.max_tokens, packed=self.packed))
        if not is_sharded(self.policy.model):
            return own
        count = max(gather(len(own)))
        return balance(rows, own, count, self.max_tokens) if self.packed else own + [()] * (count - len(own))

    def _references(self, batches: Sequence[MicroBatch | None]) -> list[Tensor | None]:
        """Reference log-probs of each micro-batch, [N]; None where the loss has no KL.

        They are computed before the policy's own passes, while no graph is held, and for all micro-batches at once,
        because PEFT walks over the whole model each time its adapter is switched.
        """
        if not self.loss.kl_coef or not batches:
            return [None] * len(batches)
        with torch.no_grad(), self.policy.reference():
            return [self.logprobs(batch or self._filler(), with_entropy=False)[0] for batch in batches]

    def _empty(self) -> Totals:
        """Take part in the collectives of a micro-batch although this rank has no row for it."""
        self.backward(0.0 * self.logprobs(self._filler(), with_entropy=False)[0].sum())
        return Totals()

    def _filler(self) -> MicroBatch:
        ids = torch.zeros(1, 2, dtype=torch.int64, device=self.policy.device)
        one = torch.zeros(1, dtype=torch.int64, device=self.policy.device)
        nothing = torch.zeros(0, device=self.policy.device)
        return MicroBatch(ids, (2,) if self.packed else None, one, one, nothing, None, nothing, None, 0)

    def remember(self, rows: Sequence[Row]) -> list[Row]:
        """The rows with their log-probs under the current weights. Call it before the first of several updates."""
        started = time.perf_counter()
        found: dict[int, Tensor] = {}
        for micro in self._split(rows):
            if not micro:
                with torch.no_grad():
                    self.logprobs(self._filler(), with_entropy=False)
                continue
            batch = collate(micro, self.policy.device, packed=self.packed)
            with torch.no_grad():
                logprobs, _ = self.logprobs(batch, with_entropy=False)
            parts = torch.split(logprobs, [row.step_tokens for row in micro])
            found |= {id(row): part for row, part in zip(micro, parts, strict=True)}
        self.busy += time.perf_counter() - started
        return [replace(row, old_logprobs=found[id(row)]) for row in rows]

    def logprobs(self, batch: MicroBatch, *, with_entropy: bool = True) -> tuple[Tensor, Tensor]:
        """log π of the step tokens [N] at the sampling temperature, and their entropy."""
        return call_with_head(self.policy.model, lambda: self._logprobs(batch, with_entropy))

    def _logprobs(self, batch: MicroBatch, with_entropy: bool) -> tuple[Tensor, Tensor]:
        model = self.policy.model
        weight, bias = output_head(model)
        inputs = {} if batch.lengths is None else packed_inputs(model, batch.lengths, batch.input_ids.device)
        hidden = hidden_states(model, batch.input_ids, **inputs).flatten(0, 1).index_select(0, batch.predicts)
        return step_logprobs(
            hidden, weight, batch.targets, temperature=self.temperature, bias=bias, with_entropy=with_entropy
        )

    def _micro_batch(self, rows: tuple[Row, ...], batch: MicroBatch, reference: Tensor | None) -> Totals:
        options, started = self.loss, time.perf_counter()
        logprobs, entropy = self.logprobs(batch)
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        cap = options.tis_cap
        loss = token_loss_sum(
            logprobs,
            batch.advantages,
            options,
            old_logprobs=old,
            ref_logprobs=reference,
            weights=truncated_importance_weights(old, batch.engine_logprobs, cap) if cap else None,
            token_weights=batch.weights,
        )
        forwarded = time.perf_counter()
        self.backward(loss.loss)
        mismatch = engine_mismatch(old, batch.engine_logprobs)
        # Where the weights have changed since the engine sampled, a difference of log-probs is no fault of the engine.
        kind = "mismatch" if all(row.trajectory.policy_version == self.version for row in rows) else "stale"
        values = {
            "loss": loss.loss.detach(),
            "kl": loss.kl,
            "clipped": loss.clipped,
            "dual_clipped": loss.dual_clipped,
            "entropy": entropy.sum(),
            f"{kind}_abs": mismatch["abs"],
            f"{kind}_k3": mismatch["k3"],
        }
        if cap:
            values["tis_capped"] = (old - batch.engine_logprobs > torch.tensor(cap).log()).sum()
        totals = Totals()
        totals.sums.update({name: float(value) for name, value in values.items()})
        totals.maxima = {"ratio_max": float(loss.ratio_max), f"{kind}_ratio_max": float(mismatch["ratio_max"])}
        ended = time.perf_counter()
        totals.sums.update(
            {
                "tokens": logprobs.numel(),
                "trajectories": len(rows),
                "model_tokens": batch.tokens,
                "computed_tokens": batch.input_ids.numel(),
                "micro_batches": 1,
                "forward_s": forwarded - started,
                "backward_s": ended - forwarded,
            }
        )
        return totals
