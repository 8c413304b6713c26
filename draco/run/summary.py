"""What a finished run says: summary.json, train_success.csv and the closing table."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from draco.core import files as durable
from draco.env.base import Evaluator
from draco.env.records import evaluate_end_state
from draco.run.archive import read_table, read_trajectories, step_folders
from draco.run.loggers import read_metrics

__all__ = [
    "closing_table", "evaluation_file", "evaluation_metrics", "final_summary", "read_json", "scalars", "train_success",
    "write_json",
]  # fmt: skip


def read_json(path: Path) -> dict[str, Any]:
    """Read an object."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object; complete or not at all."""
    path.parent.mkdir(exist_ok=True)
    durable.write_text(path, json.dumps(content, indent=1))


def evaluation_file(run: Path, step: int) -> Path:
    """Where the evaluation after `step` batches lies that was made during training."""
    return run / "evaluations" / f"step={step:06d}.json"


def evaluation_metrics(content: Mapping[str, Any]) -> dict[str, float]:
    """The figures of an evaluation during training, for loggers."""
    return {f"eval/{k}": content[k] for k in ("tgc", "sgc", "turns") if content[k] is not None}


def train_success(run: Path, evaluator: Evaluator | None) -> None:
    """Success on training tasks, after the fact and from stored end states, to train_success.csv.

    Called when training is over: no stage can read it, and no checkpoint is chosen by it.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(["step", "task_id", "sample", "success", "termination", "error"])
    for folder in step_folders(run):
        step = int(folder.name.removeprefix("step="))
        for t in read_trajectories(read_table(run, "trajectories", [step])):
            outcome = evaluate_end_state(evaluator, t.task, t.end_state, t.termination)
            success = "" if outcome.success is None else int(outcome.success)
            writer.writerow([step, t.task.id, t.sample, success, t.termination, outcome.error])
    durable.write_text(run / "train_success.csv", text.getvalue())


def final_summary(
    run: Path, config: DictConfig, before: Mapping[str, Any] | None, after: Mapping[str, Any], *, wall_s: float
) -> dict[str, Any]:
    """Content of summary.json (null where something was not measured)."""
    rows = _metrics(run)
    calls = _total(rows, "judge/calls")
    # A step whose calls had no known price has no cost column: then the bill is unknown, not 0.
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
        "base_success": before["tgc"] if before else None,
        "final_success": after["tgc"],
        "base_sgc": before["sgc"] if before else None,
        "final_sgc": after["sgc"],
        "final_tgc_pass_hat": after["tgc_pass_hat"],
        "final_sgc_pass_hat": after["sgc_pass_hat"],
        "base_turns": before["turns"] if before else None,
        "final_turns": after["turns"],
        "base_terminations": before["terminations"] if before else None,
        "final_terminations": after["terminations"],
        "base_faults": before["faults"] if before else None,
        "final_faults": after["faults"],
        "inert_share": _average(rows, "credit/inert_verdicts"),
        "rubric_pass_rate": _average(rows, "rubric/pass_rate"),
        "zero_std_share": _average(rows, "group/zero_std"),
        "quarantined": _total(rows, "rollout/quarantined"),
        "unevaluated": after["unevaluated"],
        "judge_calls": int(calls),
        "judge_failed": int(_total(rows, "judge/failed")),
        "judge_cost_usd": _total(rows, "judge/cost_usd") if priced else None,
        "tokens": int(_total(rows, "update/step_tokens")),
        "wall_s": round(wall_s, 1),
        "run": str(run),
    }


def scalars(summary: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a summary, for loggers."""
    return {f"summary/{k}": float(v) for k, v in summary.items() if isinstance(v, int | float)}


def _metrics(run: Path) -> list[dict[str, float]]:
    _, rows = read_metrics(run / "metrics.csv")
    return [{k: float(v) for k, v in row.items() if v != ""} for row in rows]


def _total(rows: list[dict[str, float]], name: str) -> float:
    return sum(r.get(name, 0.0) for r in rows)


def _average(rows: list[dict[str, float]], name: str) -> float | None:
    present = [r[name] for r in rows if name in r]
    return sum(present) / len(present) if present else None


def closing_table(summary: Mapping[str, Any], console: Console) -> None:
    """Base against trained policy, in the terminal."""
    tasks = f"{summary['eval_tasks']} held-out tasks of {summary['split']}"
    console.print(f"{summary['setting']} on {summary['env']}: {tasks}", highlight=False, soft_wrap=True)
    table = Table()
    table.add_column("")
    table.add_column("base", justify="right")
    table.add_column("trained", justify="right")
    for label, before, after, form in (
        ("TGC (tasks solved)", "base_success", "final_success", "{:.1%}"),
        ("SGC (scenarios solved)", "base_sgc", "final_sgc", "{:.1%}"),
        ("turns", "base_turns", "final_turns", "{:.1f}"),
    ):
        table.add_row(label, _show(summary[before], form), _show(summary[after], form))
    base_ends, final_ends = summary["base_terminations"] or {}, summary["final_terminations"]
    for kind in sorted(base_ends.keys() | final_ends.keys()):
        shown = _show(base_ends.get(kind, 0.0) if base_ends else None, "{:.1%}")
        table.add_row(f"ended: {kind}", shown, _show(final_ends.get(kind, 0.0), "{:.1%}"))
    base_faults, final_faults = summary["base_faults"] or {}, summary["final_faults"]
    for fault in sorted(base_faults.keys() | final_faults.keys()):
        shown = _show(base_faults.get(fault, 0.0) if base_faults else None, "{:.1%}")
        table.add_row(f"fault: {fault}", shown, _show(final_faults.get(fault, 0.0), "{:.1%}"))
    table.add_section()
    for label, key, form in (
        ("inert share (verdicts)", "inert_share", "{:.1%}"),
        ("rubric pass rate", "rubric_pass_rate", "{:.1%}"),
        ("quarantined rollouts", "quarantined", "{:.0f}"),
        ("judge calls", "judge_calls", "{:,}"),
        ("judge cost (USD)", "judge_cost_usd", "{:.2f}"),
        ("tokens trained on", "tokens", "{:,}"),
        ("wall time (s)", "wall_s", "{:.0f}"),
    ):
        table.add_row(label, "", _show(summary[key], form))
    console.print(table)
    console.print(f"run folder: {summary['run']}", highlight=False, soft_wrap=True)


def _show(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)
