"""A new credit rule in one class: later steps weigh more.

    w_j = γ^(M − j),    a_j = A · N · w_j / (n_j · Σ_k w_k)

As in every rule here, credit moves between steps and none is made: Σ_j n_j a_j = A · N.
"""

from typing import Any

from draco.core.types import Judgement
from draco.credit.base import GroupCredit
from draco.credit.redistribution import StepCredit


class DiscountedCredit(GroupCredit):
    """Credit that decays towards the start of the episode."""

    def __init__(self, gamma: float = 0.9, **options: Any) -> None:
        super().__init__(**options)
        self.gamma = gamma

    def credit(self, judgement: Judgement, member: int, advantage: float) -> StepCredit:
        tokens = judgement.group.trajectories[member].step_tokens
        weights = [self.gamma**j for j in range(len(tokens))][::-1]
        scale = advantage * sum(tokens) / sum(weights)
        return StepCredit(tuple(scale * w / n for w, n in zip(weights, tokens, strict=True)))
