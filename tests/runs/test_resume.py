"""A run that is killed at any moment and resumed is the run that was not: adapter, optimizer, archive and metrics.

`kill_driver.py` runs the jobs and kills them with SIGKILL; here the points are chosen and the folders compared.
"""

from __future__ import annotations

import csv
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.processes import drive

from draco.run.archive import TABLES, read_table, step_folders
from draco.run.checkpoint import checkpoints

OPTIONS = [
    "steps=3", "tasks_per_step=2", "group_size=2", "policy.rank=4", "policy.dropout=0.1", "eval.tasks=2",
    "eval.every=2", "limits.max_response_tokens=160", "checkpoint.keep_last=1", "rubric.propose_cache=run",
]  # fmt: skip

UPDATE = "torch.optim.adamw:AdamW.step"
JUDGE = "draco.judge.client:JudgeClient.call"
TOKEN = "draco.rollout.rollout:Rollout.push"
ROW = "draco.run.loggers:MetricsCsv.log_metrics"
#: chains of points; each is reached by the process that goes on after the one before
CHAINS: dict[str, list[dict[str, Any]]] = {
    "early": [
        {"file": r"config\.yaml\.tmp"},
        {"call": TOKEN, "nth": 30},  # evaluation before
        {"file": r"evaluation_before\.json\.tmp"},
        {"call": JUDGE, "nth": 5},
        {"call": UPDATE},
        {"call": UPDATE, "after": True},
        {"file": r"archive/step=000000\.tmp"},
        {"file": r"step=000001\.tmp/adapter\.tmp"},  # half a checkpoint
    ],
    "late": [
        {"file": r"checkpoints/step=000001\.tmp"},
        {"call": ROW, "nth": 2, "torn": True},
        {"call": TOKEN, "nth": 50},  # rollouts of step 2
        {"file": r"evaluations/step=000002\.json\.tmp"},
        {"file": r"step=000001\.gone\.tmp", "event": "shutil.rmtree", "nth": 2},  # pruning
        {"file": r"checkpoints/step=000003\.tmp"},
        {"file": r"evaluation_after\.json\.tmp"},
        {"file": r"summary\.json\.tmp"},
    ],
    "anywhere": [{"delay": random.Random(7).uniform(0.5, 4.0)}, {"delay": random.Random(8).uniform(0.5, 4.0)}],
}


def run_and_kill(jobs: list[dict[str, Any]], within_s: float) -> None:
    done = drive("kill_driver", jobs, within_s=within_s)
    assert done.returncode == 0, done.stderr


def job(run: Path, kills: list[dict[str, Any]]) -> dict[str, Any]:
    return {"run": str(run), "overrides": OPTIONS, "kills": kills}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference, never killed, and a run a chain."""
    folder = tmp_path_factory.mktemp("killed")
    jobs = [job(folder / "whole", []), *(job(folder / name, kills) for name, kills in CHAINS.items())]
    run_and_kill(jobs, within_s=1800)
    return folder


_TIMED = re.compile(r"^(time/|health/)|per_s$|latency|^summary/wall_s$|memory")


def metrics(run: Path) -> list[dict[str, str]]:
    """Rows without what a clock or the machine decides."""
    with open(run / "metrics.csv", encoding="utf-8", newline="") as file:
        return [{k: v for k, v in row.items() if not _TIMED.search(k)} for row in csv.DictReader(file)]


def archive(run: Path) -> dict[str, list[dict[str, Any]]]:
    tables = {name: read_table(run, name).to_pylist() for name in [*TABLES, "judge_calls"]}
    for row in tables["trajectories"]:
        row.pop("timings")
    for row in tables["judge_calls"]:
        row.pop("latency_s")
    return tables


def same(a: Path, b: Path) -> None:
    """Assert that two runs left the same behind."""
    assert [f.name for f in checkpoints(a)] == [f.name for f in checkpoints(b)]
    for name in ("adapter/adapter_model", "optimizer", "rng"):
        left, right = (load_file(checkpoints(run)[-1] / f"{name}.safetensors") for run in (a, b))
        assert left.keys() == right.keys()
        assert [k for k in left if not torch.equal(left[k], right[k])] == [], name
    states = [json.loads((checkpoints(run)[-1] / "state.json").read_text()) for run in (a, b)]
    for state in states:
        state.pop("wall_s")
    assert states[0] == states[1]
    assert metrics(a) == metrics(b)
    left, right = archive(a), archive(b)
    for name in left:
        assert left[name] == right[name], name
    for name in (
        "evaluation_before.json",
        "evaluation_after.json",
        "evaluations/step=000002.json",
        "train_success.csv",
    ):
        assert (a / name).read_text() == (b / name).read_text(), name
    summaries = [json.loads((run / "summary.json").read_text()) for run in (a, b)]
    for summary in summaries:
        summary.pop("wall_s"), summary.pop("run")
    assert summaries[0] == summaries[1]


def test_the_reference_trains_at_all(runs: Path) -> None:
    moments = load_file(checkpoints(runs / "whole")[-1] / "optimizer.safetensors")
    assert any(v.abs().sum() > 0 for k, v in moments.items() if k.endswith("exp_avg"))
    assert [row["step"] for row in metrics(runs / "whole")] == ["1", "2", "3"]
    proposals = json.loads((checkpoints(runs / "whole")[-1] / "state.json").read_text())["stages"]["DynamicRubric"]
    assert len(proposals["proposals"]) == 6
    assert not (runs / "whole" / "aside").exists()


@pytest.mark.parametrize("chain", CHAINS)
def test_kill_9_and_resume_end_as_if_nothing_had_happened(runs: Path, chain: str) -> None:
    same(runs / "whole", runs / chain)
    assert not list((runs / chain).rglob("*.tmp"))
    assert not (runs / chain / "lock").exists()


def test_what_lay_beyond_the_checkpoint_is_kept_aside_and_named(runs: Path) -> None:
    run = runs / "late"
    said = (runs / "late.log").read_text()
    assert "set aside in" in said
    assert "archive/step=000001" in said
    assert "evaluation" in said
    asides = sorted(p.relative_to(run / "aside").as_posix().split("/", 1)[1] for p in run.glob("aside/*/**/*"))
    assert "metrics.csv" in asides
    assert "archive/step=000001/trajectories.parquet" in asides
    assert "train_success.csv" in asides
    assert len(step_folders(run)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_more_kills(tmp_path: Path, seed: int) -> None:
    """Ten kills at random file operations, tokens and moments each; make the time for it."""
    draw = random.Random(seed)
    points: list[dict[str, Any]] = []
    for _ in range(10):
        kind = draw.choice(["file", "token", "delay"])
        if kind == "file":
            points.append({"file": r"\.tmp", "nth": draw.randint(1, 6), "maybe": True})
        elif kind == "token":
            points.append({"call": TOKEN, "nth": draw.randint(1, 150), "maybe": True})
        else:
            points.append({"delay": draw.uniform(0.3, 6.0)})
    run_and_kill([job(tmp_path / "whole", []), job(tmp_path / "run", points)], within_s=3600)
    same(tmp_path / "whole", tmp_path / "run")
