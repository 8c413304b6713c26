"""A new credit rule in one class: later steps weigh more.

    w_j = γ^(M − j),    a_j = A_i · N · w_j / (n_j · Σ_k w_k)

As every rule here it moves credit between steps and makes none: Σ_j n_j a_j = A_i · N.
"""

from __future__ import annotations

from draco.core.types import Judgement
from draco.credit.base import GroupCredit
from draco.credit.redistribution import StepCredit

__all__ = ["DiscountedCredit"]


class DiscountedCredit(GroupCredit):
    """Credit that decays towards the start of the episode."""

    def __init__(self, gamma: float = 0.9, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.gamma = gamma

    def credit(self, judgement: Judgement, member: int, advantage: float) -> StepCredit:
        tokens = judgement.group.trajectories[member].step_tokens
        weights = [self.gamma ** (len(tokens) - j) for j in range(1, len(tokens) + 1)]
        scale = advantage * sum(tokens) / sum(weights)
        return StepCredit(tuple(scale * w / n for w, n in zip(weights, tokens, strict=True)))
