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

__all__ = ["GroupAdvantage", "dropout", "rewards", "standardize", "verdict_unanimous"]


@dataclass(frozen=True, slots=True)
class GroupAdvantage:
    """Advantages of one group."""

    advantages: Tensor  #: [G] float64 A_i; all 0 when `zero_std`
    zero_std: bool  #: the rewards do not differ (std below `zero_below`): the group carries no signal


def dropout(scores: Tensor) -> Tensor:
    """Discriminative dropout: keep a criterion only if at least one member of the group failed it.

    All-pass and all-n.a. criteria go; an all-fail criterion stays.

    Args:
        scores: [K, G] integer verdicts in {−1, 0, 1}; K may be 0.

    Returns:
        [K] bool, True = kept.

    Raises:
        ValueError: not a [K, G] integer tensor, or a score outside {−1, 0, 1}.
    """
    _check_scores(scores)
    return (scores == -1).any(dim=1)


def rewards(scores: Tensor, kept: Tensor) -> Tensor:
    """Eq. 1: R_i = (p_i − f_i) / (p_i + f_i) over the kept criteria, and 0 when nothing counts.

    Args:
        scores: [K, G] integer verdicts in {−1, 0, 1}.
        kept: [K] bool from `dropout`.

    Returns:
        [G] float64 in [−1, 1].

    Raises:
        ValueError: wrong shapes or dtypes, or a score outside {−1, 0, 1}.
    """
    passes, fails = _counts(scores, kept)
    counted = (passes + fails).clamp(min=1)  # p = f = 0 gives 0 / 1 = 0
    return (passes - fails).double() / counted.double()


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


def verdict_unanimous(scores: Tensor, kept: Tensor) -> Tensor:
    """The paper's inert count (B.3): the kept pass/fail verdicts of a trajectory are all +1, all −1, or there is none.

    Verdicts of 0 count neither way, as in Eq. 1. The mean of the result is the share `inert_verdicts`.

    Args:
        scores: [K, G] integer verdicts in {−1, 0, 1}.
        kept: [K] bool from `dropout`.

    Returns:
        [G] bool, True = inert.

    Raises:
        ValueError: wrong shapes or dtypes, or a score outside {−1, 0, 1}.
    """
    passes, fails = _counts(scores, kept)
    return (passes == 0) | (fails == 0)


def _counts(scores: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """p_i and f_i over the kept criteria, each [G] int64."""
    _check_scores(scores)
    if kept.dtype != torch.bool or kept.shape != scores.shape[:1]:
        raise ValueError(f"expected kept as bool [{scores.shape[0]}], got {kept.dtype} {list(kept.shape)}")
    counted = scores[kept]
    return (counted == 1).sum(dim=0), (counted == -1).sum(dim=0)


def _check_scores(scores: Tensor) -> None:
    if scores.ndim != 2 or scores.is_floating_point() or scores.is_complex() or scores.dtype == torch.bool:
        raise ValueError(f"expected integer scores as [K, G], got {scores.dtype} {list(scores.shape)}")
    if bool(((scores < -1) | (scores > 1)).any()):
        raise ValueError(f"expected scores in -1, 0, 1, got {sorted(set(scores.flatten().tolist()))}")
