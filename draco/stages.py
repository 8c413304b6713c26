"""The contract of a step: three stages, Lightning callbacks with one verb each.

    groups   = rollout.generate(policy, batch)     # Iterator[Group]: each as its last trajectory ends
    judged   = rubric.judge(groups)                # Iterator[Judgement]: each as soon as it is complete
    credited = credit.assign(judged)               # Iterator[Credit], in the order of arrival

The run calls every stage in this order (`draco.run.build.Parts` is the only caller):

    open(context)    keep what the run offers; nothing is loaded and nothing is paid for
    check()          find in seconds what cannot work; rank 0 alone, before any weights are loaded
    ready(policy)    the weights are loaded: start what needs them, such as servers; on every rank
    the verb         once a batch
    take()           metrics and records of the last batch, after the update
    close()          release everything; open() may follow again

What a stage can do is an attribute of its class. Nothing asks a stage for attributes that are not declared here.
Stages are streams: a group is judged while others still roll out. The order of Lightning's callback list does not
matter.
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
    """What a run offers to its stages. The defaults are those of a tool that judges without a run."""

    folder: Path | None = None  #: run folder; None: nothing is kept
    seed: int = 0  #: of the run
    temperature: float = 1.0  #: of training rollouts
    caveats: tuple[str, ...] = ()  #: what the environment tells every judge
    secret: bytes = b""  #: of the delimiters around transcripts, at least 16 bytes; empty: a random one
    needs_citations: bool = True  #: the credit stage uses the steps that verdicts cite
    engine: Engine | None = None  #: what samples rollouts, for a policy that judges itself
    #: this rank's part of the batch that follows a training batch; without tasks after the last one
    next_batch: Callable[[TaskBatch], TaskBatch] | None = None


@dataclass(slots=True)
class Taken:
    """What a stage hands over after a batch. It keeps none of it."""

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

    #: mean |Δ log-prob| between engine and trainer, nats a token, that no batch may exceed; None = any
    max_mismatch: float | None = None
    #: the update must wait until the whole batch is judged, and call `rest` first
    rests: bool = False

    @abstractmethod
    def generate(self, policy: Policy, batch: TaskBatch) -> Iterator[Group]:
        """Yield each group as soon as its last trajectory ends; every task of the batch exactly once."""

    def rest(self) -> None:
        """The batch is rolled out and judged: make room for the update. On every rank at the same place."""


class RubricStage(Stage):
    """Turns groups into rewards."""

    #: verdicts cite steps (not where the reward is an outcome or random)
    gives_citations: bool = True
    #: the policy itself is the judge: nothing can be asked before its weights are loaded
    asks_policy: bool = False

    @abstractmethod
    def judge(self, groups: Iterable[Group]) -> Iterator[Judgement]:
        """Drain `groups` eagerly and yield one judgement a group, each as soon as it is complete."""


class CreditStage(Stage):
    """Turns rewards into an advantage for every step."""

    #: the rule uses the steps that verdicts cite; without it the rubric stage skips the attribution calls
    needs_citations: bool = False

    @abstractmethod
    def assign(self, judged: Iterable[Judgement]) -> Iterator[Credit]:
        """Yield one credit a judgement, in the order of arrival."""


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
            StageError: a kind is missing or there twice; the message lists what exists.
        """
        present = [c for c in callbacks if c is not None]  # a stage that the configuration sets to null
        kinds: tuple[Any, ...] = (RolloutStage, RubricStage, CreditStage)
        return cls(*(_only(present, kind) for kind in kinds))


def _only(callbacks: list[Callback], kind: type[S]) -> S:
    found = [c for c in callbacks if isinstance(c, kind)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(type(c).__name__ for c in callbacks) or "none"
    what = "no" if not found else f"{len(found)} ({', '.join(type(c).__name__ for c in found)})"
    raise StageError(f"expected exactly one {kind.__name__} among the callbacks, found {what}; callbacks: {names}")
