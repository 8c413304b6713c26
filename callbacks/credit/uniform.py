"""Uniform credit: every step token of trajectory i gets A_i (plain GRPO).

    A_i = (R_i − mean R) / (std R + ε)        Eq. 1, over the members left in the group

Why: the baseline for step credit. It needs no citations, so the rubric stage makes no attribution calls. A checkpoint
need not save any state.
"""

from __future__ import annotations

from draco.core.types import Judgement
from draco.credit.base import GroupCredit
from draco.credit.redistribution import StepCredit, uniform

__all__ = ["UniformCredit"]


class UniformCredit(GroupCredit):
    """a_j = A_i for every step j."""

    needs_citations = False

    def credit(self, judgement: Judgement, member: int, advantage: float) -> StepCredit:
        return uniform(advantage, judgement.group.trajectories[member].step_tokens)
