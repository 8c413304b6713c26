"""The judge's bill: calls from the configuration, tokens a call from an archive or stated, prices from litellm."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draco.archive import read_table

__all__ = ["PAPER_USD_A_CALL", "STATED", "archive_means", "bill", "calls_a_step", "implied_tokens", "prices"]

#: $1607 for 100 steps (method §8) of 16 groups of 6, 20 calls each
PAPER_USD_A_CALL = 1607 / (100 * 16 * 20)

#: mean tokens (in, out) of a call where no archive says better; transcripts of about 9,000 tokens, groups of 6
STATED: dict[str, tuple[float, float]] = {
    "propose_task": (4500, 1500),
    "propose_rollout": (13500, 1000),
    "merge": (62000, 2500),
    "score": (13500, 2800),
    "attribute": (14500, 2200),
}


def calls_a_step(groups: int, members: int, *, dynamic: bool, citations: bool) -> dict[str, int]:
    """Calls by phase: 20 a group of 6 with dynamic rubrics and step credit, 14 without citations (method §5)."""
    calls = {"score": groups * members}
    if dynamic:
        calls |= {"propose_task": groups, "propose_rollout": groups * members, "merge": groups}
    if citations:
        calls["attribute"] = groups * members
    return calls


def archive_means(run: Path) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
    """Mean tokens (in, out) of a call and calls a step, by phase, of the calls that a run archived."""
    rows = read_table(run, "judge_calls").select(["phase", "step", "tokens_in", "tokens_out"]).to_pylist()
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for row in rows:
        total = sums[row["phase"]]
        total[0] += 1
        total[1] += row["tokens_in"]
        total[2] += row["tokens_out"]
    steps = len({row["step"] for row in rows})
    means = {phase: (i / n, o / n) for phase, (n, i, o) in sums.items()}
    return means, {phase: n / steps for phase, (n, _, _) in sums.items()}


def prices(model: str) -> tuple[float, float] | None:
    """USD per token in and out, by litellm's packaged table; None if it does not know the model."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    for name in (model, model.split("/", 1)[-1]):
        found: Mapping[str, Any] = litellm.model_cost.get(name, {})
        if "input_cost_per_token" in found:
            return found["input_cost_per_token"], found["output_cost_per_token"]
    return None


def bill(
    calls: Mapping[str, float], means: Mapping[str, tuple[float, float]], price: tuple[float, float] | None
) -> dict[str, Any]:
    """Calls, tokens and USD of one step; no discount for cached prompts."""
    phases = {
        phase: {"calls": n, "tokens_in": n * means[phase][0], "tokens_out": n * means[phase][1]}
        for phase, n in calls.items()
    }
    total = {key: sum(p[key] for p in phases.values()) for key in ("calls", "tokens_in", "tokens_out")}
    usd = None if price is None else total["tokens_in"] * price[0] + total["tokens_out"] * price[1]
    return {**total, "usd": usd, "phases": phases}


def implied_tokens(
    price: tuple[float, float], means: Mapping[str, tuple[float, float]], calls: Mapping[str, float]
) -> dict[str, float]:
    """Tokens a call that the paper's bill implies at a price, at the shares of input and output of `means`."""
    total = bill(calls, means, price)
    share = total["tokens_out"] / (total["tokens_in"] + total["tokens_out"])
    tokens = PAPER_USD_A_CALL / ((1 - share) * price[0] + share * price[1])
    return {
        "usd_a_call": PAPER_USD_A_CALL,
        "tokens_a_call": tokens,
        "tokens_in": tokens * (1 - share),
        "tokens_out": tokens * share,
    }
