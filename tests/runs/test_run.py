"""Whole runs: what a user types, what is left behind, what happens when things go wrong.

Most runs are made in this process (`train`); what belongs to the process itself, in one of its own (`shell`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from support import ROOT
from support.runs import QUICK, SMALL, rows_of, same, shell, train

from draco.core.errors import ConfigError
from draco.core.types import Task
from draco.env.base import Evaluator, Outcome
from draco.run.archive import read_table, step_folders
from draco.run.checkpoint import checkpoints

EXAMPLES = ROOT / "examples" / "conf"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A quick run of the defaults: dynamic rubrics, step credit, scripted judge."""
    run = tmp_path_factory.mktemp("runs") / "quick"
    return run, shell(*QUICK, f"run={run}")


class Raises(Evaluator):
    """An evaluator that must not be asked."""

    def __init__(self, **options: object) -> None:
        pass

    def evaluate(self, task: Task, end_state: str) -> Outcome:
        raise RuntimeError("no peeking")


def test_a_run_leaves_everything_behind(finished: tuple[Path, str]) -> None:
    run, printed = finished
    names = {p.name for p in run.iterdir()}
    assert names == {
        "archive", "checkpoints", "config.yaml", "evaluation_after.json", "evaluation_before.json", "metrics.csv",
        "report.html", "summary.json", "train_success.csv", "transcript_secret",
    }  # fmt: skip
    assert "TGC" in printed
    assert str(run) in printed
    assert (run / "transcript_secret").stat().st_mode & 0o777 == 0o600
    summary = json.loads((run / "summary.json").read_text())
    assert summary["setting"] == "dynamic+step"
    assert {
        "setting", "seed", "steps", "base_success", "final_success", "base_sgc", "final_sgc", "inert_share",
        "judge_calls", "judge_cost_usd", "wall_s", "tokens",
    } <= summary.keys()  # fmt: skip
    # One proposal a task, one a rollout, one merge, one score a rollout; attribution only where a criterion survived.
    groups = 2 * 3
    assert groups * (1 + 3 + 1 + 3) <= summary["judge_calls"] <= groups * (1 + 3 + 1 + 3 + 3)
    assert summary["judge_cost_usd"] == 0
    assert len(rows_of(run / "metrics.csv")) == 2
    assert len(rows_of(run / "train_success.csv")) == 2 * 3 * 3


def test_the_archive_holds_calls_and_no_outcome(finished: tuple[Path, str]) -> None:
    run, _ = finished
    assert len(step_folders(run)) == 2
    calls = read_table(run, "judge_calls")
    assert set(calls["phase"].to_pylist()) >= {"propose_task", "propose_rollout", "merge", "score"}
    columns = {c for f in run.glob("archive/*/*.parquet") for c in read_table(run, f.stem).column_names}
    assert not {c for c in columns if "success" in c or "outcome" in c} - {
        "outcome"
    }  # judge_calls.outcome: of the call
    secret = (run / "transcript_secret").read_bytes()
    for file in run.rglob("*"):
        if file.is_file() and file.name != "transcript_secret":
            content = file.read_bytes()
            assert secret not in content
            assert secret.hex().encode() not in content


def test_the_same_seed_gives_the_same_adapter_and_another_does_not(finished: tuple[Path, str], tmp_path: Path) -> None:
    train(*QUICK, f"run={tmp_path / 'again'}", "eval.before=false")
    train(*QUICK, f"run={tmp_path / 'other'}", "eval.before=false", "seed=1")
    assert same(finished[0], tmp_path / "again")
    assert not same(finished[0], tmp_path / "other")


def test_outcome_blindness_an_evaluator_that_always_raises_changes_nothing(
    finished: tuple[Path, str], tmp_path: Path
) -> None:
    run = tmp_path / "blind"
    train(*QUICK, f"run={run}", f"env.evaluator._target_={__name__}.Raises")
    assert same(finished[0], run)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["base_success"], summary["final_success"], summary["unevaluated"]) == (None, None, 6)
    rows = rows_of(run / "train_success.csv")
    assert {r["success"] for r in rows} == {""}
    assert rows[0]["error"] == "RuntimeError: no peeking"


def test_an_environment_without_an_evaluator_trains(finished: tuple[Path, str], tmp_path: Path) -> None:
    train(*QUICK, f"run={tmp_path / 'none'}", "env.evaluator=null")
    assert same(finished[0], tmp_path / "none")


def test_an_existing_run_is_safe(finished: tuple[Path, str], caplog: pytest.LogCaptureFixture) -> None:
    run, _ = finished
    with pytest.raises(ConfigError, match="exists and is not empty"):
        train(*QUICK, f"run={run}")
    caplog.set_level("INFO", logger="draco")
    assert train(f"resume={run}") == json.loads((run / "summary.json").read_text())
    assert "has already run its 2 steps" in caplog.text


def test_a_raised_number_of_steps_goes_on_to_the_same_adapter(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = (*QUICK, "eval.before=false", "eval.tasks=3")
    train(*options, "steps=3", f"run={whole}")
    train(*options, "steps=1", f"run={parts}")
    train(f"resume={parts}", "steps=3")
    assert same(whole, parts)
    rows = [r["step"] for r in rows_of(parts / "metrics.csv")]
    assert rows == ["1", "2", "3"]
    assert len(step_folders(parts)) == 3
    # What the shorter run said at its end is kept, and is no longer what the run says.
    (old,) = parts.glob("aside/*/summary.json")
    assert json.loads(old.read_text())["steps"] == 1
    closing = [r["summary/final_success"] for r in rows_of(parts / "metrics.csv")]
    assert closing[:2] == ["", ""]
    assert closing[2] != ""
    assert train(f"resume={parts}")["steps"] == 3  # remembered: this is a finished run of three
    (parts / "summary.json").unlink()
    with pytest.raises(ConfigError, match="already made 3 steps; use steps=3 or more, not 2"):
        train(f"resume={parts}", "steps=2")


class FakeRun:
    """What `wandb.init` returns."""

    rows: ClassVar[list[tuple[int, dict[str, float]]]] = []
    summary: ClassVar[dict[str, object]] = {}

    def log_artifact(self, artifact: object) -> None:
        pass

    def log(self, row: dict[str, float], *, step: int, commit: bool) -> None:
        self.rows.append((step, dict(row)))

    def finish(self) -> None:
        pass


def test_wandb_gets_our_steps_once_and_in_order_over_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wandb.init", lambda **options: FakeRun())
    monkeypatch.setattr(FakeRun, "rows", [])
    monkeypatch.setenv("WANDB_MODE", "offline")
    options = (*SMALL, "eval.every=1", "rubric=random", "credit=uniform", "logger=wandb", "logger.wandb.mode=offline")
    run = tmp_path / "run"
    train(*options, "steps=2", f"run={run}")
    shutil.rmtree(checkpoints(run)[-1])  # as if the run had been killed between its first and its second checkpoint
    (run / "summary.json").unlink()
    train(f"resume={run}", "steps=3")
    assert [step for step, _ in FakeRun.rows] == [1, 2, 3]
    for _, row in FakeRun.rows:
        assert {"eval/tgc", "update/loss"} <= row.keys()
    assert "summary/final_success" in FakeRun.rows[-1][1]


def changed(name: str, value: Any) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        file = checkpoints(run)[-1] / "state.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (changed("tasks", "other"), "the training tasks are no longer those of"),
        (lambda run: (checkpoints(run)[-1] / "optimizer.safetensors").unlink(), "optimizer.safetensors: not found"),
        (lambda run: (checkpoints(run)[-1] / "state.json").unlink(), "state.json: not found; delete that folder"),
    ],
    ids=["tasks", "optimizer", "state"],
)
def test_what_cannot_be_resumed_is_one_line(
    finished: tuple[Path, str], tmp_path: Path, damage: Callable[[Path], Any], message: str
) -> None:
    run = tmp_path / "copy"
    shutil.copytree(finished[0], run)
    damage(run)
    with pytest.raises(ConfigError, match=message) as caught:
        train(f"resume={run}", "steps=3")
    assert "\n" not in str(caught.value)


def test_a_resume_makes_no_folder_but_its_own(finished: tuple[Path, str], tmp_path: Path) -> None:
    printed = shell(f"resume={finished[0]}", f"run={tmp_path / 'litter'}", env={"PYTHONPATH": str(ROOT)})
    assert "has already run its 2 steps" in printed
    assert not (tmp_path / "litter").exists()


def test_a_moved_run_goes_on_where_it_is(finished: tuple[Path, str], tmp_path: Path) -> None:
    run = tmp_path / "moved"
    shutil.copytree(finished[0], run)
    before = sorted(p.relative_to(finished[0]) for p in finished[0].rglob("*"))
    assert train(f"resume={run}", "steps=3")["steps"] == 3
    assert len(step_folders(run)) == len(rows_of(run / "metrics.csv")) == 3
    assert sorted(p.relative_to(finished[0]) for p in finished[0].rglob("*")) == before


def test_the_example_environment_trains(tmp_path: Path) -> None:
    options = ("env=guess", "rubric=outcome", "credit=uniform", "steps=1", "tasks_per_step=4", "group_size=2")
    assert train(*options, f"run={tmp_path / 'guess'}", conf=EXAMPLES)["env"] == "guess"


def test_the_example_credit_rule_trains(tmp_path: Path) -> None:
    train("credit=discounted", *QUICK, f"run={tmp_path / 'run'}", conf=EXAMPLES)
    rows = read_table(tmp_path / "run", "credits").to_pylist()
    assert rows
    for row in rows:
        n, a = row["step_tokens"], row["step_advantages"]
        assert sum(x * y for x, y in zip(n, a, strict=True)) == pytest.approx(row["advantage"] * sum(n), abs=1e-9)


def test_wandb_offline_stays_in_the_run_folder(tmp_path: Path) -> None:
    run = tmp_path / "wandb_run"
    env = {"WANDB_MODE": "offline", "WANDB_API_KEY": ""}
    options = (*SMALL, "steps=1", "rubric=random", "credit=uniform", "eval.before=false", "logger=wandb")
    printed = shell(*options, f"run={run}", env=env, cwd=tmp_path)
    assert "wandb: offline" in printed
    assert list(run.rglob("*.wandb"))
    assert not (tmp_path / "wandb").exists()
