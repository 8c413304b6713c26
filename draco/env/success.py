"""Success metrics over n runs of every task: pass^k, pass@k, TGC and SGC (method §7)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import comb, sqrt
from typing import Any

from draco.env.records import EvalRecord

__all__ = ["leaderboard", "over_checkpoints", "pass_at_k", "pass_hat_k", "summarise"]

_AVERAGED = (
    "tgc", "sgc", "tgc_pass_hat", "tgc_pass_at", "sgc_pass_hat", "sgc_pass_at", "tgc_by_difficulty",
    "sgc_by_difficulty", "interactions_by_difficulty", "turns", "interactions", "step_tokens", "input_tokens",
    "cached_tokens", "cost_usd", "terminations",
)  # fmt: skip


def pass_hat_k(successes: int, n: int, k: int) -> float:
    """C(c, k) / C(n, k): the chance that k runs drawn from n all succeed, c of which did. Unbiased.

    Raises:
        ValueError: not 0 ≤ c ≤ n or not 1 ≤ k ≤ n.
    """
    _check(successes, n, k)
    return comb(successes, k) / comb(n, k)


def pass_at_k(successes: int, n: int, k: int) -> float:
    """1 − C(n − c, k) / C(n, k): the chance that at least one of k runs drawn from n succeeds. Unbiased.

    Raises:
        ValueError: not 0 ≤ c ≤ n or not 1 ≤ k ≤ n.
    """
    _check(successes, n, k)
    return 1.0 - comb(n - successes, k) / comb(n, k)


def _check(successes: int, n: int, k: int) -> None:
    if not (0 <= successes <= n and 1 <= k <= n):
        raise ValueError(f"expected 0 ≤ successes ≤ n and 1 ≤ k ≤ n, got successes={successes}, n={n}, k={k}")


def summarise(records: Sequence[EvalRecord]) -> dict[str, Any]:
    """Metrics of one evaluation.

    TGC is the share of tasks that succeed, SGC the share of scenarios all of whose tasks succeed *in the same run*;
    both as ``tgc``/``sgc`` (the mean over runs, which is pass^1) and ``…_pass_hat``/``…_pass_at`` for k = 1..n. Faulted
    rollouts count as failed; rollouts whose evaluator failed have no success at all: they leave the means, and
    `unevaluated` counts them. Every mean over nothing is None.

    Raises:
        ValueError: tasks with different numbers of runs.
    """
    runs: dict[str, dict[int, EvalRecord]] = defaultdict(dict)
    for record in records:
        runs[record.task_id][record.sample] = record
    sizes = {len(r) for r in runs.values()}
    if len(sizes) > 1:
        raise ValueError(f"expected the same number of runs for every task, got {sorted(sizes)}")
    n = next(iter(sizes), 0)
    known = {t: [r[s].success for s in sorted(r)] for t, r in runs.items()}
    tasks = {t: [bool(x) for x in s] for t, s in known.items() if None not in s}
    scenario_of = {r.task_id: r.scenario_id for r in records}
    members: dict[str, list[str]] = defaultdict(list)
    for task in runs:
        members[scenario_of[task]].append(task)
    scenarios = {
        s: [all(tasks[t][i] for t in ts) for i in range(n)] for s, ts in members.items() if all(t in tasks for t in ts)
    }
    difficulty = {r.task_id: r.difficulty for r in records}
    by_level = {
        str(level): _mean([_mean(s) for t, s in tasks.items() if difficulty[t] == level])
        for level in sorted(set(difficulty.values()))
    }
    level_of = {scenario_of[t]: level for t, level in difficulty.items()}
    sgc_by_level = {
        str(level): _mean([_mean(done) for s, done in scenarios.items() if level_of[s] == level])
        for level in sorted(set(difficulty.values()))
    }
    return {
        "tasks": len(runs),
        "scenarios": len(members),
        "n": n,
        "tgc": _mean([_mean(s) for s in tasks.values()]),
        "sgc": _mean([_mean(s) for s in scenarios.values()]),
        **_curves("tgc", tasks, n),
        **_curves("sgc", scenarios, n),
        "tgc_by_difficulty": by_level,
        "sgc_by_difficulty": sgc_by_level,
        "turns": _mean([r.turns for r in records]),
        "interactions": _mean([r.interactions for r in records]),
        "interactions_by_difficulty": {
            str(level): _mean([r.interactions for r in records if r.difficulty == level])
            for level in sorted(set(difficulty.values()))
        },
        "step_tokens": _mean([r.step_tokens for r in records]),
        "input_tokens": _mean([r.input_tokens for r in records]),
        "cached_tokens": _mean([r.cached_tokens for r in records]),
        "cost_usd": _cost(records, n),
        "unevaluated": sum(r.success is None for r in records),
        "quarantined": sum(r.error.startswith("quarantined") for r in records),
        "terminations": _shares(r.termination for r in records),
        "faults": _shares((f for r in records for f in set(r.faults)), total=len(records)),
    }


def _curves(name: str, outcomes: Mapping[str, Sequence[bool]], n: int) -> dict[str, list[float | None]]:
    counts = [sum(s) for s in outcomes.values()]
    return {
        f"{name}_pass_hat": [_mean([pass_hat_k(c, n, k) for c in counts]) for k in range(1, n + 1)],
        f"{name}_pass_at": [_mean([pass_at_k(c, n, k) for c in counts]) for k in range(1, n + 1)],
    }


def _cost(records: Sequence[EvalRecord], n: int) -> float | None:
    """USD of one pass over the tasks; None where any rollout's is unknown."""
    known = [r.cost_usd for r in records if r.cost_usd is not None]
    return sum(known) / n if n and len(known) == len(records) else None


def over_checkpoints(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean and sample standard deviation over checkpoints of every figure of `summarise`; std is None for one.

    A figure that any checkpoint lacks (None) has no mean.

    Raises:
        ValueError: no results, or they are not of the same split, tasks and n.
    """
    if len({(r["split"], r["tasks"], r["n"]) for r in results}) != 1:
        raise ValueError("expected results of one split, with the same tasks and n")
    figures = {key: _spread([r[key] for r in results]) for key in _AVERAGED}
    kept = {key: results[0][key] for key in ("split", "tasks", "scenarios", "n")}
    counted = {key: sum(r[key] for r in results) for key in ("unevaluated", "quarantined")}
    return {**kept, **counted, "checkpoints": [r["checkpoint"] for r in results], **figures}


def _spread(values: Sequence[Any]) -> Any:
    if isinstance(values[0], Mapping):
        keys = sorted(set().union(*values))
        return {key: _spread([v.get(key, 0.0) for v in values]) for key in keys}
    if isinstance(values[0], list | tuple):
        return [_spread(column) for column in zip(*values, strict=True)]
    if any(v is None for v in values):
        return {"mean": None, "std": None}
    mean = sum(values) / len(values)
    std = sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1)) if len(values) > 1 else None
    return {"mean": mean, "std": std}


def leaderboard(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Results in the shape of AppWorld's leaderboard: {split: {all | level 1 | …: completions in %, interactions}}.

    Args:
        results: split → what `summarise` or `over_checkpoints` gave.
    """

    def value(entry: Any) -> float | None:
        mean: float | None = entry["mean"] if isinstance(entry, Mapping) else entry
        return mean

    def row(tgc: Any, sgc: Any, interactions: Any) -> dict[str, float | None]:
        numbers = {"task_goal_completion": value(tgc), "scenario_goal_completion": value(sgc)}
        percent = {k: None if v is None else round(100 * v, 1) for k, v in numbers.items()}
        count = value(interactions)
        return {**percent, "interactions": None if count is None else round(count, 2)}

    return {
        split: {
            "all": row(r["tgc"], r["sgc"], r["interactions"]),
            **{
                f"level {level}": row(
                    r["tgc_by_difficulty"][level],
                    r["sgc_by_difficulty"][level],
                    r["interactions_by_difficulty"][level],
                )
                for level in r["tgc_by_difficulty"]
            },
        }
        for split, r in results.items()
    }


def _mean(values: Sequence[float | bool | None]) -> float | None:
    present = [float(v) for v in values if v is not None]
    return sum(present) / len(present) if present else None


def _shares(items: Iterable[str], total: int | None = None) -> dict[str, float]:
    counts = Counter(items)
    total = total if total is not None else sum(counts.values())
    return {name: count / total for name, count in sorted(counts.items())} if total else {}
