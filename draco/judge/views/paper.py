"""`judge.plan=paper`: five kinds of call, every attempt in full wherever it is shown (DRACO, Section 3).

propose_task (1) → propose_rollout (G) → merge (1) → score (G) → attribute (G)      20 calls for G = 6
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from draco.core.types import Criterion, Trajectory
from draco.judge.prompts import criteria_block, messages, prompt_version
from draco.judge.replies import Scored
from draco.judge.transcript import Blocks
from draco.judge.views.base import Material, View

__all__ = ["PaperView"]


class PaperView(View):
    """As published."""

    name = "paper"
    joint = False

    def messages(self, phase: str, material: Sequence[str], caveats: tuple[str, ...]) -> list[dict[str, str]]:
        return messages(phase, material, caveats)

    def version(self, phase: str) -> str:
        return prompt_version(phase)

    def propose_rollout(self, blocks: Blocks, trajectory: Trajectory, known: Sequence[Criterion]) -> Material:
        return [blocks.transcript(trajectory), criteria_block(known, "Existing criteria")]

    def merge(
        self,
        blocks: Blocks,
        members: Sequence[Trajectory],
        revealed: Mapping[int, Sequence[Criterion]],
        candidates: Sequence[Criterion],
    ) -> Material:
        attempts = [f"Attempt {i}\n{blocks.transcript(t)}" for i, t in enumerate(members, start=1)]
        return [*attempts, criteria_block(candidates, "Candidate criteria")]

    def score(self, blocks: Blocks, trajectory: Trajectory, criteria: Sequence[Criterion]) -> Material:
        return [blocks.transcript(trajectory), criteria_block(criteria, "Criteria")]

    def attribute(
        self, blocks: Blocks, trajectory: Trajectory, criteria: Sequence[Criterion], scored: Sequence[Scored]
    ) -> Material:
        given = [{"score": s.score, "justification": s.justification} for s in scored]
        return [blocks.transcript(trajectory), criteria_block(criteria, "Criteria with verdicts", given)]
