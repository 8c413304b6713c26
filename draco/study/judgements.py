"""Groups, judgements and credits of an archived step, read back as the objects of training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draco.core.types import Credit, Criterion, Failure, Group, Judgement, Trajectory, Verdict
from draco.run.archive import read_table, read_trajectories

__all__ = ["read_credits", "read_groups", "rows_by_group"]

#: rows by table
Rows = Mapping[str, Sequence[Mapping[str, Any]]]


def read_groups(run: Path, step: int) -> list[Group]:
    """All groups as they were rolled out, with their quarantined members."""
    table = read_table(run, "trajectories", [step])
    members: dict[int, list[Trajectory]] = defaultdict(list)
    for index, trajectory in zip(table["group"].to_pylist(), read_trajectories(table), strict=True):
        members[index].append(trajectory)
    return [Group(t[0].task, tuple(t), index, step) for index, t in sorted(members.items())]


def rows_by_group(run: Path, step: int, *names: str) -> dict[int, dict[str, list[dict[str, Any]]]]:
    """Rows of some tables of a step: group → table → rows.

    Raises:
        FileNotFoundError: the step is not archived.
    """
    found: dict[int, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: {name: [] for name in names})
    for name in names:
        for row in read_table(run, name, [step]).to_pylist():
            found[row["group"]][name].append(row)
    return dict(sorted(found.items()))


def read_credits(run: Path, step: int) -> list[Credit]:
    """Credits of the judged groups. A group that was skipped has none.

    Raises:
        FileNotFoundError: the step is not archived.
        ValueError: tables disagree; the message names the group.
    """
    groups = {g.index: g for g in read_groups(run, step)}
    found = rows_by_group(run, step, "credits", "criteria", "verdicts", "failures")
    return [_credit(groups[index], rows) for index, rows in found.items() if rows["credits"]]


def _credit(group: Group, rows: Rows) -> Credit:
    credits = rows["credits"]
    by_sample = {t.sample: t for t in group.trajectories}
    verdicts = {(r["criterion"], r["sample"]): r for r in rows["verdicts"]}
    members = [r["sample"] for r in credits]
    criteria = sorted(rows["criteria"], key=lambda r: r["criterion"])
    if len(verdicts) != len(criteria) * len(members) or any(s not in by_sample for s in members):
        raise ValueError(
            f"step {group.step}, group {group.index}: expected {len(criteria)} × {len(members)} verdicts and a "
            f"trajectory for every member, got {len(verdicts)} verdicts; the archive is damaged"
        )
    judgement = Judgement(
        group=Group(group.task, tuple(by_sample[s] for s in members), group.index, group.step),
        criteria=tuple(
            Criterion(
                r["title"], r["description"], r["evaluator_instruction"], r["source"],
                tuple(r["grounding_references"] or ()), r["evidence"],
            )
            for r in criteria
        ),
        verdicts=tuple(tuple(_verdict(verdicts[k, s]) for s in members) for k in range(len(criteria))),
        dropped=tuple(r["dropped"] for r in criteria),
        rewards=tuple(r["reward"] for r in credits),
        failures=tuple(Failure(r["sample"], r["phase"], r["reason"]) for r in rows["failures"]),
    )  # fmt: skip
    return Credit(
        judgement=judgement,
        advantages=tuple(r["advantage"] for r in credits),
        step_advantages=tuple(tuple(r["step_advantages"]) for r in credits),
        qualities=tuple(tuple(r["qualities"]) for r in credits),
        reasons=tuple(r["reason"] for r in credits),
        zero_std=any(r["zero_std"] for r in credits),
    )


def _verdict(row: Mapping[str, Any]) -> Verdict:
    return Verdict(
        row["score"], tuple(row["cited_steps"] or ()), row["justification"], row["evidence"], row["explanation"],
        row["override"],
    )  # fmt: skip
