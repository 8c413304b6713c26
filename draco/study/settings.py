"""Settings in the order of rows and legends, and the evaluations that stand for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from draco.study.runs import Evaluation, Run

__all__ = ["SETTINGS", "by_setting", "evaluations", "fault_notes", "finals", "many", "splits"]

#: known settings in their order; others follow by name
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
        base: also those that only the untrained policy was evaluated on.
    """
    found = (e for r in runs for e in r.evaluations if not e.during_training)
    return _ordered({e.split for e in found if base or e.checkpoint != "base"}, _SPLITS)


def finals(runs: Sequence[Run], split: str) -> list[Evaluation]:
    """The evaluations of all runs that a row averages."""
    return [e for r in runs for e in r.final_evaluations(split)]


def evaluations(runs: Sequence[Run], split: str) -> dict[str, list[Evaluation]]:
    """What every row averages: `base` (the untrained policy, one evaluation a run that has one), then the settings."""
    base = [e for r in runs if r.trained and (e := r.base_evaluation(split)) is not None]
    return {"base": base} | {setting: finals(cell, split) for setting, cell in by_setting(runs).items()}


def fault_notes(split: str, rows: Mapping[str, Sequence[Evaluation]]) -> list[str]:
    """How many rollouts of every row failed through no fault of the policy, or have no success at all."""
    said = []
    for name, found in rows.items():
        rollouts = many(sum(int(e.content.get("tasks") or 0) * e.n for e in found), "rollout")
        faults, unknown = (sum(int(e.content.get(k) or 0) for e in found) for k in ("quarantined", "unevaluated"))
        if faults:
            said.append(
                f"{name}, {split}: {faults} of {rollouts} ended by a fault (environment, engine or deadline) and count "
                "as failed."
            )
        if unknown:
            said.append(f"{name}, {split}: {unknown} of {rollouts} left out: the evaluator failed.")
    return said


def many(number: int, noun: str) -> str:
    """`1 task`, `2 tasks`."""
    return f"{number} {noun}{'s' * (number != 1)}"
