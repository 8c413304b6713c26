"""How far raters agree, and how far beyond chance: Cohen's and Fleiss' κ, Gwet's AC1.

With N items, R raters each, categories pass, fail and n.a. (Q = 3)::

    P_a  = mean over items of the share of rater pairs that agree
    π_c  = share of all votes that fall on category c
    κ    = (P_a − P_e) / (1 − P_e),  P_e = Σ π_c²                          Fleiss 1971
                                     P_e = Σ r_c·o_c                       Cohen 1960: two raters, each with its shares
    AC1  = (P_a − P_e) / (1 − P_e),  P_e = Σ π_c(1 − π_c) / (Q − 1)        Gwet 2008

κ falls when nearly all votes are alike although raters agree; AC1 does not. Read them together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

__all__ = ["RATES", "Agreement", "agreement", "agreement_rates", "count_votes"]

#: what `agreement_rates` makes
RATES = ("judge/vote_agreement", "judge/kappa", "judge/ac1")
_CATEGORIES = {1: "judge/votes_pass", -1: "judge/votes_fail", 0: "judge/votes_na"}


def _kappa(agreed: float, by_chance: float) -> float | None:
    """κ; None where all votes are alike (0/0)."""
    return (agreed - by_chance) / (1 - by_chance) if by_chance < 1.0 else None


def _ac1(agreed: float, shares: Sequence[float], categories: int) -> float:
    by_chance = sum(p * (1 - p) for p in shares) / (categories - 1)
    return (agreed - by_chance) / (1 - by_chance)


# -- the votes of several raters: counters that sum over groups, steps and ranks -----------------------------------


def count_votes(items: Iterable[Sequence[int]]) -> dict[str, float]:
    """Counters of items, each given by R ≥ 2 raters' scores."""
    out = dict.fromkeys(("judge/vote_items", "judge/vote_agreed", *_CATEGORIES.values()), 0.0)
    for votes in items:
        pairs = len(votes) * (len(votes) - 1)
        counts = {score: votes.count(score) for score in _CATEGORIES}
        out["judge/vote_items"] += 1
        out["judge/vote_agreed"] += sum(n * (n - 1) for n in counts.values()) / pairs
        for score, n in counts.items():
            out[_CATEGORIES[score]] += n
    return out


def agreement_rates(counters: Mapping[str, float]) -> dict[str, float]:
    """Agreement, Fleiss' κ and AC1 of the counters; without votes none, and no κ where all votes are alike."""
    items = counters.get("judge/vote_items", 0.0)
    votes = [counters.get(name, 0.0) for name in _CATEGORIES.values()]
    if not items or not sum(votes):
        return {}
    agreed = counters["judge/vote_agreed"] / items
    shares = [n / sum(votes) for n in votes]
    out = {"judge/vote_agreement": agreed, "judge/ac1": _ac1(agreed, shares, len(shares))}
    if (kappa := _kappa(agreed, sum(p * p for p in shares))) is not None:
        out["judge/kappa"] = kappa
    return out


# -- a reference (an archived judge, a person) and another judge -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Agreement:
    """Over verdict pairs (reference, other), scores in −1, 0, +1. A rate without a denominator is None."""

    pairs: int
    agreement: float | None = None  #: same verdict, of all three
    all_pass_baseline: float | None = None  #: agreement of a judge that passes everything
    false_pass: float | None = None  #: the other passes, of what the reference fails
    false_fail: float | None = None  #: the other fails, of what the reference passes
    kappa: float | None = None  #: Cohen's κ; None where chance agreement is 1
    ac1: float | None = None  #: Gwet's AC1 over the categories in use, at least two

    def as_dict(self) -> dict[str, float | int | None]:
        """JSON-able fields."""
        return asdict(self)


def agreement(pairs: Iterable[tuple[int, int]]) -> Agreement:
    """Agreement of another judge with a reference.

    Args:
        pairs: (reference, other) scores.

    Raises:
        ValueError: a score outside {−1, 0, 1}.

    Example::

        >>> agreement([(1, 1), (-1, 1), (-1, -1), (1, 1)]).false_pass
        0.5
    """
    found = list(pairs)
    if wrong := {s for pair in found for s in pair} - {-1, 0, 1}:
        raise ValueError(f"expected scores in -1, 0, 1, got {sorted(wrong)}")
    n = len(found)
    if not n:
        return Agreement(0)
    same = sum(a == b for a, b in found) / n
    failed, passed = [b for a, b in found if a == -1], [b for a, b in found if a == 1]
    reference, other = ([sum(pair[i] == c for pair in found) / n for c in (-1, 0, 1)] for i in (0, 1))
    shares = [(r + o) / 2 for r, o in zip(reference, other, strict=True)]
    return Agreement(
        pairs=n,
        agreement=same,
        all_pass_baseline=reference[2],
        false_pass=failed.count(1) / len(failed) if failed else None,
        false_fail=passed.count(-1) / len(passed) if passed else None,
        kappa=_kappa(same, sum(r * o for r, o in zip(reference, other, strict=True))),
        ac1=_ac1(same, shares, max(sum(s > 0 for s in shares), 2)),
    )
