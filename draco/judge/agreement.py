"""How far raters agree beyond chance: Fleiss' κ and Gwet's AC1, from counts that sum over groups, steps and ranks.

With N items, R raters each, categories pass, fail and n.a. (Q = 3)::

    P_i  = share of rater pairs that agree on item i          P_a = mean P_i
    π_c  = share of all votes that fall on category c
    κ    = (P_a − Σ π_c²) / (1 − Σ π_c²)                      Fleiss 1971
    AC1  = (P_a − P_e) / (1 − P_e),  P_e = Σ π_c(1 − π_c) / (Q − 1)        Gwet 2008

κ falls when nearly all votes are alike although raters agree; AC1 does not. Read them together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

__all__ = ["RATES", "agreement_rates", "count_votes"]

#: what `agreement_rates` makes
RATES = ("judge/vote_agreement", "judge/kappa", "judge/ac1")
_CATEGORIES = {1: "judge/votes_pass", -1: "judge/votes_fail", 0: "judge/votes_na"}


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
    """Agreement, κ and AC1 of the counters; without votes none, and no κ where all votes are alike (0/0)."""
    items = counters.get("judge/vote_items", 0.0)
    votes = [counters.get(name, 0.0) for name in _CATEGORIES.values()]
    if not items or not sum(votes):
        return {}
    agreed = counters["judge/vote_agreed"] / items
    shares = [n / sum(votes) for n in votes]
    by_chance = sum(p * p for p in shares)
    gwet = sum(p * (1 - p) for p in shares) / (len(shares) - 1)
    out = {"judge/vote_agreement": agreed, "judge/ac1": (agreed - gwet) / (1 - gwet)}
    if by_chance < 1.0:
        out["judge/kappa"] = (agreed - by_chance) / (1 - by_chance)
    return out
