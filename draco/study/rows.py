"""What stands in one row of a table and under one name in figures, in which order, and what must be said of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from draco.study.runs import Evaluation, Run

__all__ = ["SETTINGS", "bases", "by_setting", "fault_notes", "finals", "many", "splits"]

#: known settings, in the order of rows and legends; others follow by name
SETTINGS = ("static+uniform", "static+step", "dynamic+uniform", "dynamic+step", "outcome+uniform", "random+uniform")
_SPLITS = ("test_normal", "test_challenge")


def _ordered(names: Iterable[str], first: Sequence[str]) -> list[str]:
    return sorted(names, key=lambda n: (first.index(n) if n in first else len(first), n))


def by_setting(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs by setting, in the order of rows."""
    return {name: [r for r in runs if r.setting == name] for name in _ordered({r.setting for r in runs}, SETTINGS)}


def splits(runs: Sequence[Run], *, base: bool = False) -> list[str]:
    """Splits that policies were evaluated on after training, in the order of columns.

    Args:
        runs: of any setting.
        base: those too that the untrained policy alone was evaluated on.
    """
    found = (e for r in runs for e in r.evaluations if not e.during_training)
    return _ordered({e.split for e in found if base or e.checkpoint != "base"}, _SPLITS)


def finals(runs: Sequence[Run], split: str) -> list[Evaluation]:
    """The checkpoints of all runs that a row averages."""
    return [e for r in runs for e in r.final_evaluations(split)]


def bases(runs: Sequence[Run], split: str) -> list[Evaluation]:
    """The untrained policy's evaluations, one a run that has one."""
    return [e for r in runs if (e := r.base_evaluation(split)) is not None]


def fault_notes(split: str, rows: Mapping[str, Sequence[Evaluation]]) -> list[str]:
    """How many rollouts of every row failed by no doing of the policy, or have no success at all."""
    said = []
    for name, evaluations in rows.items():
        rollouts = sum(int(e.content.get("tasks") or 0) * e.n for e in evaluations)
        if faults := _sum(evaluations, "quarantined"):
            said.append(
                f"{name}, {split}: {faults} of {many(rollouts, 'rollout')} ended by a fault (environment, engine or "
                "deadline) and count as failed."
            )
        if unknown := _sum(evaluations, "unevaluated"):
            said.append(f"{name}, {split}: {unknown} of {many(rollouts, 'rollout')} left out: the evaluator failed.")
    return said


def _sum(evaluations: Sequence[Evaluation], key: str) -> int:
    return sum(int(e.content.get(key) or 0) for e in evaluations)


def many(number: int, noun: str) -> str:
    """`1 task`, `2 tasks`."""
    return f"{number} {noun}{'s' * (number != 1)}"
