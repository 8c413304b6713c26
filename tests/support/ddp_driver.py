"""A short run over archived trajectories: `torchrun tests/support/ddp_driver.py RUN OUT`, or `replay` in this process.

Batches: 0 plain · 1 only task 0 is live (with two ranks, one has no gradient) · 2 nothing is live · 3 one NaN advantage
on one rank alone · 4 plain.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from support.factory import rewarded, tasks, with_step_advantages
from support.policies import perturbed_policy

from callbacks.credit.uniform import UniformCredit
from draco.core.types import Credit, Group, Judgement, TaskBatch, Termination
from draco.module import GRPOModule
from draco.policy.policy import Policy
from draco.run.archive import read_table, read_trajectories
from draco.run.loader import TaskLoader
from draco.stages import RolloutStage, RubricStage, Stages, Taken
from draco.update.options import LossOptions, UpdateOptions

TASKS, MEMBERS, STEPS = 3, 3, 5


class Replay(RolloutStage):
    """Groups out of an archive instead of an engine."""

    def __init__(self, run: Path) -> None:
        self.by_task: dict[str, list[Any]] = {}
        for t in read_trajectories(read_table(run, "trajectories")):
            self.by_task.setdefault(t.task.id, []).append(t)
        self.groups: list[Group] = []

    def generate(self, policy: Policy, batch: TaskBatch) -> Iterator[Group]:
        for i, task in enumerate(batch.tasks):
            index = batch.position(i)
            lost = batch.step == 2 or (batch.step == 1 and index != 0)
            trajectories = tuple(
                replace(t, termination=Termination.DEADLINE) if lost else t for t in self.by_task[task.id]
            )
            self.groups.append(Group(task, trajectories, index, batch.step))
            yield self.groups[-1]

    def take(self) -> Taken:
        count, turns = sum(len(g.trajectories) for g in self.groups), len(self.groups)
        taken, self.groups = self.groups, []
        return Taken(
            {"rollout/count": float(count), "rollout/turns": float(turns), "time/rollout_s": float(count)}, taken
        )


class Rewards(RubricStage):
    gives_citations = False

    def judge(self, groups: Iterable[Group]) -> Iterator[Judgement]:
        for group in groups:
            live = group.live()
            yield rewarded(live, (float(t.sample + group.index) ** 2 for t in live.trajectories))


class Poisoned(UniformCredit):
    def assign_one(self, judgement: Judgement) -> Credit:
        credit = super().assign_one(judgement)
        if judgement.group.step != 3 or judgement.group.index != 1:
            return credit
        return with_step_advantages(credit, math.nan)


class RecordingSGD(torch.optim.SGD):
    """Keeps the gradient of every step."""

    seen: list[torch.Tensor]

    def step(self, closure: Any = None) -> Any:
        gradient = [p.grad.flatten() for group in self.param_groups for p in group["params"]]
        self.seen.append(torch.cat(gradient))
        return super().step(closure)


def replay(run: Path, ranks: int, updates: int) -> dict[str, Any]:
    """Train over the archive and return what must not depend on the number of ranks."""
    torch.manual_seed(0)
    seen: list[torch.Tensor] = []

    def optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        built = RecordingSGD(parameters, lr=0.05)
        built.seen = seen
        return built

    rows: list[dict[str, float]] = []
    archived: list[list[int]] = []

    class Module(GRPOModule):
        def log_at(self, step: int, metrics: dict[str, float]) -> None:
            assert self.record is not None
            rows.append(metrics)
            archived.append([g.index for g in self.record.groups])

    stages = Stages(Replay(run), Rewards(), Poisoned())
    module = Module(
        perturbed_policy, optimizer, stages, loss=LossOptions(kl_coef=0.1),
        update=UpdateOptions(grad_clip=1e9, updates_per_batch=updates, max_bad_steps=9),
    )  # fmt: skip
    loader = TaskLoader(tasks(TASKS), steps=STEPS, tasks_per_step=TASKS, group_size=MEMBERS, seed=0)
    trainer = Trainer(
        accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto", logger=False, max_epochs=1,
        callbacks=list(stages), enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(module, train_dataloaders=loader)
    weights = torch.cat([p.detach().flatten() for p in module.trainable()])
    return {
        "gradients": seen, "weights": weights, "metrics": rows, "archived": archived,
        "counters": (module.batches_done, module.policy.version, module.bad_steps),
    }  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    result = [replay(Path(sys.argv[1]), 2, updates) for updates in (1, 2)]
    torch.save(result, f"{sys.argv[2]}.{torch.distributed.get_rank()}")
