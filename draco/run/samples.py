"""Rows for the tables of a logger, from the archive: a few rollouts of a step, and its criteria."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from draco.run.archive import read_table, step_folder
from draco.run.numbers import step_numbers

__all__ = ["COLUMNS", "sample_rows"]

_TEXT = 4000  #: longest transcript, in characters
_CRITERIA = 50  #: most criteria of a step; those with most verdicts are taken

#: table → columns
COLUMNS = {
    "samples/trajectories": ("step", "task", "sample", "reward", "advantage", "reason", "termination", "transcript"),
    "samples/criteria": ("step", "criterion", "passes", "fails", "not applicable"),
}


def sample_rows(run: Path, step: int, count: int) -> dict[str, list[list[Any]]]:
    """Rows by table; no rows if the step is not archived. The same step always gives the same rows.

    Args:
        run: run folder.
        step: number of batches done, which is the archive's step + 1.
        count: number of rollouts.
    """
    if not step_folder(run, step - 1).is_dir():
        return {name: [] for name in COLUMNS}
    credits = {(r["group"], r["sample"]): r for r in read_table(run, "credits", [step - 1]).to_pylist()}
    table = read_table(run, "trajectories", [step - 1])
    chosen = sorted(random.Random(step).sample(range(table.num_rows), min(count, table.num_rows)))
    rollouts = []
    for t in table.take(chosen).to_pylist():
        credit = credits.get((t["group"], t["sample"]), {})
        text = "\n".join(f"[{s['index']}] {s['action']}\n{s['observation']}" for s in t["steps"])[:_TEXT]
        values = [credit.get(k) for k in ("reward", "advantage", "reason")]
        rollouts.append([step, t["task_id"], t["sample"], *values, t["termination"], text])
    counted = sorted(step_numbers(run, step - 1).by_title.items(), key=lambda i: -(i[1].passes + i[1].fails + i[1].na))
    criteria = [[step, title, v.passes, v.fails, v.na] for title, v in counted[:_CRITERIA]]
    return {"samples/trajectories": rollouts, "samples/criteria": criteria}
