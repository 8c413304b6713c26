"""Spread over checkpoints and seeds, and the difference of two runs on the same tasks (Section 4.1.3, Table 4)."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Difference", "Spread", "mean_std", "paired_bootstrap", "task_means"]


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and sample standard deviation over checkpoints and seeds."""

    mean: float
    std: float | None  #: None where there is one value only
    missing: int = 0  #: unknown values, in neither; to be named wherever the mean is shown

    def shown(self, scale: float) -> str:
        """`mean ± std`, times a scale."""
        return f"{scale * self.mean:.1f}" + ("" if self.std is None else f" ± {scale * self.std:.1f}")


@dataclass(frozen=True, slots=True)
class Difference:
    """B − A on the tasks that both have."""

    mean: float
    low: float  #: percentile bounds of the bootstrap distribution
    high: float
    tasks: int  #: tasks that both have
    only_one: int  #: tasks left out because one run lacks them or does not know their success; to be named


def mean_std(values: Iterable[float | None]) -> Spread | None:
    """Spread of the known values; None without any."""
    given = list(values)
    known = [v for v in given if v is not None]
    std = statistics.stdev(known) if len(known) > 1 else None
    return Spread(statistics.fmean(known), std, len(given) - len(known)) if known else None


def task_means(records: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Mean success over the runs of every task; a task with an unknown success (its evaluator failed) is left out.

    Args:
        records: of an evaluation file: `task_id`, `success`.
    """
    runs: dict[str, list[bool | None]] = defaultdict(list)
    for record in records:
        runs[record["task_id"]].append(record["success"])
    return {t: statistics.fmean(float(bool(s)) for s in found) for t, found in runs.items() if None not in found}


def paired_bootstrap(a: Mapping[str, float], b: Mapping[str, float]) -> Difference:
    """95% confidence interval of mean(B) − mean(A): tasks are drawn with replacement, both runs together.

    The same input gives the same interval.

    Args:
        a, b: success by task, see `task_means`.

    Raises:
        ValueError: no task in common.

    Example::

        >>> paired_bootstrap({"t1": 0.0, "t2": 0.0}, {"t1": 1.0, "t2": 1.0}).low
        1.0
    """
    common = sorted(a.keys() & b.keys())
    if not common:
        raise ValueError("expected at least one task that both runs have, got none")
    gaps = np.array([b[t] - a[t] for t in common])
    generator = np.random.default_rng(0)
    size = (1000, len(gaps))  # in ten slices: 10,000 draws of 600 tasks at once would take 50 MB
    means = [gaps[generator.integers(0, len(gaps), size)].mean(axis=1) for _ in range(10)]
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return Difference(float(gaps.mean()), float(low), float(high), len(common), len(a.keys() ^ b.keys()))
