"""A `GRPOModule` with a trainer that runs it, or made ready for single updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer
from support.factory import DONE, rewarded

from callbacks.credit.uniform import UniformCredit
from draco.core.types import Credit, Group, Judgement, TaskBatch
from draco.module import GRPOModule, StepRecord
from draco.policy.policy import Policy
from draco.rollout.rollout import Rollout
from draco.stages import RolloutStage, RubricStage, RunContext, Stages
from draco.update.gradients import Totals


class Rewards(RubricStage):
    """Rewards by sample number; groups named in `skip` are lost."""

    gives_citations = False

    def __init__(self, rewards: Callable[[Group], list[float]], log: list[str] | None = None) -> None:
        self.rewards, self.journal = rewards, log if log is not None else []

    def judge(self, groups: Iterable[Group]) -> Iterator[Judgement]:
        for group in groups:
            self.journal.append(f"judge {group.index}")
            live = group.live()
            yield rewarded(live, self.rewards(live))


def make_trainer(callbacks: list[Any], **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu", callbacks=callbacks, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, max_epochs=1, **options,
    )  # fmt: skip


def script(rollout: Rollout) -> list[str]:
    turns = [f"<code>{'a' * (rollout.sample + 1)}</code>", "<code>b</code>"]
    return [*turns[: rollout.sample + 1], DONE]


def make_module(policy: Callable[[], Policy], callbacks: list[Any] | None = None, **options: Any) -> GRPOModule:
    """A module with the stages among `callbacks`, opened; without callbacks with stages that do nothing."""
    stages = Stages.of(callbacks) if callbacks else Stages(_Null(), Rewards(lambda g: []), UniformCredit())
    module = GRPOModule(policy, lambda p: torch.optim.SGD(p, lr=0.1), stages, **options)
    for stage in stages:
        stage.open(RunContext(needs_citations=stages.credit.needs_citations, next_batch=module.next_batch))
    return module


def gradients(module: GRPOModule, credits: list[Credit]) -> torch.Tensor:
    """Flat gradient of the divided loss, before clipping."""
    module.record = StepRecord(0)
    for parameter in module.trainable():
        parameter.grad = None
    grabbed: list[torch.Tensor] = []

    def step(part: Totals) -> float:
        denominator = module.loss_options.denominator(part.sums["tokens"], part.sums["trajectories"])
        grabbed.append(torch.cat([p.grad.flatten() / denominator for p in module.trainable() if p.grad is not None]))
        return 0.0

    module._optimizer_step = step  # type: ignore[method-assign,assignment]
    module.update(credits)
    return grabbed[0]


class _Null(RolloutStage):
    def generate(self, policy: Policy, batch: TaskBatch) -> Iterator[Group]:
        return iter(())


def prepared(policy: Callable[[], Policy], **options: Any) -> GRPOModule:
    """A module ready for `update` outside a trainer."""
    module = make_module(policy, **options)
    module.configure_model()
    module.manual_backward = lambda loss: loss.backward()  # type: ignore[method-assign,assignment]
    return module
