"""`judge.plan=paper`: five kinds of call, every attempt in full wherever it is shown (Section 3.2, Appendix F).

propose_task (1) → propose_rollout (G) → merge (1) → score (G) → attribute (G)      20 calls for G = 6
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from draco.core.types import Criterion, Trajectory
from draco.judge.prompts import criteria_block
from draco.judge.replies import Scored
from draco.judge.transcript import Blocks

__all__ = ["Material", "PaperView"]

#: what stands between the system text and the last words of a prompt, in order
Material = list[str]


class PaperView:
    """What the prompts of one group's calls show. Has no state; other views change some of it."""

    name: ClassVar[str] = "paper"  #: the value of `judge.plan`
    #: True: one `assess` call scores and attributes; the system text has the instructions of all calls
    lean: ClassVar[bool] = False

    def propose_task(self, blocks: Blocks, trajectory: Trajectory) -> Material:
        """The opening alone."""
        return [blocks.opening(trajectory)]

    def propose_rollout(self, blocks: Blocks, trajectory: Trajectory, known: Sequence[Criterion]) -> Material:
        """One attempt and the criteria that exist."""
        return [blocks.transcript(trajectory), criteria_block(known, "Existing criteria")]

    def candidates(self, proposed: Sequence[Criterion], members: Sequence[Trajectory]) -> tuple[Criterion, ...]:
        """What goes to the merge out of all that was proposed, in order."""
        return tuple(proposed)

    def merge(
        self,
        blocks: Blocks,
        members: Sequence[Trajectory],
        revealed: Mapping[int, Sequence[Criterion]],
        candidates: Sequence[Criterion],
    ) -> Material:
        """All attempts and all candidates; `revealed` are the criteria that each sample's attempt led to."""
        attempts = [f"Attempt {i}\n{blocks.transcript(t)}" for i, t in enumerate(members, start=1)]
        return [*attempts, criteria_block(candidates, "Candidate criteria")]

    def score(self, blocks: Blocks, trajectory: Trajectory, criteria: Sequence[Criterion]) -> Material:
        """One attempt and the criteria; also for `assess`."""
        return [blocks.transcript(trajectory), criteria_block(criteria, "Criteria")]

    def attribute(
        self, blocks: Blocks, trajectory: Trajectory, criteria: Sequence[Criterion], scored: Sequence[Scored]
    ) -> Material:
        """One attempt and the criteria with their verdicts. A lean view has no such call."""
        given = [{"score": s.score, "justification": s.justification} for s in scored]
        return [blocks.transcript(trajectory), criteria_block(criteria, "Criteria with verdicts", given)]
