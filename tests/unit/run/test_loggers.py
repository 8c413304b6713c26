"""metrics.csv survives any kill; W&B sees every step once and never goes back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import ROOT
from support.small_run import write_run
from support.wandb_file import records

from draco.core.errors import ConfigError
from draco.run.loggers import MetricsCsv, WandbMetrics, read_metrics, wandb_logger


def test_a_line_that_a_kill_cut_off_is_dropped(tmp_path: Path) -> None:
    first = MetricsCsv(str(tmp_path))
    first.log_metrics({"a": 1.0, "b": 0.25}, 1)
    first.log_metrics({"a": 2.0, "b": 0.5}, 2)
    whole = first.path.read_bytes()
    for length in range(len(whole) - 1, whole.index(b"\n"), -1):
        first.path.write_bytes(whole[:length])
        _, rows = read_metrics(first.path)
        # Cut anywhere: each row is there as it was, or not at all.
        assert rows == [{"step": "1", "a": "1.0", "b": "0.25"}][: whole[:length].count(b"\n") - 1]
    first.path.write_bytes(whole[:-4])
    again = MetricsCsv(str(tmp_path))
    again.log_metrics({"a": 2.0, "b": 0.5}, 2)
    assert first.path.read_bytes() == whole


def test_later_columns_and_later_values_of_a_step(tmp_path: Path) -> None:
    logger = MetricsCsv(str(tmp_path))
    logger.log_metrics({"a": 1.0}, 1)
    logger.log_metrics({"a": 2.0, "c": 3.0}, 2)
    logger.log_metrics({"eval/tgc": 0.5}, 2)
    columns, rows = read_metrics(logger.path)
    assert columns == ["step", "a", "c", "eval/tgc"]
    assert rows == [
        {"step": "1", "a": "1.0", "c": "", "eval/tgc": ""},
        {"step": "2", "a": "2.0", "c": "3.0", "eval/tgc": "0.5"},
    ]


class FakeRun:
    """What `wandb.init` returns; refuses what W&B drops."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.finished = 0

    def log(self, row: dict[str, float], *, step: int, commit: bool) -> None:
        assert commit
        assert step > (self.rows[-1][0] if self.rows else -1), "steps must be monotonically increasing"
        self.rows.append((step, dict(row)))

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    """One W&B run over all attempts, as its id is kept."""
    run, ids = FakeRun(), []

    def init(**options: Any) -> FakeRun:
        ids.append(options["id"])
        assert options["resume"] == "allow"
        assert len(set(ids)) == 1
        return run

    monkeypatch.setattr("wandb.init", init)
    return run


def attempt(run: Path, rows: list[dict[str, Any]]) -> WandbMetrics:
    logger = wandb_logger(str(run), mode="offline")
    logger.start(rows)
    return logger


def test_an_unknown_mode_is_named_before_wandb_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"logger\.wandb\.mode is 'foo'; expected online, offline, disabled or auto"):
        wandb_logger(str(tmp_path), mode="foo")
    assert capsys.readouterr().out == ""
    wandb_logger(str(tmp_path), mode="disabled")
    assert capsys.readouterr().out == "wandb: disabled\n"


def test_training_and_evaluation_of_a_step_are_one_row(tmp_path: Path, fake: FakeRun) -> None:
    logger = attempt(tmp_path, [])
    for step in (1, 2):
        logger.log_metrics({"a": step}, step)
        if step == 2:
            logger.log_metrics({"eval/tgc": 0.5}, step)
    logger.finalize("success")  # Lightning's, before the closing figures
    logger.log_metrics({"summary/x": 1.0}, 2)
    logger.close()
    assert fake.rows == [(1, {"a": 1}), (2, {"a": 2, "eval/tgc": 0.5, "summary/x": 1.0})]
    assert fake.finished == 1


def test_a_kill_behind_the_checkpoint_sends_no_step_twice(tmp_path: Path, fake: FakeRun) -> None:
    first = attempt(tmp_path, [])
    for step in range(1, 6):
        first.log_metrics({"a": step}, step)  # killed here: 1 to 4 are sent
    second = attempt(tmp_path, [{"step": "1", "a": "1"}, {"step": "2", "a": "2"}])  # the checkpoint was at 2
    for step in range(3, 8):
        second.log_metrics({"a": step}, step)
    second.close()
    assert fake.rows == [(s, {"a": s}) for s in range(1, 8)]


def test_steps_that_a_kill_kept_from_wandb_come_from_the_file(tmp_path: Path, fake: FakeRun) -> None:
    first = attempt(tmp_path, [])
    first.log_metrics({"a": 1}, 1)
    first.log_metrics({"a": 2}, 2)  # killed here: only 1 is sent, the checkpoint is at 2
    second = attempt(tmp_path, [{"step": "1", "a": "1"}, {"step": "2", "a": "2", "b": ""}])
    second.log_metrics({"a": 3}, 3)
    second.close()
    assert fake.rows == [(1, {"a": 1}), (2, {"a": 2.0}), (3, {"a": 3})]


def test_tables_accumulate_and_the_end_brings_summary_and_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from support.small_run import write_run

    run = write_run(tmp_path / "run")
    (run / "report.html").write_text("<p>", encoding="utf-8")
    fake = ReportingRun()
    started: list[dict[str, Any]] = []
    monkeypatch.setattr("wandb.init", lambda **options: started.append(options) or fake)
    logger = wandb_logger(str(run), mode="offline", tables_every=1, table_rollouts=2)
    logger.start([])
    for step in (1, 2):
        logger.log_metrics({"a": step}, step)
    logger.close()
    assert started[0]["config"]["rubric"]["name"] == "dynamic"
    tables = [row["samples/trajectories"].data for _, row in fake.rows]
    assert [len(t) for t in tables] == [2, 4]  # 2 rollouts a step, earlier ones still there
    assert tables[1][:2] == tables[0]
    assert [r[0] for r in tables[1]] == [1, 1, 2, 2]
    criteria = [row["samples/criteria"].data for _, row in fake.rows]
    assert sorted(r[2:] for r in criteria[0]) == [[1, 1, 1], [2, 1, 0], [3, 0, 0]]
    assert len(criteria[1]) == 4
    assert fake.summary == {"summary/setting": "dynamic+step"}  # what is null is not sent as 0
    (artifact,) = fake.artifacts
    assert list(artifact.manifest.entries) == ["report.html"]


class ReportingRun(FakeRun):
    """With a summary and artifacts."""

    def __init__(self) -> None:
        super().__init__()
        self.summary: dict[str, Any] = {}
        self.artifacts: list[Any] = []

    def log_artifact(self, artifact: Any) -> None:
        self.artifacts.append(artifact)


LOG_OFFLINE = """
import sys
from pathlib import Path
from draco.run.loggers import wandb_logger
logger = wandb_logger(sys.argv[1], tables_every=1, table_rollouts=2)
logger.start([])
logger.log_metrics({"reward/mean": 0.0}, 1)
logger.log_metrics({"reward/mean": -1.0}, 2)
logger.close()
"""


def test_the_real_wandb_keeps_it_all_offline(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "report.html").write_text("<!doctype html>", encoding="utf-8")
    # A process of its own, which has ended before its file is read. No key anywhere, so it must choose offline itself.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    root = ROOT
    done = subprocess.run(
        [sys.executable, "-c", LOG_OFFLINE, str(run)], capture_output=True, text=True, check=False,
        env={**environment, "HOME": str(tmp_path), "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "wandb: offline, files under" in done.stdout
    (file,) = run.glob("wandb/offline-run-*/*.wandb")
    kept: dict[str, list[Any]] = {}
    for record in records(file):
        kind = record.WhichOneof("record_type")
        kept.setdefault(kind, []).append(getattr(record, kind))
    rows = [{"/".join(i.nested_key) or i.key: i.value_json for i in h.item} for h in kept["history"]]
    assert [(r["_step"], r["reward/mean"]) for r in rows] == [("1", "0"), ("2", "-1")]
    # The second table holds the rows of the first step too.
    tables = [json.loads(r["samples/trajectories/nrows"]) for r in rows]
    assert tables == [2, 4]
    artifacts = {a.type: a for a in kept["artifact"]}
    assert [c.path for c in artifacts["report"].manifest.contents] == ["report.html"]
    assert "run_table" in artifacts
    assert {u.key for u in kept["run"][0].config.update} >= {"steps", "rubric", "credit"}
    assert any(u.key == "summary/setting" for s in kept["summary"] for u in s.update)
