"""The three pluggable stages of a step, as Lightning callbacks with one verb each.

    groups   = rollout.generate(policy, batch)     # Iterator[Group]
    judged   = rubric.judge(groups)                # Iterator[Judgement]
    credited = credit.assign(judged)               # Iterator[Credit]

Stages are streams: a group is judged while others still roll out. Order is the program text of
`GRPOModule.training_step`; the order of Lightning's callback list does not matter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from lightning.pytorch.callbacks import Callback

from draco.core.errors import StageError
from draco.core.types import Credit, Group, Judgement, TaskBatch

if TYPE_CHECKING:
    from draco.policy.policy import Policy

__all__ = ["CreditStage", "RolloutStage", "RubricStage", "find_stage"]


class RolloutStage(Callback, ABC):
    """Samples G trajectories for every task of a batch."""

    #: mean |Δ log-prob| between engine and trainer, nats a token, that no batch may exceed; None = any
    max_mismatch: float | None = None
    #: the update waits until a whole batch is judged, and for `rest`
    rests: bool = False
    #: 1: `begin` starts the next batch before this one is judged and trained; 0: every batch is sampled by the weights
    #: that it updates
    staleness: int = 0

    @abstractmethod
    def generate(self, policy: Policy, batch: TaskBatch) -> Iterator[Group]:
        """Yield each group as soon as its last trajectory ends; every task of the batch exactly once."""

    def begin(self, policy: Policy, batch: TaskBatch) -> None:
        """Start the next batch in the background, by the weights of now; the `generate` of that batch goes on with it.

        Called where `staleness` is 1 and this batch is rolled out, on every rank; after the last batch without tasks.
        """

    def rest(self) -> None:
        """A batch is rolled out and judged: make room for the update."""

    def take_groups(self) -> list[Group]:
        """Groups of the last batch, quarantined trajectories included, for the archive; empties the store."""
        return []

    def take_metrics(self) -> dict[str, float]:
        """Metrics of the last batch; empties the store."""
        return {}


class RubricStage(Callback, ABC):
    """Turns groups into rewards."""

    #: set by the module at setup from the credit stage: False lets the stage skip attribution calls
    needs_citations: bool = True
    #: True where verdicts with cited steps exist at all (False for outcome and random rewards)
    gives_citations: bool = True

    @abstractmethod
    def judge(self, groups: Iterable[Group]) -> Iterator[Judgement]:
        """Drain `groups` eagerly and yield one judgement a group, each as soon as it is complete."""

    def take_records(self) -> list[Any]:
        """Judge call records (`draco.judge.records.CallRecord`) of the last batch, for the archive; empties it."""
        return []

    def take_metrics(self) -> dict[str, float]:
        """Metrics of the last batch; empties the store."""
        return {}


class CreditStage(Callback, ABC):
    """Turns rewards into an advantage for every step."""

    #: True if the stage uses the steps that verdicts cite
    needs_citations: bool = False

    @abstractmethod
    def assign(self, judged: Iterable[Judgement]) -> Iterator[Credit]:
        """Yield one credit a judgement, in the order of arrival."""


S = TypeVar("S", RolloutStage, RubricStage, CreditStage)


def find_stage(callbacks: Iterable[Callback], kind: type[S]) -> S:
    """Return the one callback that is a `kind`.

    Raises:
        StageError: none or several are present; the message lists what exists.
    """
    callbacks = [c for c in callbacks if c is not None]  # a stage that the configuration sets to null
    found = [c for c in callbacks if isinstance(c, kind)]
    if len(found) == 1:
        return found[0]
    present = ", ".join(type(c).__name__ for c in callbacks) or "none"
    what = "no" if not found else f"{len(found)} ({', '.join(type(c).__name__ for c in found)})"
    raise StageError(f"expected exactly one {kind.__name__} among the callbacks, found {what}; callbacks: {present}")
