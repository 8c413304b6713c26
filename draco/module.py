"""The LightningModule: it owns the LoRA policy and the GRPO step."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from draco.advantage import verdict_unanimous
from draco.env.base import Evaluator
from draco.errors import ConfigError, TrainingStopped
from draco.evaluation.records import EvalRecord, evaluate_groups
from draco.grpo import engine_mismatch, token_loss_sum
from draco.interrupt import hold, release, uninterrupted
from draco.logprobs import hidden_states, output_head, step_logprobs
from draco.packing import Row, collate, plan, rows_of
from draco.policy import Policy
from draco.stages import CreditStage, RolloutStage, RubricStage, find_stage
from draco.types import Credit, Group, TaskBatch

__all__ = ["GRPOModule", "LossOptions", "StepRecord", "UpdateOptions"]


@dataclass(frozen=True, slots=True)
class LossOptions:
    """The loss of Table 10."""

    kl_coef: float = 0.01  #: k3 against the adapter-off reference; 0 skips the reference pass
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    zero_signal: Literal["keep", "drop"] = "keep"  #: groups without signal stay in the denominator and the KL, or not

    def __post_init__(self) -> None:
        if self.zero_signal not in ("keep", "drop"):
            raise ConfigError(f"loss.zero_signal is {self.zero_signal!r}; expected keep or drop")


@dataclass(frozen=True, slots=True)
class UpdateOptions:
    """How a batch becomes one optimizer step."""

    order: Literal["batch", "arrival"] = "batch"  #: batch: accumulate in batch order, reproducible to the bit
    micro_batch_tokens: int = 8192  #: padded tokens of one forward pass
    grad_clip: float = 1.0
    max_bad_steps: int = 3  #: non-finite steps in a row that stop the run

    def __post_init__(self) -> None:
        if self.order not in ("batch", "arrival"):
            raise ConfigError(f"update.order is {self.order!r}; expected batch or arrival")


@dataclass(slots=True)
class StepRecord:
    """What one training step produced, for the callbacks that write and show it."""

    step: int
    groups: list[Group] = field(default_factory=list)  #: as rolled out, quarantined trajectories included
    credits: list[Credit] = field(default_factory=list)  #: of the judged groups
    calls: list[Any] = field(default_factory=list)  #: judge call records
    metrics: dict[str, float] = field(default_factory=dict)


class GRPOModule(LightningModule):
    """GRPO with stages plugged in as callbacks; manual optimisation, one optimizer step a batch.

    Args:
        policy: builds the policy (weights load in `configure_model`, so that bad configurations fail before).
        optimizer: takes the trainable parameters.
        loss, update: options above.
        temperature: at which rollouts were sampled and log-probs are taken.
        evaluator: reads end states in validation. Nothing on the training path touches it.
    """

    def __init__(
        self,
        policy: Callable[[], Policy],
        optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
        *,
        loss: LossOptions | None = None,
        update: UpdateOptions | None = None,
        temperature: float = 1.0,
        evaluator: Evaluator | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.strict_loading = False
        self._make_policy, self._make_optimizer = policy, optimizer
        self.loss_options, self.update_options = loss or LossOptions(), update or UpdateOptions()
        self.temperature, self.evaluator = temperature, evaluator
        self.batches_done = 0  #: our batch counter: the x axis of every log
        self.bad_steps = 0  #: non-finite steps in a row
        #: weights, optimizer and counters belong to `batches_done`, whose archive and metrics are written
        self.whole = True
        self.record: StepRecord | None = None
        self.validation_records: list[EvalRecord] = []
        self.policy: Policy

    # --- life cycle -------------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Load the base model once; Lightning calls this for every fit and validate."""
        if not hasattr(self, "policy"):
            self.policy = self._make_policy()
            output_head(self.policy.model)
            self.policy.train()

    def setup(self, stage: str) -> None:
        """Find the stages among the callbacks, by kind."""
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        self.rollout = find_stage(callbacks, RolloutStage)  # type: ignore[type-abstract]
        self.rubric = find_stage(callbacks, RubricStage)  # type: ignore[type-abstract]
        self.credit = find_stage(callbacks, CreditStage)  # type: ignore[type-abstract]
        self.rubric.needs_citations = self.credit.needs_citations

    def trainable(self) -> list[torch.nn.Parameter]:
        """The adapter's parameters, in a fixed order."""
        return [p for p in self.policy.parameters() if p.requires_grad]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._make_optimizer(self.trainable())

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Batches are frozen objects without tensors; Lightning's recursive transfer would try to rebuild them."""
        return batch

    # --- the step ---------------------------------------------------------------------------------------------------

    def training_step(self, batch: TaskBatch, batch_idx: int) -> None:
        self.record = StepRecord(batch.step)
        groups = self.rollout.generate(self.policy, batch)
        judged = self.rubric.judge(groups)
        credited = self.credit.assign(judged)
        self.update(credited)

    def update(self, credited: Iterable[Credit]) -> None:
        """Accumulate gradients as sums over step tokens, divide once by the batch's token count, step once.

        The denominator holds every step token of every judged trajectory: quarantined trajectories are in no sum,
        groups without signal only where `loss.zero_signal` keeps them.
        """
        assert self.record is not None
        started, waited = time.perf_counter(), 0.0
        sums: dict[str, float] = defaultdict(float)
        maxima: dict[str, float] = {}
        for rows in self._row_groups(credited):
            waited += time.perf_counter() - started
            for micro in plan(rows, self.update_options.micro_batch_tokens):
                self._accumulate(micro, sums, maxima)
            started = time.perf_counter()
        waited += time.perf_counter() - started
        started = time.perf_counter()
        grad_norm = self._optimizer_step(sums["tokens"], sums["loss"])
        sums["seconds"] += time.perf_counter() - started
        self.record.metrics |= _loss_metrics(sums, maxima, grad_norm)
        self.record.metrics |= credit_metrics(self.record.credits)
        self.record.metrics |= self.rollout.take_metrics() | self.rubric.take_metrics()
        self.record.metrics |= {
            "update/bad_steps": float(self.bad_steps),
            "time/update_s": sums["seconds"],
            "time/wait_s": waited,  # rollouts and judging, as far as the update had to wait for them
        }
        self.record.groups, self.record.calls = self.rollout.take_groups(), self.rubric.take_records()

    def _row_groups(self, credited: Iterable[Credit]) -> Iterable[list[Row]]:
        """All rows at once in batch order, or each group's rows as it arrives."""
        assert self.record is not None
        keep = self.loss_options.zero_signal == "keep"
        if self.update_options.order == "arrival":
            for credit in credited:
                self.record.credits.append(credit)
                yield list(rows_of(credit)) if keep or not credit.zero_std else []
            return
        self.record.credits += sorted(credited, key=lambda c: c.judgement.group.index)
        yield [row for c in self.record.credits if keep or not c.zero_std for row in rows_of(c)]

    def _accumulate(self, rows: tuple[Row, ...], sums: dict[str, float], maxima: dict[str, float]) -> None:
        """Forward and backward of one micro-batch; adds the gradient of the *summed* loss."""
        started = time.perf_counter()
        options = self.loss_options
        batch = collate(rows, self.device)
        logprobs, entropy = self._logprobs(batch.input_ids, batch.predicts, batch.targets)
        reference = None
        if options.kl_coef:
            with torch.no_grad(), self.policy.reference():
                reference, _ = self._logprobs(batch.input_ids, batch.predicts, batch.targets)
        loss = token_loss_sum(
            logprobs,
            batch.advantages,
            ref_logprobs=reference,
            kl_coef=options.kl_coef,
            clip_low=options.clip_low,
            clip_high=options.clip_high,
            dual_clip=options.dual_clip,
        )
        self.manual_backward(loss.loss)
        mismatch = engine_mismatch(logprobs, batch.engine_logprobs)
        for name, value in {
            "loss": loss.loss.detach(),
            "kl": loss.kl,
            "clipped": loss.clipped,
            "entropy": entropy.sum(),
            "mismatch_abs": mismatch["abs"],
            "mismatch_k3": mismatch["k3"],
        }.items():
            sums[name] += float(value)
        sums["tokens"] += loss.tokens
        sums["model_tokens"] += batch.tokens
        sums["padded_tokens"] += batch.input_ids.numel()
        for name, value in {"ratio_max": loss.ratio_max, "mismatch_ratio_max": mismatch["ratio_max"]}.items():
            maxima[name] = max(maxima.get(name, 0.0), float(value))
        sums["seconds"] += time.perf_counter() - started

    def _logprobs(self, input_ids: Tensor, predicts: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """log π of the step tokens [N] at the sampling temperature, and their entropy."""
        weight, bias = output_head(self.policy.model)
        hidden = hidden_states(self.policy.model, input_ids)[predicts]
        return step_logprobs(hidden, weight, targets, temperature=self.temperature, bias=bias)

    def _optimizer_step(self, tokens: float, loss: float) -> float:
        """Divide, clip, step. Returns the gradient norm before clipping; NaN-safe."""
        self.whole = False
        hold()  # until `on_train_batch_end`: signals never part the weights from their records
        optimizer = self.optimizers()
        parameters = self.trainable()
        norm = 0.0
        with uninterrupted():  # weights, version and counter move together or not at all
            if tokens:
                for parameter in parameters:
                    if parameter.grad is not None:
                        parameter.grad.div_(tokens)
                norm = float(clip_grad_norm_(parameters, self.update_options.grad_clip))
                if _finite(norm) and _finite(loss):
                    optimizer.step()  # type: ignore[union-attr]
                    self.policy.version += 1
                    self.bad_steps = 0
                else:
                    self.bad_steps += 1
            optimizer.zero_grad()  # type: ignore[union-attr]
            self.batches_done += 1
        return norm

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log with our own counter: Lightning's global_step counts optimizer steps, which a batch may not have.

        Every callback has had its turn by now, the archive writer too: the step is complete.

        Raises:
            TrainingStopped: `update.max_bad_steps` non-finite steps in a row.
        """
        assert self.record is not None
        self.log_at(self.batches_done, self.record.metrics)
        self.whole = True
        if self.bad_steps >= self.update_options.max_bad_steps:
            raise TrainingStopped(
                f"{self.bad_steps} optimizer steps in a row had a non-finite loss or gradient and were skipped; the "
                "last checkpoint is intact: lower lr, or look at metrics.csv (update/grad_norm, engine/mismatch_*)"
            )
        release()

    def log_at(self, step: int, metrics: dict[str, float]) -> None:
        """Send metrics to every logger with an explicit x."""
        for logger in self.loggers:
            logger.log_metrics(metrics, step=step)

    # --- evaluation -------------------------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        self.validation_records = []

    def validation_step(self, batch: TaskBatch, batch_idx: int) -> None:
        """Roll out held-out tasks and let the environment's evaluator read the end states."""
        groups = self.rollout.generate(self.policy, batch)
        self.validation_records += evaluate_groups(groups, self.evaluator)
        self.rollout.take_groups()


def _finite(value: float) -> bool:
    return value - value == 0.0


def _loss_metrics(sums: dict[str, float], maxima: dict[str, float], grad_norm: float) -> dict[str, float]:
    tokens = max(sums["tokens"], 1)
    return {
        "update/loss": sums["loss"] / tokens,
        "update/kl": sums["kl"] / tokens,
        "update/entropy": sums["entropy"] / tokens,
        "update/clip_share": sums["clipped"] / tokens,
        "update/ratio_max": maxima.get("ratio_max", 0.0),
        "update/grad_norm": grad_norm,
        "update/step_tokens": float(sums["tokens"]),
        "update/model_tokens": float(sums["model_tokens"]),
        "update/padding_share": 1.0 - sums["model_tokens"] / max(sums["padded_tokens"], 1),
        "engine/mismatch_abs": sums["mismatch_abs"] / tokens,
        "engine/mismatch_k3": sums["mismatch_k3"] / tokens,
        "engine/mismatch_ratio_max": maxima.get("mismatch_ratio_max", 0.0),
    }


def credit_metrics(credits: list[Credit]) -> dict[str, float]:
    """Shares over the judged trajectories of a batch (method §4): inert verdicts, inert weights, reasons, rewards."""
    groups = [c for c in credits if c.judgement.group.trajectories]
    members = sum(len(c.advantages) for c in groups)
    if not members:
        return {"group/judged": 0.0, "group/skipped": float(len(credits))}
    reasons = Counter(reason for c in groups for reason in c.reasons)
    rewards = [r for c in groups for r in c.judgement.rewards]
    inert = 0
    with_criteria = any(c.judgement.criteria for c in groups)
    for c in groups:
        scores = torch.tensor([[v.score for v in row] for row in c.judgement.verdicts], dtype=torch.int64)
        scores = scores.reshape(len(c.judgement.criteria), len(c.advantages))
        kept = ~torch.tensor(c.judgement.dropped, dtype=torch.bool)
        inert += int(verdict_unanimous(scores, kept).sum())
    metrics = {
        "group/judged": float(len(groups)),
        "group/skipped": float(len(credits) - len(groups)),
        "group/zero_std": sum(c.zero_std for c in groups) / len(groups),
        "reward/mean": sum(rewards) / members,
        **{f"credit/{reason}": count / members for reason, count in sorted(reasons.items())},
        "credit/inert_weights": sum(n for r, n in reasons.items() if r != "credited") / members,
    }
    if with_criteria:
        metrics["credit/inert_verdicts"] = inert / members
    return metrics
