"""`draco attribution`: where blame went in a run on `desk`, whose evaluator knows the step that caused each failure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from draco.config.arguments import Command, option, words
from draco.config.options import Count
from draco.core.table import Cell, Table

__all__ = ["COMMAND", "main"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The runs."""

    run: tuple[Path, ...] = words("run folders")
    windows: Count = option(4, "windows of training steps")


COMMAND = Command(
    "draco attribution",
    "where blame went in runs on desk, whose evaluator knows the causal steps",
    Options,
    """
    Over rollouts that failed and got a negative advantage, by window of training steps:

        cited        the judge's failing verdicts cite the causal step (one of them, where there are several)
        step share   of the blame A·N that the run's credit put on the causal steps, Σ n_j·a_j / (A·N) over them
        uniform      the share that uniform credit would have put there, Σ n_j / N
        no credit    rollouts to which step credit gave no distinction (`unanimous`, or a fallback)

    Read after the fact, for the eyes only: nothing that trains can see a causal step.
    """,
    ("draco attribution runs/NAME", "draco attribution runs/ablation/dynamic-step-s0 runs/ablation/static-step-s0"),
)


def rows(run: Path) -> list[tuple[int, bool, float, float, bool]]:
    """(training step, causal step cited, its share of the blame, its share of the tokens, no distinction)."""
    from draco.env.desk.evaluator import DeskEvaluator
    from draco.env.desk.scenarios import gold_task
    from draco.run.archive import read_table

    cited: dict[tuple[int, int, int], set[int]] = defaultdict(set)
    for v in read_table(run, "verdicts").select(["step", "group", "sample", "score", "cited_steps"]).to_pylist():
        if v["score"] == -1:
            cited[v["step"], v["group"], v["sample"]] |= set(v["cited_steps"] or ())
    ends = {
        (t["step"], t["group"], t["sample"]): (t["task_id"], t["end_state"])
        for t in read_table(run, "trajectories").select(["step", "group", "sample", "task_id", "end_state"]).to_pylist()
    }
    found = []
    for c in read_table(run, "credits").to_pylist():
        key = (c["step"], c["group"], c["sample"])
        if c["advantage"] >= 0:
            continue
        task, end = ends[key]
        outcome = DeskEvaluator().evaluate_gold(gold_task(task), end)
        causal = [j for j in outcome.causal_steps if j <= len(c["step_tokens"])]
        if outcome.success or not causal:
            continue
        tokens, total = c["step_tokens"], sum(c["step_tokens"])
        blame = sum(tokens[j - 1] * c["step_advantages"][j - 1] for j in causal) / (c["advantage"] * total)
        plain = sum(tokens[j - 1] for j in causal) / total
        found.append((c["step"], bool(cited[key] & set(causal)), blame, plain, c["reason"] != "credited"))
    return found


def main(arguments: list[str]) -> None:
    """Print one table a run."""
    given = COMMAND.parse(arguments)
    from rich.console import Console

    console = Console()
    for run in given.run:
        found = rows(run)
        if not found:
            console.print(f"{run}: no failed rollout with a negative advantage")
            continue
        last = max(step for step, *_ in found) + 1
        columns = ("steps", "rollouts", "cited", "step share", "uniform", "no credit")
        shown: list[tuple[Cell, ...]] = []
        for w in range(given.windows):
            low, high = last * w // given.windows, last * (w + 1) // given.windows
            part = [r for r in found if low <= r[0] < high]
            if part:
                shares = (mean(r[i] for r in part) for i in (1, 2, 3, 4))
                shown.append((f"{low}-{high - 1}", str(len(part)), *shares))
        console.print(Table("attribution", str(run), columns, tuple(shown)).terminal())
