"""A static set of criteria from base rollouts: propose for each task, reduce to one set, prune, order by failure rate.

    applicable_k      = share of rollouts on which criterion k is a pass or a fail
    discriminative_k  = share of tasks whose rollouts k tells apart: some pass and some fail
    failure_rate_k    = fails / (passes + fails)

A criterion stays if both shares reach their minimum (Appendix C: 720 rollouts, 8 for each of 90 tasks).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draco.core.errors import JudgeReplyError
from draco.core.types import Criterion, Judgement
from draco.judge.pipeline import JudgePipeline
from draco.judge.replies import LIMITS

__all__ = ["Rated", "prune", "rate", "reduce_to_one"]

_CHUNK = 60  #: criteria that one reduce call sees


@dataclass(frozen=True, slots=True)
class Rated:
    """A criterion, and how the base rollouts did on it."""

    criterion: Criterion
    applicable: float
    discriminative: float
    failure_rate: float  #: 0 where it never applied


async def reduce_to_one(pipeline: JudgePipeline, criteria: Sequence[Criterion]) -> tuple[Criterion, ...]:
    """One general set, made by as many rounds of `reduce` calls as needed.

    Raises:
        JudgeReplyError: there is nothing to reduce, or a round does not shrink its input.
    """
    if not criteria:
        raise JudgeReplyError("no task gave a criterion: the judge found nothing that the rollouts fell short on")
    left = list(criteria)
    while True:
        chunks = [left[i : i + _CHUNK] for i in range(0, len(left), _CHUNK)]
        found = [c for chunk in chunks for c in await pipeline.reduce(chunk)]
        if len(chunks) == 1:
            return tuple(found)
        if len(found) >= len(left):
            raise JudgeReplyError(f"reduce left {len(found)} of {len(left)} criteria; at most {LIMITS['merge']} a call")
        left = found


def rate(criteria: Sequence[Criterion], judgements: Sequence[Judgement]) -> list[Rated]:
    """Shares over all judged groups; every judgement is by `criteria`."""

    def share(part: int, total: int) -> float:
        return part / total if total else 0.0

    found = []
    for k, criterion in enumerate(criteria):
        rows = [[v.score for v in j.verdicts[k]] for j in judgements if j.verdicts]
        scores = [score for row in rows for score in row]
        decided = [score for score in scores if score]
        told_apart = sum(1 in row and -1 in row for row in rows)
        found.append(
            Rated(
                criterion,
                applicable=share(len(decided), len(scores)),
                discriminative=share(told_apart, len(rows)),
                failure_rate=share(decided.count(-1), len(decided)),
            )
        )
    return found


def prune(rated: Sequence[Rated], applicable: float, discriminative: float, most: int) -> list[Rated]:
    """Those that reach both minima, highest failure rate first, at most `most`."""
    kept = [r for r in rated if r.applicable >= applicable and r.discriminative >= discriminative]
    return sorted(kept, key=lambda r: -r.failure_rate)[:most]
