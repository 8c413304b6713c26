"""Success metrics over n runs of every task: pass^k, pass@k, TGC and SGC (Section 4.1.3)."""

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
    rollouts count as failed. Rollouts whose evaluator failed have no success: they are left out of the means, and
    `unevaluated` counts them. Every mean over nothing is None.

    Raises:
        ValueError: tasks with different numbers of runs.
    """
    tasks, scenarios, n = _outcomes(records)
    levels = sorted({r.difficulty for r in records})

    def by_level(outcomes: Mapping[str, Sequence[bool]], level: Mapping[str, int]) -> dict[str, float | None]:
        return {str(i): _mean([_mean(s) for key, s in outcomes.items() if level[key] == i]) for i in levels}

    return {
        "tasks": len({r.task_id for r in records}),
        "scenarios": len({r.scenario_id for r in records}),
        "n": n,
        "tgc": _mean([_mean(s) for s in tasks.values()]),
        "sgc": _mean([_mean(s) for s in scenarios.values()]),
        **_curves("tgc", tasks, n),
        **_curves("sgc", scenarios, n),
        "tgc_by_difficulty": by_level(tasks, {r.task_id: r.difficulty for r in records}),
        "sgc_by_difficulty": by_level(scenarios, {r.scenario_id: r.difficulty for r in records}),
        "turns": _mean([r.turns for r in records]),
        "interactions": _mean([r.interactions for r in records]),
        "interactions_by_difficulty": {
            str(i): _mean([r.interactions for r in records if r.difficulty == i]) for i in levels
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


def _outcomes(records: Sequence[EvalRecord]) -> tuple[dict[str, list[bool]], dict[str, list[bool]], int]:
    """Success in every run, by task and by scenario (without those of unknown success), and the number of runs."""
    runs: dict[str, dict[int, bool | None]] = defaultdict(dict)
    members: dict[str, dict[str, None]] = defaultdict(dict)
    for record in records:
        runs[record.task_id][record.sample] = record.success
        members[record.scenario_id][record.task_id] = None
    sizes = {len(r) for r in runs.values()}
    if len(sizes) > 1:
        raise ValueError(f"expected the same number of runs for every task, got {sorted(sizes)}")
    n = next(iter(sizes), 0)
    tasks = {t: [bool(r[s]) for s in sorted(r)] for t, r in runs.items() if None not in r.values()}
    scenarios = {
        s: [all(tasks[t][i] for t in ts) for i in range(n)] for s, ts in members.items() if all(t in tasks for t in ts)
    }
    return tasks, scenarios, n


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

    def rounded(entry: Any, digits: int, scale: float = 1.0) -> float | None:
        mean = entry["mean"] if isinstance(entry, Mapping) else entry
        return None if mean is None else round(scale * mean, digits)

    def row(tgc: Any, sgc: Any, interactions: Any) -> dict[str, float | None]:
        return {
            "task_goal_completion": rounded(tgc, 1, 100),
            "scenario_goal_completion": rounded(sgc, 1, 100),
            "interactions": rounded(interactions, 2),
        }

    figures = ("tgc", "sgc", "interactions")
    return {
        split: {
            "all": row(*(r[name] for name in figures)),
            **{
                f"level {level}": row(*(r[f"{name}_by_difficulty"][level] for name in figures))
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
