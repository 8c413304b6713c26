"""Group advantages (Eq. 1).

Everything is float64: advantages are tiny, and a replay from the archive must match to the bit.

Worked example: rewards [1, -1] have the sample std √2, so the advantages are [0.707, -0.707].
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

__all__ = ["GroupAdvantage", "Std", "standardize"]

Std = Literal["sample", "population"]


class GroupAdvantage(NamedTuple):
    """Advantages of one group of G trajectories."""

    advantages: Tensor  #: [G] float64 A_i; all 0 when `zero_std`
    zero_std: bool  #: the rewards do not differ (std below `zero_below`): the group carries no signal


def standardize(
    rewards: Tensor, *, std: Std = "sample", normalize: bool = True, epsilon: float = 1e-6, zero_below: float = 1e-8
) -> GroupAdvantage:
    """Eq. 1: A_i = (R_i − mean R) / (std R + epsilon) over one group.

    Args:
        rewards: [G] R_i.
        std: divisor G − 1 (`sample`, as in common GRPO code) or G (`population`).
        normalize: False subtracts the mean and does not divide.
        epsilon: avoids a division by zero. Keep it small: a large one shrinks the advantages of small spreads.
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
