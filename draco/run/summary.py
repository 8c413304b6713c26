"""Results of a finished run: summary.json, train_success.csv, and the table in the terminal."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from draco.core import files
from draco.env.base import Evaluator
from draco.env.records import evaluate_end_state
from draco.run.archive import archived_steps, read_table, read_trajectories
from draco.run.loggers import read_metrics

__all__ = [
    "closing_table", "evaluation_file", "evaluation_metrics", "final_summary", "metric_rows", "scalars",
    "train_success",
]  # fmt: skip


def evaluation_file(run: Path, step: int) -> Path:
    """The file of the evaluation after `step` batches of training."""
    return run / "evaluations" / f"{files.step_name(step)}.json"


def evaluation_metrics(content: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of an evaluation during training, for loggers."""
    return {f"eval/{k}": content[k] for k in ("tgc", "sgc", "turns") if content[k] is not None}


def train_success(run: Path, evaluator: Evaluator | None) -> None:
    """Write train_success.csv: success on training tasks, evaluated from the archived end states.

    Called after training, so that no stage can use it.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(["step", "task_id", "sample", "success", "termination", "error"])
    for step in archived_steps(run):
        for t in read_trajectories(read_table(run, "trajectories", [step])):
            outcome = evaluate_end_state(evaluator, t.task, t.end_state, t.termination)
            success = "" if outcome.success is None else int(outcome.success)
            writer.writerow([step, t.task.id, t.sample, success, t.termination, outcome.error])
    files.write_text(run / "train_success.csv", text.getvalue())


def final_summary(
    run: Path, config: DictConfig, before: Mapping[str, Any] | None, after: Mapping[str, Any], *, wall_s: float
) -> dict[str, Any]:
    """Content of summary.json; null = not measured."""
    rows = metric_rows(run)
    base = before or {}
    # A step with a call of unknown price has no cost in its row: then the total is unknown, not 0.
    priced = all("judge/cost_usd" in r for r in rows if r.get("judge/calls"))
    return {
        "setting": f"{config.rubric.name}+{config.credit.name}",
        "env": config.env.name,
        "policy": config.policy.path,
        "seed": config.seed,
        "steps": config.steps,
        "split": after["split"],
        "eval_tasks": after["tasks"],
        "eval_n": after["n"],
        "base_success": base.get("tgc"),
        "final_success": after["tgc"],
        "base_sgc": base.get("sgc"),
        "final_sgc": after["sgc"],
        "final_tgc_pass_hat": after["tgc_pass_hat"],
        "final_sgc_pass_hat": after["sgc_pass_hat"],
        "base_turns": base.get("turns"),
        "final_turns": after["turns"],
        "base_terminations": base.get("terminations"),
        "final_terminations": after["terminations"],
        "base_faults": base.get("faults"),
        "final_faults": after["faults"],
        "inert_share": _average(rows, "credit/inert_verdicts"),
        "rubric_pass_rate": _average(rows, "rubric/pass_rate"),
        "zero_std_share": _average(rows, "group/zero_std"),
        "quarantined": _total(rows, "rollout/quarantined"),
        "unevaluated": after["unevaluated"],
        "judge_calls": int(_total(rows, "judge/calls")),
        "judge_failed": int(_total(rows, "judge/failed")),
        "judge_cost_usd": _total(rows, "judge/cost_usd") if priced else None,
        "tokens": int(_total(rows, "update/step_tokens")),
        "wall_s": round(wall_s, 1),
        "run": str(run),
    }


def metric_rows(run: Path) -> list[dict[str, float]]:
    """Rows of metrics.csv, without empty cells."""
    _, rows = read_metrics(run / "metrics.csv")
    return [{k: float(v) for k, v in row.items() if v != ""} for row in rows]


def scalars(summary: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a summary, for loggers."""
    return {f"summary/{k}": float(v) for k, v in summary.items() if isinstance(v, int | float)}


def _total(rows: list[dict[str, float]], name: str) -> float:
    return sum(r.get(name, 0.0) for r in rows)


def _average(rows: list[dict[str, float]], name: str) -> float | None:
    present = [r[name] for r in rows if name in r]
    return sum(present) / len(present) if present else None


#: rows of the closing table with a column for base and trained, and rows with one value
_COMPARED = (
    ("TGC (tasks solved)", "success", "{:.1%}"), ("SGC (scenarios solved)", "sgc", "{:.1%}"),
    ("turns", "turns", "{:.1f}"),
)  # fmt: skip
_ONCE = (
    ("inert share (verdicts)", "inert_share", "{:.1%}"), ("rubric pass rate", "rubric_pass_rate", "{:.1%}"),
    ("quarantined rollouts", "quarantined", "{:.0f}"), ("judge calls", "judge_calls", "{:,}"),
    ("judge cost (USD)", "judge_cost_usd", "{:.2f}"), ("tokens trained on", "tokens", "{:,}"),
    ("wall time (s)", "wall_s", "{:.0f}"),
)  # fmt: skip


def closing_table(summary: Mapping[str, Any], console: Console) -> None:
    """Print base and trained policy side by side."""
    tasks = f"{summary['eval_tasks']} held-out tasks of {summary['split']}"
    console.print(f"{summary['setting']} on {summary['env']}: {tasks}", highlight=False, soft_wrap=True)
    table = Table()
    table.add_column("")
    table.add_column("base", justify="right")
    table.add_column("trained", justify="right")
    for label, key, form in _COMPARED:
        table.add_row(label, _show(summary[f"base_{key}"], form), _show(summary[f"final_{key}"], form))
    for label, key in (("ended", "terminations"), ("fault", "faults")):
        base, final = summary[f"base_{key}"] or {}, summary[f"final_{key}"]
        for kind in sorted(base.keys() | final.keys()):
            before = base.get(kind, 0.0) if base else None  # None: not evaluated before training
            table.add_row(f"{label}: {kind}", _show(before, "{:.1%}"), _show(final.get(kind, 0.0), "{:.1%}"))
    table.add_section()
    for label, key, form in _ONCE:
        table.add_row(label, "", _show(summary[key], form))
    console.print(table)
    console.print(f"run folder: {summary['run']}", highlight=False, soft_wrap=True)


def _show(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)
