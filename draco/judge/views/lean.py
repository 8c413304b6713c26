"""`judge.plan=lean`: fewer calls, and longer common prefixes of prompts.

    propose_task (1) → propose_rollout (G) → merge (1) → assess (G)      14 calls for G = 6

Score and attribution are one call. The merge sees a digest of every attempt, with those steps in full that the
proposals' evidence names. Of candidates that differ in wording alone, it sees one. The instructions of all calls are in
the system text; it is followed by the opening of a task and the steps of an attempt. So a prompt begins like most
earlier ones, and a provider's prefix cache can hold that part.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from draco.core.types import Criterion, Trajectory
from draco.judge.prompts import criteria_block
from draco.judge.transcript import Blocks
from draco.judge.views.dedup import distinct, vocabulary
from draco.judge.views.paper import Material, PaperView

__all__ = ["LeanView", "named_steps"]

_STEPS = re.compile(r"\bsteps?\b[^\d\n]{0,8}(\d+(?:\s*(?:,|-|–|to|and|or|&)+\s*\d+)*)", re.IGNORECASE)
_RANGE = re.compile(r"(\d+)(?:\s*(?:-|–|to)\s*(\d+))?")
_LONGEST_RANGE = 10  # "steps 2-40" points at nothing


class LeanView(PaperView):
    """About half of the paper view's tokens, or less."""

    name = "lean"
    lean = True

    def propose_rollout(self, blocks: Blocks, trajectory: Trajectory, known: Sequence[Criterion]) -> Material:
        listed = criteria_block(known, "Existing criteria", without=("evaluator_instruction", "grounding_references"))
        return [blocks.opening(trajectory), blocks.steps(trajectory), listed]

    def candidates(self, proposed: Sequence[Criterion], members: Sequence[Trajectory]) -> tuple[Criterion, ...]:
        return distinct(proposed, vocabulary(members))

    def merge(
        self,
        blocks: Blocks,
        members: Sequence[Trajectory],
        revealed: Mapping[int, Sequence[Criterion]],
        candidates: Sequence[Criterion],
    ) -> Material:
        attempts = [
            f"Attempt {i}\n{blocks.digest(t, named_steps(c.evidence for c in revealed.get(t.sample, ())))}"
            for i, t in enumerate(members, start=1)
        ]
        return [blocks.opening(members[0]), *attempts, criteria_block(candidates, "Candidate criteria")]

    def score(self, blocks: Blocks, trajectory: Trajectory, criteria: Sequence[Criterion]) -> Material:
        listed = criteria_block(criteria, "Criteria", without=("grounding_references", "evidence"))
        return [blocks.opening(trajectory), blocks.steps(trajectory), listed]


def named_steps(texts: Iterable[str]) -> frozenset[int]:
    """Numbers of the steps that texts name.

    >>> sorted(named_steps(["broken at step 4", "steps 7-9, 12 and 14; 3 mails", "Step(s) 20"]))
    [4, 7, 8, 9, 12, 14, 20]
    """
    found: set[int] = set()
    for text in texts:
        for listed in _STEPS.findall(text):
            for first, last in _RANGE.findall(listed):
                low, high = int(first), int(last or first)
                if low <= high < low + _LONGEST_RANGE:
                    found.update(range(low, high + 1))
    return frozenset(found)
