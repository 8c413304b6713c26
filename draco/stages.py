"""The contract of a step: three stages, which are Lightning callbacks with one verb each.

    groups   = rollout.generate(policy, batch)     # Iterator[Group]: each as soon as its last trajectory ends
    judged   = rubric.judge(groups)                # Iterator[Judgement]: each as soon as it is complete
    credited = credit.assign(judged)               # Iterator[Credit]: in order of arrival

A run calls every stage in this order (from `draco.run.build.Parts`; the verb and `take` from `draco.module`):

    open(context)    keep what is needed of the run; load nothing, spend nothing
    check()          find in seconds what cannot work; on rank 0 only, before weights are loaded
    ready(policy)    the weights are loaded: start what needs them, such as servers; on every rank
    the verb         once for every batch
    take()           hand over metrics and records of the batch, after its update
    close()          release everything; open() may follow again

Capabilities of a stage are attributes, and all of them are declared here. Stages work as streams: a group is judged
while others still roll out. The order of Lightning's callback list does not matter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lightning.pytorch.callbacks import Callback

from draco.core.errors import StageError
from draco.core.types import Credit, Group, Judgement, TaskBatch
from draco.policy.policy import Policy
from draco.rollout.engines.base import Engine

__all__ = ["CreditStage", "RolloutStage", "RubricStage", "RunContext", "Stage", "Stages", "Taken"]


@dataclass(frozen=True, slots=True)
class RunContext:
    """What a stage may know of its run. The defaults are for tools that judge without a run."""

    folder: Path | None = None  #: run folder; None: keep nothing
    seed: int = 0  #: of the run
    temperature: float = 1.0  #: of training rollouts
    caveats: tuple[str, ...] = ()  #: notes of the environment for every judge
    secret: bytes = b""  #: key of the delimiters around transcripts, at least 16 bytes; empty: a random one
    needs_citations: bool = True  #: the credit stage uses the steps that verdicts cite
    engine: Engine | None = None  #: samples the rollouts; also answers judge calls of a policy that judges itself
    #: batch → this rank's part of the next training batch; it has no tasks after the last batch
    next_batch: Callable[[TaskBatch], TaskBatch] | None = None


@dataclass(slots=True)
class Taken:
    """What a stage hands over after a batch."""

    metrics: dict[str, float] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)  #: as rolled out, quarantined trajectories included
    calls: list[Any] = field(default_factory=list)  #: judge calls (`draco.judge.records.CallRecord`), every attempt


class Stage(Callback, ABC):
    """The life cycle that all stages share. Every method is optional except the verb of the kind."""

    def open(self, context: RunContext) -> None:
        """Keep what the stage needs of the context."""

    def check(self) -> None:
        """Find in seconds what cannot work.

        Raises:
            ConfigError: one line that says what to do.
        """

    def ready(self, policy: Policy) -> None:
        """The weights are loaded: start what needs them.

        Raises:
            ConfigError: it cannot work with this policy.
        """

    def take(self) -> Taken:
        """Metrics and records since the last call."""
        return Taken()

    def close(self) -> None:
        """Release everything. Safe to call twice."""


class RolloutStage(Stage):
    """Samples G trajectories for every task of a batch."""

    #: largest mean |Δ log-prob| between engine and trainer in a batch, in nats per token; None = any
    max_mismatch: float | None = None
    #: before an update, the batch must be judged completely, and `free_memory` be called
    frees_memory: bool = False

    @abstractmethod
    def generate(self, policy: Policy, batch: TaskBatch) -> Iterator[Group]:
        """Yield each group as soon as its last trajectory ends; every task of the batch exactly once."""

    def free_memory(self) -> None:
        """The batch is judged: free memory for the update. Called on every rank at the same point."""


class RubricStage(Stage):
    """Turns groups into rewards."""

    #: verdicts cite steps; False for rewards without verdicts
    gives_citations: bool = True
    #: the policy itself is the judge, so it answers only after its weights are loaded
    asks_policy: bool = False

    @abstractmethod
    def judge(self, groups: Iterable[Group]) -> Iterator[Judgement]:
        """Consume `groups` without delay, and yield one judgement for each as soon as it is complete."""


class CreditStage(Stage):
    """Turns rewards into an advantage for every step."""

    #: uses the steps that verdicts cite; if False, the rubric stage makes no attribution calls
    needs_citations: bool = False

    @abstractmethod
    def assign(self, judged: Iterable[Judgement]) -> Iterator[Credit]:
        """Yield one credit for each judgement, in order of arrival."""


S = TypeVar("S", bound=Stage)


class Stages(NamedTuple):
    """The three stages of a run, in the order of the step."""

    rollout: RolloutStage
    rubric: RubricStage
    credit: CreditStage

    @classmethod
    def of(cls, callbacks: Iterable[Callback | None]) -> Stages:
        """Find the one stage of each kind.

        Raises:
            StageError: a kind is missing or present twice; the message lists the callbacks.
        """
        present = [c for c in callbacks if c is not None]  # the configuration may set a callback to null
        kinds: tuple[Any, ...] = (RolloutStage, RubricStage, CreditStage)
        return cls(*(_only(present, kind) for kind in kinds))


def _only(callbacks: list[Callback], kind: type[S]) -> S:
    found = [c for c in callbacks if isinstance(c, kind)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(type(c).__name__ for c in callbacks) or "none"
    what = "no" if not found else f"{len(found)} ({', '.join(type(c).__name__ for c in found)})"
    raise StageError(f"expected exactly one {kind.__name__} among the callbacks, found {what}; callbacks: {names}")
