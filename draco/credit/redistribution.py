"""Step credit: one advantage, redistributed over the steps that the judge's verdicts implicate (method: Eq. 4–7).

For a trajectory with M steps of n_j > 0 tokens, N = Σ_j n_j, advantage A, and p_j passing and f_j failing surviving
criteria that cite step j::

    Q_j = p_j / (p_j + f_j)                       Eq. 4; a step that nothing cites takes the mean Q of the cited ones
    w_j = Q_j if A ≥ 0 else 1 − Q_j               Eq. 5, 6
    a_j = A · N · w_j / (n_j · Σ_k w_k)           Eq. 7, for every token of step j, in place of A

so Σ_j n_j a_j = A · N: credit moves between steps, none is made or lost.

Where the formula does not apply, every step token keeps A and the reason is counted. `unanimous` is no fallback: with
equal positive weights the formula equalises step *totals*, a_j = A·N/(n_j·M), which is not the flat per-token A.

Worked example (paper, E.5), A = 1, n = [2, 4], one criterion that passes on both steps and one that fails on step 1::

    >>> redistribute(1.0, [(1, [1, 2]), (-1, [1])], [2, 4]).per_token
    (1.0, 1.0)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from numbers import Integral
from typing import Literal

__all__ = ["Reason", "StepCredit", "redistribute", "uniform"]

#: A sum of weights up to this is no weight at all.
COLLAPSED_BELOW = 1e-12


class Reason(StrEnum):
    """Why a trajectory got the credit it has. From `no_criteria` to `unanimous`, the first that holds is reported."""

    CREDITED = "credited"  #: Eq. 7 with weights that differ
    NO_CRITERIA = "no_criteria"  #: no criterion survived: uniform A
    UNCITED = "uncited"  #: no pass or fail cites a step: uniform A
    SINGLE_STEP = "single_step"  #: M = 1: A
    COLLAPSED = "collapsed"  #: Σ w = 0, a winner cited only by fails or a loser only by passes: uniform A
    UNANIMOUS = "unanimous"  #: equal positive weights: equal step totals
    UNIFORM = "uniform"  #: the credit rule itself is uniform; `redistribute` never gives it


@dataclass(frozen=True, slots=True)
class StepCredit:
    """The credit of one trajectory; M steps."""

    per_token: tuple[float, ...]  #: [M] a_j, for every token of step j
    totals: tuple[float, ...]  #: [M] n_j · a_j; they sum to A · N
    qualities: tuple[float, ...]  #: [M] Q_j in [0, 1]; empty when no step is cited
    weights: tuple[float, ...]  #: [M] w_j in [0, 1]; all 0 when no step is cited
    reason: Reason
    inert_weights: bool  #: credit draws no distinction: all weights equal, or a fallback fired
    dropped_citations: int = 0  #: citations outside 1..M, ignored
    duplicate_citations: int = 0  #: repeats of a step within one criterion, counted once


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
        citations: one (score, steps) a surviving criterion: score +1 pass, −1 fail, 0 not applicable (its steps are
            ignored), steps as 1-based numbers. Empty: no criterion survived.
        step_tokens: [M] n_j > 0, the number of tokens of each step.
        unanimous: what equal positive weights mean: the formula as it stands, or the flat per-token A.

    Raises:
        ValueError: no steps, n_j ≤ 0, a score outside {−1, 0, 1}, numbers that are not whole, a citation that is
            no pair, a non-finite advantage or product A · N, or an unknown `unanimous`.

    Example::

        >>> credit = redistribute(1.0, [(-1, [2]), (1, [1, 2])], [3, 5])
        >>> credit.qualities, credit.reason.value
        ((1.0, 0.5), 'credited')
    """
    advantage = _check_advantage(advantage)
    if unanimous not in ("equal_totals", "uniform"):
        raise ValueError(f"expected unanimous 'equal_totals' or 'uniform', got {unanimous!r}")
    tokens = _check_tokens(step_tokens)
    passes, cited, dropped, duplicates = _count(citations, len(tokens))

    quality = [p / c for p, c in zip(passes, cited, strict=True) if c]
    # Equal fractions are equal floats (division rounds correctly), so this test is exact; so is the mean then.
    level = bool(quality) and min(quality) == max(quality)
    mean = quality[0] if level else math.fsum(quality) / len(quality) if quality else 0.0
    qualities = tuple(p / c if c else mean for p, c in zip(passes, cited, strict=True)) if quality else ()
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
    elif level:
        reason = Reason.UNANIMOUS
    else:
        reason = Reason.CREDITED

    if reason is Reason.CREDITED or (reason is Reason.UNANIMOUS and unanimous == "equal_totals"):
        mass = advantage * sum(tokens)  # A · N
        if not math.isfinite(mass):
            raise ValueError(f"expected a finite A · N, got {advantage} · {sum(tokens)}")
        totals = tuple(mass * (w / total_weight) for w in weights)
        per_token = tuple(total / n for total, n in zip(totals, tokens, strict=True))
    else:
        totals = tuple(advantage * n for n in tokens)
        per_token = (advantage,) * len(tokens)
    return StepCredit(
        per_token=per_token,
        totals=totals,
        qualities=qualities,
        weights=weights or (0.0,) * len(tokens),
        reason=reason,
        inert_weights=reason is not Reason.CREDITED,
        dropped_citations=dropped,
        duplicate_citations=duplicates,
    )


def uniform(advantage: float, step_tokens: Sequence[int]) -> StepCredit:
    """The uniform rule: every step token keeps A (plain GRPO). Same errors as `redistribute`."""
    advantage = _check_advantage(advantage)
    tokens = _check_tokens(step_tokens)
    return StepCredit(
        per_token=(advantage,) * len(tokens),
        totals=tuple(advantage * n for n in tokens),
        qualities=(),
        weights=(0.0,) * len(tokens),
        reason=Reason.UNIFORM,
        inert_weights=True,
    )


def _check_advantage(advantage: float) -> float:
    if not math.isfinite(advantage):
        raise ValueError(f"expected a finite advantage, got {advantage}")
    return float(advantage)


def _check_tokens(step_tokens: Sequence[int]) -> tuple[int, ...]:
    tokens = tuple(step_tokens)
    if not tokens:
        raise ValueError("expected at least one step in step_tokens, got none")
    if not all(isinstance(n, Integral) for n in tokens):
        raise ValueError(f"expected step_tokens as whole numbers of tokens, got {list(tokens)}")
    if min(tokens) <= 0:
        raise ValueError(f"expected every step to have at least one token, got step_tokens={list(tokens)}")
    return tokens


def _count(citations: Sequence[tuple[int, Sequence[int]]], steps: int) -> tuple[list[int], list[int], int, int]:
    """p_j and p_j + f_j of every step, each [M]; then citations outside 1..M and duplicates within a criterion."""
    passes = [0] * steps
    cited = [0] * steps
    dropped = duplicates = 0
    for citation in citations:
        try:
            score, numbers = citation
            numbers = tuple(numbers)
        except TypeError:
            raise ValueError(f"expected citations as (score, steps) pairs, got {citation!r}") from None
        if not all(isinstance(j, Integral) for j in numbers):
            raise ValueError(f"expected cited steps as whole numbers from 1, got {list(numbers)}")
        if score not in (-1, 0, 1):
            raise ValueError(f"expected a score of -1, 0 or 1, got {score!r}")
        if score == 0:
            continue
        seen = set()
        for number in numbers:
            if not 1 <= number <= steps:
                dropped += 1
            elif number in seen:
                duplicates += 1
            else:
                seen.add(number)
                cited[number - 1] += 1
                passes[number - 1] += score == 1
    return passes, cited, dropped, duplicates
