"""The interface of a view."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from draco.core.types import Criterion, Trajectory
from draco.judge.replies import Scored
from draco.judge.transcript import Blocks

__all__ = ["Material", "View"]

#: what stands between the system text and the last words of a prompt, in order
Material = list[str]


class View(ABC):
    """Makes the prompts of one group's calls. Has no state."""

    name: ClassVar[str]  #: the value of `judge.plan`
    joint: ClassVar[bool]  #: True: one `assess` call scores and attributes; False: there is `attribute`

    @abstractmethod
    def messages(self, phase: str, material: Sequence[str], caveats: tuple[str, ...]) -> list[dict[str, str]]:
        """System and user message of a call."""

    @abstractmethod
    def version(self, phase: str) -> str:
        """Hash of the packaged texts that such a call is made of."""

    def propose_task(self, blocks: Blocks, trajectory: Trajectory) -> Material:
        """The opening alone."""
        return [blocks.opening(trajectory)]

    @abstractmethod
    def propose_rollout(self, blocks: Blocks, trajectory: Trajectory, known: Sequence[Criterion]) -> Material:
        """One attempt and the criteria that exist."""

    def candidates(self, proposed: Sequence[Criterion], members: Sequence[Trajectory]) -> tuple[Criterion, ...]:
        """What goes to the merge out of all that was proposed, in order."""
        return tuple(proposed)

    @abstractmethod
    def merge(
        self,
        blocks: Blocks,
        members: Sequence[Trajectory],
        revealed: Mapping[int, Sequence[Criterion]],
        candidates: Sequence[Criterion],
    ) -> Material:
        """All attempts and all candidates; `revealed` are the criteria that each sample's attempt led to."""

    @abstractmethod
    def score(self, blocks: Blocks, trajectory: Trajectory, criteria: Sequence[Criterion]) -> Material:
        """One attempt and the criteria; also for `assess`."""

    def attribute(
        self, blocks: Blocks, trajectory: Trajectory, criteria: Sequence[Criterion], scored: Sequence[Scored]
    ) -> Material:
        """One attempt and the criteria with their verdicts. A joint view has no such call."""
        raise NotImplementedError
