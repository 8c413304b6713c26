"""Rewards and group advantages (method: Eq. 1 and 3, discriminative dropout).

Shapes: K criteria, G trajectories of one group. Verdict scores are +1 pass, −1 fail, 0 not applicable. Rewards and
advantages are float64 whatever the verdicts' dtype: they are tiny, and a replay from the archive must match to the bit.

Worked example, K = 2, G = 2::

    scores = [[1, -1],      kept: somebody failed it
              [1,  1]]      dropped: everybody passed it
    rewards     [ 1.0,   -1.0  ]
    advantages  [ 0.707, -0.707]    sample std = sqrt(2)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = [
    "GroupAdvantage",
    "standardize",
]


@dataclass(frozen=True, slots=True)
class GroupAdvantage:
    """Advantages of one group."""

    advantages: Tensor  #: [G] float64 A_i; all 0 when `zero_std`
    zero_std: bool  #: the rewards do not differ (std below `zero_below`): the group carries no signal


def standardize(
    rewards: Tensor,
    *,
    std: Literal["sample", "population"] = "sample",
    normalize: bool = True,
    epsilon: float = 1e-6,
    zero_below: float = 1e-8,
) -> GroupAdvantage:
    """Eq. 3: A_i = (R_i − mean R) / (std R + epsilon) over one group.

    Args:
        rewards: [G] R_i.
        std: divisor G − 1 (`sample`, as in common GRPO code) or G (`population`).
        normalize: False subtracts the mean and does not divide.
        epsilon: guards the division; never a large one, which would shrink small spreads.
        zero_below: a group whose std is below it has A_i = 0 for all.

    Raises:
        ValueError: fewer than 2 rewards, a non-finite reward, or an unknown `std`.
    """
    if rewards.ndim != 1 or rewards.numel() < 2:
        raise ValueError(f"expected at least 2 rewards of one group as [G], got shape {list(rewards.shape)}")
    if std not in ("sample", "population"):
        raise ValueError(f"expected std 'sample' or 'population', got {std!r}")
    values = rewards.double()
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"expected finite rewards, got {values.tolist()}")
    centred = values - values.mean()
    spread = values.std(correction=1 if std == "sample" else 0)
    if float(spread) < zero_below:
        return GroupAdvantage(torch.zeros_like(values), zero_std=True)
    return GroupAdvantage(centred / (spread + epsilon) if normalize else centred, zero_std=False)
