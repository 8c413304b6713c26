"""Dynamic rubric: criteria written for this task from what its own rollouts got wrong (Section 3.2).

    propose(task) ∪ propose(rollout 1) ∪ … ∪ propose(rollout G) → merge → score → dropout
    R_i = (p_i − f_i) / (p_i + f_i) over the criteria that survive

Why: soon every rollout passes a fixed set, which then no longer tells them apart. Criteria written from the
shortcomings of the current policy keep failing some rollouts, and so keep giving a signal.

Checkpoints save the proposals that `propose_cache=run` reuses; with `propose_cache=group` there is no state.
"""

from __future__ import annotations

from draco.core.types import Group
from draco.judge.stage import JudgedRubric

__all__ = ["DynamicRubric"]


class DynamicRubric(JudgedRubric):
    """Criteria are proposed for every group."""

    def criteria(self, group: Group) -> None:
        """None: the judge writes criteria for every group."""
        return
