"""Spread over checkpoints and seeds, and the difference of two runs on the same tasks (method §7)."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Difference", "Spread", "mean_std", "paired_bootstrap", "task_means"]


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and sample standard deviation over checkpoints and seeds."""

    mean: float
    std: float | None  #: None where there is one value only
    missing: int = 0  #: values that nobody knows and that are in neither: to be said wherever the mean is shown


@dataclass(frozen=True, slots=True)
class Difference:
    """B − A on the tasks that both have."""

    mean: float
    low: float  #: percentile bounds of the bootstrap distribution
    high: float
    tasks: int  #: tasks that both have
    only_one: int  #: tasks that one of them lacks, or whose success is unknown in one: left out, and to be said


def mean_std(values: Iterable[float | None]) -> Spread | None:
    """Spread of what is known; None when nothing is."""
    given = list(values)
    known = [v for v in given if v is not None]
    if not known:
        return None
    std = statistics.stdev(known) if len(known) > 1 else None
    return Spread(statistics.fmean(known), std, len(given) - len(known))


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
    """95% confidence interval for mean(B) − mean(A): tasks are drawn with replacement, both runs together.

    The same numbers give the same interval.

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
    low, high = np.quantile(_draw_means(gaps, np.random.default_rng(0)), [0.025, 0.975])
    return Difference(float(gaps.mean()), float(low), float(high), len(common), len(a.keys() ^ b.keys()))


def _draw_means(gaps: np.ndarray[Any, Any], generator: np.random.Generator) -> Sequence[float]:
    # In slices, so that 10,000 draws of 600 tasks need no 50 MB at once.
    means: list[float] = []
    for _ in range(10):
        picks = generator.integers(0, len(gaps), size=(1000, len(gaps)))
        means.extend(gaps[picks].mean(axis=1).tolist())
    return means
