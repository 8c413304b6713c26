"""Several votes on every verdict: of several models (`judge.members`), or of one judge asked k times (self-judge).

    majority    the score with most votes
    unanimous   +1 if all say +1; −1 if any says −1; else 0 (Section 4.3: self-judge with k = 3)
    weighted    as majority, but the weight of a voter is its agreement with the others: the share of all other votes on
                this group's cells (criterion × sample) that equal its own

Of tied scores the lower one is taken: −1 before 0, 0 before +1. A voter whose call failed fails the trajectory: a
verdict of fewer voters would be another rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from draco.core.errors import ConfigError
from draco.judge.agreement import count_votes
from draco.judge.endpoints import JudgeEndpoint
from draco.judge.replies import Attributed, Scored

__all__ = ["RULES", "Ballot", "Decided", "Panel", "Voter", "panel_of", "unanimous"]


@dataclass(frozen=True, slots=True)
class Voter:
    """One vote: whom to ask, and which of several equal questions it is."""

    endpoint: JudgeEndpoint | None = None  #: None: whoever makes the other calls
    repeat: int = 0


#: one voter's answer on a trajectory: [K] scores, and [K] attributions where they were made in the same call
Ballot = tuple[tuple[Scored, ...], tuple[Attributed, ...] | None]


@dataclass(frozen=True, slots=True)
class Decided:
    """Verdicts of the panel."""

    scored: dict[int, tuple[Scored, ...]]  #: by sample
    attributed: dict[int, dict[int, Attributed]]  #: by sample and criterion; empty without attributions
    counters: dict[str, float]  #: of agreement; empty with one voter


def _most(votes: Sequence[int], weights: Sequence[float]) -> int:
    totals = {score: sum(w for v, w in zip(votes, weights, strict=True) if v == score) for score in (-1, 0, 1)}
    # The order of a sum changes its last bits; such a difference is a tie.
    top = max(totals.values())
    return min(score for score, total in totals.items() if score in votes and total >= top - 1e-9)


def _majority(votes: Sequence[int], weights: Sequence[float]) -> int:
    return _most(votes, [1.0] * len(votes))


def unanimous(votes: Sequence[int], weights: Sequence[float] = ()) -> int:
    """+1 iff all +1; −1 if any −1; else 0.

    >>> unanimous([1, 1, 1]), unanimous([1, 0, 1]), unanimous([1, 0, -1])
    (1, 0, -1)
    """
    return -1 if -1 in votes else 1 if all(v == 1 for v in votes) else 0


#: rule: (votes, weights of the voters) → verdict
RULES: dict[str, Callable[[Sequence[int], Sequence[float]], int]] = {
    "majority": _majority,
    "unanimous": unanimous,
    "weighted": _most,
}


def _weights(cells: Sequence[Sequence[int]], voters: int) -> list[float]:
    """For each voter, the share of the others' votes that equal its own."""
    others = max(1, len(cells) * (voters - 1))
    return [sum(votes.count(votes[v]) - 1 for votes in cells) / others for v in range(voters)]


@dataclass(frozen=True, slots=True)
class Panel:
    """Who scores, and how votes become a verdict."""

    voters: tuple[Voter, ...]
    rule: str = "majority"
    #: whose reasons a verdict has: True: the first voter's, whatever it voted; False: those of the first that agrees
    first_justifies: bool = False

    def decide(self, ballots: Mapping[int, Sequence[Ballot]]) -> Decided:
        """Verdicts of one group.

        Args:
            ballots: by sample, one ballot a voter in the order of `voters`.
        """
        if len(self.voters) == 1:
            alone = {sample: one[0] for sample, one in ballots.items()}
            cited = {s: dict(enumerate(found)) for s, (_, found) in alone.items() if found is not None}
            return Decided({s: scores for s, (scores, _) in alone.items()}, cited, {})
        cells = {
            (sample, k): [scores[k].score for scores, _ in one]
            for sample, one in ballots.items()
            for k in range(len(one[0][0]))
        }
        weights = _weights(list(cells.values()), len(self.voters))
        scored: dict[int, tuple[Scored, ...]] = {}
        attributed: dict[int, dict[int, Attributed]] = {}
        for sample, one in ballots.items():
            row = []
            for k in range(len(one[0][0])):
                verdict = RULES[self.rule](cells[sample, k], weights)
                agreeing = [b for b in one if b[0][k].score == verdict]
                source = one[0] if self.first_justifies else agreeing[0]
                row.append(Scored(verdict, source[0][k].evidence, source[0][k].justification))
                given = [found[k] for _, found in agreeing if found is not None]
                if given:
                    attributed.setdefault(sample, {})[k] = _cited(verdict, given)
            scored[sample] = tuple(row)
        return Decided(scored, attributed, count_votes(cells.values()))


def _cited(verdict: int, given: Sequence[Attributed]) -> Attributed:
    """Steps that at least half of the agreeing voters cite; the first citing voter's where there is no such step."""
    steps = sorted({j for a in given for j in a.steps})
    common = tuple(j for j in steps if 2 * sum(j in a.steps for a in given) >= len(given))
    if verdict == 0:
        common = ()
    elif not common:
        common = next((a.steps for a in given if a.steps), ())
    return Attributed(verdict, common, given[0].explanation, sum(a.dropped for a in given))


def panel_of(members: Sequence[JudgeEndpoint], rule: str = "majority") -> Panel:
    """The panel of `judge.members` and `judge.ensemble`; one vote of the judge's own model without members.

    Raises:
        ConfigError: one member, or one named twice.
    """
    models = [endpoint.model for endpoint in members]
    if not models:
        return Panel((Voter(),))
    if len(models) < 2 or len(set(models)) < len(models):
        raise ConfigError(
            f"judge.members is [{', '.join(models)}]; expected two or more different models, or none for judge.model"
        )
    return Panel(tuple(Voter(endpoint) for endpoint in members), rule)
