"""Rollouts: G episodes of every task, sampled by an engine.

Every trajectory has its own random generator, keyed by (seed, purpose, step, task, sample). So results do not depend on
the layout of a batch or on the order of arrival, and a checkpoint need not save any state.

With `engine.staleness=1` the next batch starts before the current one is judged and trained, with the current weights.
The first batch of a run, and the first after a resume, is sampled with the weights that it then updates.
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
from draco.stages import RolloutStage, RunContext, Taken

__all__ = ["AgentRollout"]


@dataclass(frozen=True, slots=True)
class _Started:
    """A batch whose rollouts have started."""

    batch: TaskBatch
    finished: dict[int, list[Trajectory]]  #: by index of the task
    rollouts: list[Rollout]
    ended: Iterator[Rollout]
    since: float  #: monotonic clock


class AgentRollout(RolloutStage):
    """Opens the episodes of a batch and lets the engine drive them.

    Args:
        environment: opens the episodes; the stage never gets the evaluator.
        engine: samples.
        limits: of one rollout.
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
        self.max_mismatch, self.frees_memory = engine.max_mismatch, engine.frees_memory
        self._context = RunContext()
        self._groups: list[Group] = []
        self._seconds = 0.0  #: seconds of waiting for rollouts
        self._rolling = 0.0  #: seconds from the start of the batch to the end of its last rollout
        self._ahead: _Started | None = None

    # --- life cycle -------------------------------------------------------------------------------------------------

    def open(self, context: RunContext) -> None:
        self._context = context

    def check(self) -> None:
        """Check the environment and the engine."""
        self.environment.check()
        self.engine.check()

    def ready(self, policy: Policy) -> None:
        assert self._context.folder is not None, "rollouts need a folder for logs and adapters of servers"
        self.engine.open(policy, self._context.folder, temperature=self._context.temperature)

    def free_memory(self) -> None:
        self.engine.free_memory()

    def close(self) -> None:
        self.engine.close()
        self.environment.close()

    # --- a batch ----------------------------------------------------------------------------------------------------

    def generate(self, policy: Policy, batch: TaskBatch) -> Iterator[Group]:
        self._groups, self._seconds, self._rolling = [], 0.0, 0.0
        groups = self._finish(policy, batch)
        if self.engine.staleness and batch.purpose == "train":
            groups = iter(list(groups))
            started = time.perf_counter()
            assert self._context.next_batch is not None, "engine.staleness=1 needs an open run"
            self._ahead = self._start(policy, self._context.next_batch(batch), self.engine.begin)
            self._seconds += time.perf_counter() - started
        yield from groups

    def _finish(self, policy: Policy, batch: TaskBatch) -> Iterator[Group]:
        """The groups of a batch as they become complete. The batch may have been started earlier."""
        started = time.perf_counter()
        ahead = self._ahead if self._ahead is not None and self._ahead.batch == batch else None
        if ahead is not None:  # an evaluation in between is another batch
            self._ahead = None
        running = ahead or self._start(policy, batch, self.engine.run)
        finished = running.finished
        ready = [i for i, done in finished.items() if len(done) == batch.group_size]
        for index in ready:
            yield self._group(batch, index, finished[index])
        for rollout in running.ended:
            done = finished[rollout.group_index]
            done.append(rollout.trajectory())
            if len(done) == batch.group_size:
                self._seconds += time.perf_counter() - started
                yield self._group(batch, rollout.group_index, done)
                started = time.perf_counter()
        self._seconds += time.perf_counter() - started
        last = max((r.ended for r in running.rollouts if r.ended is not None), default=running.since)
        self._rolling = last - running.since if ahead else self._seconds

    def _start(self, policy: Policy, batch: TaskBatch, drive: Callable[..., Iterator[Rollout]]) -> _Started:
        finished: dict[int, list[Trajectory]] = {i: [] for i in range(len(batch.tasks))}
        rollouts: list[Rollout] = []
        for index, task in enumerate(batch.tasks):
            for sample in range(batch.group_size):
                opened = self._episode(policy, batch, task, index, sample)
                if isinstance(opened, Rollout):
                    rollouts.append(opened)
                else:
                    finished[index].append(opened)
        ended = drive(policy, rollouts, temperature=batch.temperature)
        return _Started(batch, finished, rollouts, ended, time.monotonic())

    def _episode(self, policy: Policy, batch: TaskBatch, task: Task, index: int, sample: int) -> Rollout | Trajectory:
        """A rollout, or a quarantined trajectory if the environment could not open the task."""
        seed = sampling_seed(self.seed, batch.purpose, batch.step, task.id, sample)
        try:
            episode = self.environment.open(task, seed=seed)
        except Exception as error:  # a fault of the environment does not end the run
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

    def take(self) -> Taken:
        trajectories = [t for g in self._groups for t in g.trajectories]
        count = max(len(trajectories), 1)
        kinds = Counter(t.termination for t in trajectories)
        response = sum(len(t.token_ids) - t.prompt_tokens for t in trajectories)
        metrics = self.engine.take_metrics() | {
            "rollout/count": float(len(trajectories)),
            "rollout/turns": sum(t.steps[-1].turn for t in trajectories if t.steps) / count,
            "rollout/steps": sum(len(t.steps) for t in trajectories) / count,
            "rollout/response_tokens": response / count,
            "rollout/quarantined": float(sum(t.termination.quarantined for t in trajectories)),
            **{f"termination/{kind}": kinds[kind] / count for kind in Termination if kind is not Termination.UNKNOWN},
            "time/rollout_s": self._seconds,
            "rollout/tokens_per_s": response / self._rolling if self._rolling else 0.0,
        }
        groups, self._groups = sorted(self._groups, key=lambda g: g.index), []
        return Taken(metrics, groups)
