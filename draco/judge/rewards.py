"""Verdicts become rewards (Eq. 3) over the criteria that tell the rollouts of a group apart.

Shapes: K criteria, G trajectories of one group. Verdict scores are +1 pass, −1 fail, 0 not applicable. Rewards are
float64 whatever the dtype of the verdicts: a replay from the archive must match to the bit.

Worked example, K = 2, G = 2::

    scores = [[1, -1],      kept: somebody failed it
              [1,  1]]      dropped: everybody passed it
    rewards     [ 1.0,   -1.0  ]
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["dropout", "rewards", "verdict_unanimous"]


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
    """Eq. 3: R_i = (p_i − f_i) / (p_i + f_i) over the kept criteria, and 0 when nothing counts.

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


def verdict_unanimous(scores: Tensor, kept: Tensor) -> Tensor:
    """The paper's inert count (B.3): the kept pass/fail verdicts of a trajectory are all +1, all −1, or there is none.

    Verdicts of 0 count neither way, as in Eq. 3. The mean of the result is the share `inert_verdicts`.

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
