"""Dynamic rubric: criteria written for this task from what its own rollouts got wrong (DRACO, Section 3).

    propose(task) ∪ propose(rollout 1) ∪ … ∪ propose(rollout G) → merge → score → dropout
    R_i = (p_i − f_i) / (p_i + f_i) over the criteria that survive

Why: a fixed set is soon passed by every rollout and then tells none from another; criteria that are made from the
current policy's shortcomings keep failing somebody, and so keep giving a signal.

A restart keeps the proposals that `propose_cache="run"` reuses. With `propose_cache="group"` there is nothing to keep.
"""

from __future__ import annotations

from draco.core.types import Group
from draco.judge.stage import JudgedRubric

__all__ = ["DynamicRubric"]


class DynamicRubric(JudgedRubric):
    """Has a set proposed for every group."""

    def criteria(self, group: Group) -> None:
        """No fixed set."""
        return
