"""Rollouts: G episodes a task, sampled by an engine.

Every trajectory draws from its own generator, keyed by (seed, purpose, step, task, sample), so results do not depend on
batch layout or arrival order, and a restart needs to keep nothing. With `staleness` 1 the batch after a restart is
sampled by the weights that it updates, as the first one of a run is: the weights before them are gone.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from draco.core.errors import ConfigError
from draco.core.types import Group, Task, TaskBatch, Termination, Trajectory
from draco.env.base import Environment
from draco.policy.policy import Policy
from draco.rollout.engines.base import Engine
from draco.rollout.loop import Limits
from draco.rollout.rollout import STEP_KINDS, Rollout, sampling_seed
from draco.stages import RolloutStage

__all__ = ["AgentRollout"]


@dataclass(frozen=True, slots=True)
class _Begun:
    """A batch on its way."""

    batch: TaskBatch
    finished: dict[int, list[Trajectory]]  #: by task
    rollouts: list[Rollout]
    ended: Iterator[Rollout]
    since: float  #: monotonic clock


class AgentRollout(RolloutStage):
    """Opens the episodes of a batch and lets the engine drive them.

    Args:
        environment: where episodes come from. No evaluator enters here.
        engine: what samples.
        limits: budgets of one rollout.
        seed: run seed.
        step_kind: what a step is: `turn`, `code_block` or `tool_call`.
    """

    def __init__(
        self,
        environment: Environment,
        engine: Engine,
        limits: Limits,
        *,
        seed: int = 0,
        step_kind: str = "turn",
    ) -> None:
        if step_kind not in STEP_KINDS:
            raise ConfigError(f"env.step is {step_kind!r}; expected one of {', '.join(STEP_KINDS)}")
        self.environment, self.engine, self.limits = environment, engine, limits
        self.seed, self.step_kind = seed, step_kind
        self.max_mismatch, self.rests, self.staleness = engine.max_mismatch, engine.rests, engine.staleness
        self._groups: list[Group] = []
        self._seconds = 0.0  #: waited for rollouts
        self._rolling = 0.0  #: from the beginning of the batch to its last end
        self._ahead: _Begun | None = None

    def begin(self, policy: Policy, batch: TaskBatch) -> None:
        started = time.perf_counter()
        self._ahead = self._begin(policy, batch, self.engine.begin)
        self._seconds += time.perf_counter() - started

    def generate(self, policy: Policy, batch: TaskBatch) -> Iterator[Group]:
        self._groups, self._seconds, self._rolling = [], 0.0, 0.0
        started = time.perf_counter()
        ahead = self._ahead if self._ahead is not None and self._ahead.batch == batch else None
        if ahead is not None:  # not in an evaluation that comes between
            self._ahead = None
        begun = ahead or self._begin(policy, batch, self.engine.run)
        finished = begun.finished
        ready = [i for i, done in finished.items() if len(done) == batch.group_size]
        for index in ready:
            yield self._group(batch, index, finished[index])
        for rollout in begun.ended:
            done = finished[rollout.group_index]
            done.append(rollout.trajectory())
            if len(done) == batch.group_size:
                self._seconds += time.perf_counter() - started
                yield self._group(batch, rollout.group_index, done)
                started = time.perf_counter()
        self._seconds += time.perf_counter() - started
        last = max((r.ended for r in begun.rollouts if r.ended is not None), default=begun.since)
        self._rolling = last - begun.since if ahead else self._seconds

    def _begin(self, policy: Policy, batch: TaskBatch, drive: Callable[..., Iterator[Rollout]]) -> _Begun:
        finished: dict[int, list[Trajectory]] = {i: [] for i in range(len(batch.tasks))}
        rollouts: list[Rollout] = []
        for index, task in enumerate(batch.tasks):
            for sample in range(batch.group_size):
                opened = self._open(policy, batch, task, index, sample)
                if isinstance(opened, Rollout):
                    rollouts.append(opened)
                else:
                    finished[index].append(opened)
        ended = drive(policy, rollouts, temperature=batch.temperature)
        return _Begun(batch, finished, rollouts, ended, time.monotonic())

    def rest(self) -> None:
        self.engine.rest()

    def _open(self, policy: Policy, batch: TaskBatch, task: Task, index: int, sample: int) -> Rollout | Trajectory:
        """A running rollout, or a quarantined trajectory if the environment could not open the task."""
        seed = sampling_seed(self.seed, batch.purpose, batch.step, task.id, sample)
        try:
            episode = self.environment.open(task, seed=seed)
        except Exception as error:  # a fault of the environment ends this episode, not the run
            return Trajectory(
                task, sample, (), (), (), (), (), Termination.ENVIRONMENT_ERROR, 0, policy.version, seed,
                error=f"open: {type(error).__name__}: {error}",
            )  # fmt: skip
        return Rollout(
            episode,
            policy.chat,
            self.limits,
            task=task,
            sample=sample,
            seed=seed,
            policy_version=policy.version,
            step_kind=self.step_kind,
            group_index=index,
        )

    def _group(self, batch: TaskBatch, index: int, done: list[Trajectory]) -> Group:
        ordered = tuple(sorted(done, key=lambda t: t.sample))
        group = Group(batch.tasks[index], ordered, batch.position(index), batch.step)
        self._groups.append(group)
        return group

    def take_groups(self) -> list[Group]:
        groups, self._groups = sorted(self._groups, key=lambda g: g.index), []
        return groups

    def take_metrics(self) -> dict[str, float]:
        trajectories = [t for g in self._groups for t in g.trajectories]
        count = max(len(trajectories), 1)
        kinds = Counter(t.termination for t in trajectories)
        response = sum(len(t.token_ids) - t.prompt_tokens for t in trajectories)
        return self.engine.take_metrics() | {
            "rollout/count": float(len(trajectories)),
            "rollout/turns": sum(t.steps[-1].turn for t in trajectories if t.steps) / count,
            "rollout/steps": sum(len(t.steps) for t in trajectories) / count,
            "rollout/response_tokens": response / count,
            "rollout/quarantined": float(sum(t.termination.quarantined for t in trajectories)),
            **{f"termination/{kind}": kinds[kind] / count for kind in Termination if kind is not Termination.UNKNOWN},
            "time/rollout_s": self._seconds,
            "rollout/tokens_per_s": response / self._rolling if self._rolling else 0.0,
        }
