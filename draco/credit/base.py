"""What every credit rule shares: group advantages, and one `Credit` for each judgement. A rule adds one method.

class MyCredit(GroupCredit):
    def credit(self, judgement, member, advantage): ...    # → draco.credit.redistribution.StepCredit
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from draco.config.options import NonNegative, checked
from draco.core.types import Credit, Failure, Judgement
from draco.credit.advantage import Std, standardize
from draco.credit.redistribution import StepCredit
from draco.stages import CreditStage

__all__ = ["GroupCredit"]


@checked("advantage")
class GroupCredit(CreditStage):
    """Standardises rewards within the group (Eq. 1), then asks the rule for the step credit of every member.

    Args:
        std: divisor of the std: G − 1 (`sample`) or G (`population`).
        normalize: divide by the std; False subtracts the mean alone.
        epsilon: added to the std.

    Raises:
        ConfigError: an option is out of its range.
    """

    def __init__(self, *, std: Std = "sample", normalize: bool = True, epsilon: NonNegative = 1e-6) -> None:
        self.std, self.normalize, self.epsilon = std, normalize, epsilon

    def assign(self, judged: Iterable[Judgement]) -> Iterator[Credit]:
        for judgement in judged:
            yield self.assign_one(judgement)

    def assign_one(self, judgement: Judgement) -> Credit:
        """Credit of one group. A group of fewer than 2 has nothing to compare: it is skipped, as an empty credit."""
        if len(judgement.group.trajectories) < 2:
            return Credit(_emptied(judgement), (), (), (), ())
        rewards = torch.tensor(judgement.rewards, dtype=torch.float64)
        group = standardize(rewards, std=self.std, normalize=self.normalize, epsilon=self.epsilon)
        advantages = tuple(group.advantages.tolist())
        credits = [self.credit(judgement, i, a) for i, a in enumerate(advantages)]
        return Credit(
            judgement=judgement,
            advantages=advantages,
            step_advantages=tuple(c.per_token for c in credits),
            qualities=tuple(c.qualities for c in credits),
            reasons=tuple(str(c.reason) for c in credits),
            zero_std=group.zero_std,
        )

    @abstractmethod
    def credit(self, judgement: Judgement, member: int, advantage: float) -> StepCredit:
        """Step credit of one member.

        Args:
            judgement: the group's judgement.
            member: index into `judgement.group.trajectories`.
            advantage: A_i.
        """


def _emptied(judgement: Judgement) -> Judgement:
    alone = [Failure(t.sample, "group", "alone in its group") for t in judgement.group.trajectories]
    return replace(
        judgement,
        group=replace(judgement.group, trajectories=()),
        verdicts=tuple(() for _ in judgement.criteria),
        rewards=(),
        failures=(*judgement.failures, *alone),
    )
