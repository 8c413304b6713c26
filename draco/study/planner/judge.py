"""The judge's bill: calls by the configuration, their tokens from an archive or as stated here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draco.core.llm.money import Prices
from draco.judge.bill import Line
from draco.judge.bill import bill as total_bill
from draco.run.archive import read_table

__all__ = [
    "PAPER_USD_A_CALL", "STATED", "Call", "archive_calls", "bill", "calls_a_step", "expected_calls", "implied_tokens",
]  # fmt: skip

#: $1607 for 100 steps (Section 4.3) of 16 groups of 6, 20 calls each
PAPER_USD_A_CALL = 1607 / (100 * 16 * 20)

#: kinds of call that are made once a group; the others once a rollout
_OF_GROUP = ("propose_task", "merge")


@dataclass(frozen=True, slots=True)
class Call:
    """One kind of call: how often it is made, and its mean tokens."""

    tokens_in: float
    tokens_out: float
    cached: float = 0.0  #: of `tokens_in`, read from the provider's prefix cache
    rate: float | None = None  #: calls a group or a rollout; None = as the method says


#: mean tokens of a call without an archive: transcripts of about 9,000 tokens, groups of 6. `assess` is score and
#: attribution in one (lean); its merge sees digests and is smaller than stated here
STATED: dict[str, Call] = {
    "propose_task": Call(4500, 1500),
    "propose_rollout": Call(13500, 1000),
    "merge": Call(62000, 2500),
    "score": Call(13500, 2800),
    "assess": Call(14500, 4500),
    "attribute": Call(14500, 2200),
}


def calls_a_step(
    groups: int, members: int, *, dynamic: bool, citations: bool, lean: bool = False, voters: int = 1
) -> dict[str, float]:
    """The most calls by phase: 20 a group of 6 with dynamic rubrics and step credit, 14 without citations (Appendix F).

    Fewer are made where a merge leaves no criterion (no scores) or dropout none (no attributions).

    Args:
        groups, members: groups of a step, and rollouts of each.
        dynamic: criteria are proposed for every group.
        citations: the credit stage needs attributions.
        lean: score and attribution are one call (`judge.plan=lean`).
        voters: scores of each rollout (ensemble, self-judge).
    """
    rollouts = float(groups * members)
    calls = {"assess" if lean and citations else "score": rollouts * voters}
    if dynamic:
        calls |= {"propose_task": float(groups), "propose_rollout": rollouts, "merge": float(groups)}
    if citations and not lean:
        calls["attribute"] = rollouts
    return calls


def archive_calls(run: Path) -> dict[str, Call]:
    """What a run archived, by phase: mean tokens of a call, and calls a group or a rollout.

    Raises:
        FileNotFoundError: the run archived no judge calls.
    """
    names = ("tokens_in", "tokens_out", "tokens_cached")
    calls = read_table(run, "judge_calls").select(["phase", *names]).group_by("phase", use_threads=False)
    sums = calls.aggregate([(name, "sum") for name in names] + [("phase", "count")]).to_pylist()
    rollouts = read_table(run, "trajectories").select(["step", "group"])
    groups = rollouts.group_by(["step", "group"]).aggregate([]).num_rows
    found = {}
    for row in sums:
        n = row["phase_count"]
        tokens_in, tokens_out, cached = ((row[f"{name}_sum"] or 0) / n for name in names)
        rate = n / (groups if row["phase"] in _OF_GROUP else rollouts.num_rows)
        found[row["phase"]] = Call(tokens_in, tokens_out, cached, rate)
    return found


def expected_calls(most: Mapping[str, float], means: Mapping[str, Call], groups: int, members: int) -> dict[str, float]:
    """`calls_a_step` at an archive's rates, where it has some."""
    found = {}
    for phase, n in most.items():
        rate = means[phase].rate if phase in means else None
        found[phase] = n if rate is None else rate * groups * (1 if phase in _OF_GROUP else members)
    return found


def bill(calls: Mapping[str, float], means: Mapping[str, Call], price: Prices | None) -> dict[str, Any]:
    """Calls, tokens and USD of one step.

    Args:
        calls: by phase.
        means: by phase; a phase that it lacks is as `STATED`.
        price: None = unknown.
    """
    found = ((phase, n, means.get(phase, STATED[phase])) for phase, n in calls.items())
    return total_bill(Line(phase, n, m.tokens_in, m.tokens_out, m.cached, price) for phase, n, m in found)


def implied_tokens(price: Prices, means: Mapping[str, Call], calls: Mapping[str, float]) -> dict[str, float]:
    """Tokens a call that the paper's bill implies at a price, at the shares of input and output of `means`."""
    total = bill(calls, means, price)
    share = total["tokens_out"] / (total["tokens_in"] + total["tokens_out"])
    tokens = PAPER_USD_A_CALL / ((1 - share) * price.input + share * price.output) * 1e6
    return {
        "usd_a_call": PAPER_USD_A_CALL,
        "tokens_a_call": tokens,
        "tokens_in": tokens * (1 - share),
        "tokens_out": tokens * share,
    }
