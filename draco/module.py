"""The LightningModule: the LoRA policy and the GRPO step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import groupby, zip_longest
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from draco.core.distributed import all_reduce_sum, gather, world_size
from draco.core.errors import ConfigError, TrainingStopped
from draco.core.signals import hold, release, uninterrupted
from draco.core.types import Credit, Group, TaskBatch
from draco.env.base import Evaluator
from draco.env.records import EvalRecord, evaluate_groups
from draco.policy.attention import pack_attention
from draco.policy.policy import Policy
from draco.policy.sharding import ShardedStrategy, call_with_head, full, gathered, is_sharded, shard
from draco.policy.structure import check_head, output_head
from draco.stages import Stages
from draco.update.gradients import Totals, Worker
from draco.update.metrics import credit_metrics, loss_metrics, merge_metrics
from draco.update.options import LossOptions, UpdateOptions
from draco.update.packing import Row, rows_of

__all__ = ["GRPOModule", "StepRecord"]


@dataclass(slots=True)
class StepRecord:
    """What one training step produced, for the callbacks that write and show it."""

    step: int
    groups: list[Group] = field(default_factory=list)  #: as rolled out, quarantined trajectories included
    credits: list[Credit] = field(default_factory=list)  #: of the judged groups
    calls: list[Any] = field(default_factory=list)  #: judge call records
    metrics: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)


class GRPOModule(LightningModule):
    """GRPO with three stages; manual optimisation.

    Args:
        policy: builds the policy. Weights load in `configure_model`, after the configuration was checked.
        stages: rollout, rubric and credit; they are among the trainer's callbacks, too.
        optimizer: builds the optimizer of the trainable parameters.
        loss, update: see `LossOptions` and `UpdateOptions`.
        temperature: of sampling, and of the log-probs in the update.
        evaluator: evaluates end states in validation; training never uses it.
        gather_for_rollouts: gather a sharded policy during rollouts, because the engine samples in this process.
    """

    def __init__(
        self,
        policy: Callable[[], Policy],
        optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
        stages: Stages,
        *,
        loss: LossOptions | None = None,
        update: UpdateOptions | None = None,
        temperature: float = 1.0,
        evaluator: Evaluator | None = None,
        gather_for_rollouts: bool = False,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.strict_loading = False
        self._make_policy, self._make_optimizer = policy, optimizer
        self.rollout, self.rubric, self.credit = self.stages = stages
        self.loss_options, self.update_options = loss or LossOptions(), update or UpdateOptions()
        self.temperature, self.evaluator = temperature, evaluator
        self.gather_for_rollouts = gather_for_rollouts
        self.batches_done = 0  #: number of batches done: the step of every log
        self.bad_steps = 0  #: non-finite steps in a row
        self.lr = 0.0  #: learning rate of the last optimizer step
        self.mismatched = False  #: engine and trainer disagree on log-probs: no further update is made
        #: archive and metrics of the last batch are written, so a checkpoint may be saved
        self.recorded = True
        self._loaded = False
        self.record: StepRecord | None = None
        self.validation_records: list[EvalRecord] = []
        self.policy: Policy
        self.packed = False  #: several trajectories are packed into a row; attention separates them

    # --- life cycle -------------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Load the base model once; Lightning calls this for every fit and validate.

        A sharded policy is first built without weights; each rank loads its shard when Lightning calls.
        """
        new = not self._loaded
        if new:
            self.policy, self._loaded = self._make_policy(), True
            (output_head if next(self.policy.parameters()).is_meta else check_head)(self.policy.model)
        model = self.policy.model
        if not next(model.parameters()).is_meta:
            ready = new
        elif ready := self._trainer is not None:
            mesh, device = self.device_mesh, self.trainer.strategy.root_device
            assert mesh is not None
            shard(model, mesh["data_parallel"], folder=self.policy.weights_folder, device=device)
        if ready:
            packed = self.update_options.packing == "auto"
            self.packed = packed and call_with_head(model, lambda: pack_attention(model))
            self.policy.train()

    def unpack(self) -> None:
        """One trajectory a row from now on: packed rows were found to differ from plain ones."""
        self.packed, self.update_options = False, replace(self.update_options, packing="off")

    def setup(self, stage: str) -> None:
        """Refuse strategies that would sum gradients in another way."""
        strategy = self.trainer.strategy
        if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy | ShardedStrategy):
            raise ConfigError(
                f"trainer.strategy is {type(strategy).__name__}; the update sums gradients itself and supports one "
                "device, ddp (trainer=ddp) and FSDP2 (trainer=fsdp)"
            )

    def trainable(self) -> list[torch.nn.Parameter]:
        """The adapter's parameters, in a fixed order."""
        return [p for p in self.policy.parameters() if p.requires_grad]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._make_optimizer(self.trainable())

    def on_before_batch_transfer(self, batch: TaskBatch, dataloader_idx: int) -> TaskBatch:
        """Each rank works on its own tasks of the batch."""
        return batch.shard(self.global_rank, self.trainer.world_size)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Batches have no tensors; Lightning would try to rebuild the frozen objects."""
        return batch

    # --- the step ---------------------------------------------------------------------------------------------------

    def training_step(self, batch: TaskBatch, batch_idx: int) -> None:
        self.record = StepRecord(batch.step)
        groups = self.rollout.generate(self.policy, batch)
        judged = self.rubric.judge(groups)
        credited = self.credit.assign(judged)
        self.update(credited)

    def _sampling(self) -> AbstractContextManager[None]:
        """The whole model is gathered within, if the engine needs it for sampling."""
        return gathered(self.policy.model) if self.gather_for_rollouts else nullcontext()

    def next_batch(self, batch: TaskBatch) -> TaskBatch:
        """This rank's part of the batch after `batch`; it has no tasks after the last batch."""
        if self.trainer.is_last_batch:
            return replace(batch, step=batch.step + 1, tasks=())
        loader: Any = self.trainer.train_dataloader
        return self.on_before_batch_transfer(loader.batch(batch.step + 1), 0)

    def update(self, credited: Iterable[Credit]) -> None:
        """Sum gradients over step tokens, divide by the number of tokens of the batch, and make one optimizer step.

        All step tokens of all judged trajectories of all ranks count. Quarantined trajectories do not, and groups
        without signal only with `loss.zero_signal=keep`. With `update.updates_per_batch` the batch is split by groups
        into as many parts, and each part makes its own optimizer step.
        """
        assert self.record is not None
        if is_sharded(self.policy.model) or self.rollout.frees_memory:
            with self._sampling():  # all rollouts of this rank end before the update begins
                credited = list(credited)
            self.rollout.free_memory()
        worker, batch, stepping = self._worker(), Totals(), 0.0
        norms: list[float] = []
        for share in self._shares(worker, credited):
            part = Totals()
            for rows in share:
                part.add(worker.accumulate(rows))
            clock = time.perf_counter()
            norms.append(self._optimizer_step(part))
            stepping += time.perf_counter() - clock
            batch.add(part)
        self.batches_done += 1
        updating = worker.busy + stepping
        waited = time.perf_counter() - self.record.started - updating
        grad_norm = float(torch.tensor(norms).max())  # a NaN wins
        self._complete_record(batch, grad_norm, {"time/wait_s": waited, "time/update_s": updating})

    def _worker(self) -> Worker:
        options = self.update_options
        return Worker(
            self.policy,
            self.loss_options,
            temperature=self.temperature,
            max_tokens=options.micro_batch_tokens,
            packed=self.packed,
            backward=self._backward,
        )

    def _shares(self, worker: Worker, credited: Iterable[Credit]) -> Iterator[Iterable[list[Row]]]:
        """Rows of each optimizer step: all rows in the order of `update.order`, or parts of the batch by groups."""
        shares = self.update_options.updates_per_batch
        if shares == 1:
            yield self._row_lists(credited)
            return
        rows: list[list[Row]] = [[] for _ in range(shares)]
        for credit in self._in_batch_order(credited):
            rows[credit.judgement.group.index % shares] += self._rows(credit)
        rows[1:] = [worker.remember(later) for later in rows[1:]]
        for share in rows:
            yield [share]

    def _row_lists(self, credited: Iterable[Credit]) -> Iterator[list[Row]]:
        """All rows at once in batch order, or the rows of each group as it arrives (`update.order`).

        A sharded run takes all rows at once, because its ranks must first agree on the number of micro-batches.
        """
        assert self.record is not None
        if self.update_options.order == "arrival" and not is_sharded(self.policy.model):
            for credit in credited:
                self.record.credits.append(credit)
                yield self._rows(credit)
            return
        yield [row for credit in self._in_batch_order(credited) for row in self._rows(credit)]

    def _in_batch_order(self, credited: Iterable[Credit]) -> list[Credit]:
        assert self.record is not None
        self.record.credits += sorted(credited, key=lambda c: c.judgement.group.index)
        return self.record.credits

    def _rows(self, credit: Credit) -> list[Row]:
        if credit.zero_std and self.loss_options.zero_signal == "drop":
            return []
        return list(rows_of(credit, self.loss_options))

    def _backward(self, loss: Tensor) -> None:
        """Add to the local gradient. DDP must not average it: `_optimizer_step` sums over ranks once."""
        if world_size() == 1 or is_sharded(self.policy.model):  # sharded: the backward pass sums over ranks
            self.manual_backward(loss)
            return
        with self.trainer.strategy.block_backward_sync():  # type: ignore[attr-defined]
            self.manual_backward(loss)

    def _optimizer_step(self, part: Totals) -> float:
        """Sum over ranks, divide, clip, and make a step, unless loss or gradients are not finite.

        Every rank has the same sums and so decides alike. Without any token no rank makes a step.

        Returns:
            the gradient norm before clipping.
        """
        self.recorded = False
        hold()  # until `on_train_batch_end`: weights and their records must match
        optimizer = self.optimizers()
        parameters = self.trainable()
        norm = 0.0
        with uninterrupted():  # weights and version must match
            names = ("tokens", "trajectories", "loss", "mismatch_abs")
            summed = is_sharded(self.policy.model)
            sums = all_reduce_sum([] if summed else parameters, [part.sums[n] for n in names])
            tokens, trajectories, loss, mismatch = sums
            limit = self.rollout.max_mismatch
            self.mismatched |= limit is not None and mismatch > limit * tokens
            if tokens and not self.mismatched:
                denominator = self.loss_options.denominator(tokens, trajectories)
                for parameter in parameters:
                    if parameter.grad is not None:
                        parameter.grad.div_(denominator)
                norm = float(full(clip_grad_norm_(parameters, self.update_options.grad_clip)))
                if _finite(norm) and _finite(loss):
                    self._set_learning_rate(optimizer.param_groups)  # type: ignore[union-attr]
                    optimizer.step()  # type: ignore[union-attr]
                    self.policy.version += 1
                    self.bad_steps = 0
                else:
                    self.bad_steps += 1
            optimizer.zero_grad()  # type: ignore[union-attr]
        return norm

    def _set_learning_rate(self, groups: list[dict[str, Any]]) -> None:
        """It depends only on the batch counter, so a checkpoint need not save it."""
        factor = self.update_options.lr_factor(self.batches_done)
        for group in groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
        self.lr = groups[0]["lr"]

    def _complete_record(self, totals: Totals, grad_norm: float, times: dict[str, float]) -> None:
        """Collect the records and metrics of all ranks in the record, which rank 0 writes."""
        assert self.record is not None
        taken = [stage.take() for stage in self.stages]
        stages = {name: value for t in taken for name, value in t.metrics.items()} | times
        own = (
            [g for t in taken for g in t.groups],
            self.record.credits,
            [c for t in taken for c in t.calls],
            stages,
            totals,
        )
        groups, credits, calls, metrics, parts = zip(*gather(own), strict=True)
        total = Totals()
        for part in parts:
            total.add(part)
        ranks = len(parts)
        self.record.groups = sorted((g for part in groups for g in part), key=lambda g: g.index)
        self.record.credits = sorted((c for part in credits for c in part), key=lambda c: c.judgement.group.index)
        self.record.calls = [call for part in calls for call in part]
        self.record.metrics |= loss_metrics(total, self.loss_options, grad_norm)
        self.record.metrics |= credit_metrics(self.record.credits)
        self.record.metrics |= merge_metrics(metrics)
        self.record.metrics |= {
            "update/bad_steps": float(self.bad_steps),
            "update/lr": self.lr,
            **{f"time/{name}": total.sums[name] / ranks for name in ("reference_s", "forward_s", "backward_s")},
        }

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log with our own counter: Lightning's global_step counts optimizer steps, and a batch may make none.

        Lightning calls this after the callbacks, so the archive of the step is written by now.

        Raises:
            TrainingStopped: `update.max_bad_steps` non-finite steps in a row.
        """
        assert self.record is not None
        self.log_at(self.batches_done, self.record.metrics)
        self.recorded = True
        if self.mismatched:
            raise TrainingStopped(
                f"engine and trainer differ by {self.record.metrics['engine/mismatch_abs']:.3g} nats a token, more "
                f"than engine.max_mismatch={self.rollout.max_mismatch:g}; the batch made no further update, and "
                "the last checkpoint is intact: wrong adapter, chat template or temperature in the engine?"
            )
        if self.bad_steps >= self.update_options.max_bad_steps:
            raise TrainingStopped(
                f"{self.bad_steps} optimizer steps in a row had a non-finite loss or gradient and were skipped; the "
                "last checkpoint is intact: lower lr, or look at metrics.csv (update/grad_norm, engine/mismatch_*)"
            )
        release()

    def log_at(self, step: int, metrics: dict[str, float]) -> None:
        """Send metrics to every logger with our own step, from rank 0."""
        if self.global_rank:
            return
        for logger in self.loggers:
            logger.log_metrics(metrics, step=step)

    # --- evaluation -------------------------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        self.validation_records = []

    def validation_step(self, batch: TaskBatch, batch_idx: int) -> None:
        """Roll out held-out tasks; the environment's evaluator evaluates the end states."""
        with self._sampling():
            groups = list(self.rollout.generate(self.policy, batch))
        self.validation_records += evaluate_groups(groups, self.evaluator)
        self.rollout.take()

    def on_validation_epoch_end(self) -> None:
        """Every rank gets the records of all ranks, in the order of a run of one process."""
        parts = gather(self.validation_records)
        if len(parts) > 1:
            by_task = [[list(g) for _, g in groupby(part, key=lambda r: r.task_id)] for part in parts]
            dealt = zip_longest(*by_task, fillvalue=[])
            self.validation_records = [r for turn in dealt for records in turn for r in records]


def _finite(value: float) -> bool:
    return value - value == 0.0
