"""Step credit: the advantage of a trajectory, redistributed over the steps that its verdicts cite (Eq. 4–7).

For a trajectory with M steps of n_j > 0 tokens, N = Σ_j n_j, advantage A, and p_j passing and f_j failing criteria
(of those that survived dropout) that cite step j::

    Q_j = p_j / (p_j + f_j)                       Eq. 4; a step that nothing cites takes the mean Q of the cited ones
    w_j = Q_j if A ≥ 0 else 1 − Q_j               Eq. 5
    a_j = A · N · w_j / (n_j · Σ_k w_k)           Eq. 6, for every token of step j, in place of A

so Σ_j n_j a_j = A · N (Eq. 7): credit moves between steps, none is made or lost.

Where the formula does not apply, every step token keeps A, and the reason is reported. `unanimous` is no such case:
with equal positive weights the formula gives every step the same total, a_j = A·N/(n_j·M), which is not the flat A.

Worked example (Appendix E.5), A = 1, n = [2, 4], one criterion that passes on both steps and one that fails on step 1::

    >>> redistribute(1.0, [(1, [1, 2]), (-1, [1])], [2, 4]).per_token
    (1.0, 1.0)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from numbers import Integral
from typing import Literal, NamedTuple

__all__ = ["Reason", "StepCredit", "redistribute", "uniform"]

#: A sum of weights up to this counts as 0.
COLLAPSED_BELOW = 1e-12


class Reason(StrEnum):
    """Why a trajectory got the credit it has. From `no_criteria` to `unanimous`, the first that holds is reported."""

    CREDITED = "credited"  #: Eq. 6 with weights that differ
    NO_CRITERIA = "no_criteria"  #: no criterion survived: uniform A
    UNCITED = "uncited"  #: no pass or fail cites a step: uniform A
    SINGLE_STEP = "single_step"  #: M = 1: A
    COLLAPSED = "collapsed"  #: Σ w = 0, a winner cited only by fails or a loser only by passes: uniform A
    UNANIMOUS = "unanimous"  #: equal positive weights: equal step totals
    UNIFORM = "uniform"  #: the credit rule itself is uniform; `redistribute` never gives it


class StepCredit(NamedTuple):
    """The credit of one trajectory; M steps."""

    per_token: tuple[float, ...]  #: [M] a_j, for every token of step j
    qualities: tuple[float, ...] = ()  #: [M] Q_j in [0, 1]; empty when no step is cited
    reason: Reason = Reason.CREDITED


def redistribute(
    advantage: float,
    citations: Sequence[tuple[int, Sequence[int]]],
    step_tokens: Sequence[int],
    *,
    unanimous: Literal["equal_totals", "uniform"] = "equal_totals",
) -> StepCredit:
    """Eq. 4–7 for one trajectory.

    Args:
        advantage: A_i, the trajectory's advantage.
        citations: (score, steps) of each surviving criterion: score +1 pass, −1 fail, 0 not applicable (its steps are
            ignored), steps as 1-based numbers. Steps outside 1..M are ignored, repeats within a criterion count once.
        step_tokens: [M] n_j > 0, the number of tokens of each step.
        unanimous: what equal positive weights mean: the formula as it stands, or the flat per-token A.

    Raises:
        ValueError: no steps, n_j ≤ 0, a score outside {−1, 0, 1}, numbers that are not integers, a citation that is
            no pair, a non-finite advantage or product A · N, or an unknown `unanimous`.

    Example::

        >>> credit = redistribute(1.0, [(-1, [2]), (1, [1, 2])], [3, 5])
        >>> credit.qualities, credit.reason.value
        ((1.0, 0.5), 'credited')
    """
    flat = uniform(advantage, step_tokens).per_token
    if unanimous not in ("equal_totals", "uniform"):
        raise ValueError(f"expected unanimous 'equal_totals' or 'uniform', got {unanimous!r}")
    advantage, tokens = float(advantage), tuple(step_tokens)
    qualities = _qualities(citations, len(tokens))
    weights = qualities if advantage >= 0 else tuple(1.0 - q for q in qualities)
    total_weight = math.fsum(weights)

    if not citations:
        reason = Reason.NO_CRITERIA
    elif not qualities:
        reason = Reason.UNCITED
    elif len(tokens) == 1:
        reason = Reason.SINGLE_STEP
    elif total_weight <= COLLAPSED_BELOW:
        reason = Reason.COLLAPSED
    elif min(qualities) == max(qualities):  # exact: equal fractions are equal floats, as division rounds correctly
        reason = Reason.UNANIMOUS
    else:
        reason = Reason.CREDITED

    if reason is not Reason.CREDITED and (reason is not Reason.UNANIMOUS or unanimous == "uniform"):
        return StepCredit(flat, qualities, reason)
    mass = advantage * sum(tokens)  # A · N
    if not math.isfinite(mass):
        raise ValueError(f"expected a finite A · N, got {advantage} · {sum(tokens)}")
    return StepCredit(
        tuple(mass * (w / total_weight) / n for w, n in zip(weights, tokens, strict=True)), qualities, reason
    )


def uniform(advantage: float, step_tokens: Sequence[int]) -> StepCredit:
    """The uniform rule: every step token keeps A (plain GRPO). Errors as of `redistribute`."""
    if not math.isfinite(advantage):
        raise ValueError(f"expected a finite advantage, got {advantage}")
    tokens = tuple(step_tokens)
    if not tokens:
        raise ValueError("expected at least one step in step_tokens, got none")
    if not all(isinstance(n, Integral) for n in tokens):
        raise ValueError(f"expected step_tokens as integers, the number of tokens of each step, got {list(tokens)}")
    if min(tokens) <= 0:
        raise ValueError(f"expected every step to have at least one token, got step_tokens={list(tokens)}")
    return StepCredit((float(advantage),) * len(tokens), reason=Reason.UNIFORM)


def _qualities(citations: Sequence[tuple[int, Sequence[int]]], steps: int) -> tuple[float, ...]:
    """Q_j of every step, [M]; empty when no pass or fail cites a step."""
    passes, cited = [0] * steps, [0] * steps
    for citation in citations:
        try:
            score, numbers = citation
            numbers = tuple(numbers)
        except TypeError:
            raise ValueError(f"expected citations as (score, steps) pairs, got {citation!r}") from None
        if not all(isinstance(j, Integral) for j in numbers):
            raise ValueError(f"expected cited steps as integers from 1, got {list(numbers)}")
        if score not in (-1, 0, 1):
            raise ValueError(f"expected a score of -1, 0 or 1, got {score!r}")
        for number in set(numbers) if score else ():
            if 1 <= number <= steps:
                cited[number - 1] += 1
                passes[number - 1] += score == 1
    known = [p / c for p, c in zip(passes, cited, strict=True) if c]
    if not known:
        return ()
    # The mean of equal numbers is taken as exact: no rounding may make them differ.
    mean = known[0] if min(known) == max(known) else math.fsum(known) / len(known)
    return tuple(p / c if c else mean for p, c in zip(passes, cited, strict=True))
