"""Whole runs: what a user types, what is left behind, what happens when things go wrong.

Most runs are made in this process (`train`); what belongs to the process itself, in one of its own (`shell`).
"""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from safetensors.torch import load_file

from draco.archive import read_table, step_folders
from draco.checkpoint import checkpoints
from draco.env.base import Evaluator, Outcome
from draco.errors import ConfigError
from draco.run import train as run_job
from draco.runfolder import resume_config
from draco.types import Task

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples" / "conf"
QUICK = ("steps=2", "tasks_per_step=3", "group_size=3", "eval.tasks=6", "policy.rank=4")


def start(*arguments: str, cwd: Path = ROOT, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *arguments],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def shell(*arguments: str, code: int = 0, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    """Run `python train.py …` to its end and return everything printed."""
    process = start(*arguments, cwd=cwd, env=env)
    out, err = process.communicate(timeout=240)
    assert process.returncode == code, out + err
    return out + err


def train(*overrides: str, conf: Path | None = None) -> dict[str, Any]:
    """The same job in this process; returns the summary."""
    GlobalHydra.instance().clear()
    searched = [f"hydra.searchpath=[file://{conf}]"] if conf else []
    with initialize_config_module("conf", version_base="1.3"):
        config = compose("train", [*overrides, *searched])
    if config.resume:
        config = resume_config(Path(config.resume), config, list(overrides))
    return run_job(config)


def adapter(run: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoints(run)[-1] / "adapter" / "adapter_model.safetensors")


def same(a: Path, b: Path) -> bool:
    left, right = adapter(a), adapter(b)
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def rows_of(file: Path) -> list[dict[str, str]]:
    with open(file, encoding="utf-8", newline="") as opened:
        return list(csv.DictReader(opened))


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
        "summary.json", "train_success.csv", "transcript_secret",
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
    train(*QUICK, f"run={run}", "env.evaluator._target_=test_run.Raises")
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


def test_resume_goes_on_to_the_same_adapter(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = (*QUICK, "eval.before=false", "eval.tasks=3")
    train(*options, "steps=3", f"run={whole}")
    train(*options, "steps=1", f"run={parts}")
    train(f"resume={parts}", "steps=3")
    assert same(whole, parts)
    rows = [r["step"] for r in rows_of(parts / "metrics.csv")]
    assert rows == ["1", "2", "3"]
    assert len(step_folders(parts)) == 3


def test_ctrl_c_saves_a_checkpoint_and_says_how_to_go_on(tmp_path: Path) -> None:
    run = tmp_path / "long"
    process = start(*QUICK, "steps=100000", f"run={run}", "eval.tasks=3")
    deadline = time.monotonic() + 120
    while len(step_folders(run)) < 3:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    assert f"resume={run}" in err
    assert "Traceback" not in err
    step = json.loads((checkpoints(run)[-1] / "state.json").read_text())["step"]
    assert step >= 3
    assert train(f"resume={run}", f"steps={step + 1}")["steps"] == step + 1


@pytest.mark.parametrize(
    ("argument", "code", "message"), [("rubric=nonsense", 1, "dynamic"), ("group_size=1", 2, "error: group_size is 1")]
)
def test_bad_input_is_one_message_and_a_status(argument: str, code: int, message: str, tmp_path: Path) -> None:
    printed = shell(argument, f"run={tmp_path / 'run'}", code=code)
    assert message in printed
    assert "Traceback" not in printed


BAD = [
    ("group_size=1", "group_size is 1"),
    ("eval.split=nowhere", "test_challenge"),
    ("tasks_per_step=91", "set tasks_per_step to 90 or less"),
    ("limits.max_prompt_tokens=1", "raise the limit"),
    ("policy.adapter=/nowhere", "not a PEFT adapter"),
    ("policy.path=/nowhere", r"policy\.path="),
    ("resume=/nowhere", "no run there"),
    ("loss.zero_signal=maybe", "zero_signal"),
    ("env.step=word", "code_block"),
    ("rubric.stage.criteria=/nowhere", "no static rubric"),
]


@pytest.mark.parametrize(("argument", "message"), BAD, ids=[a for a, _ in BAD])
def test_bad_input_is_named_before_any_rollout(argument: str, message: str, tmp_path: Path) -> None:
    rubric = ["rubric=static"] if "criteria" in argument else []
    with pytest.raises(ConfigError, match=message):
        train(*rubric, argument, f"run={tmp_path / 'run'}")
    assert not (tmp_path / "run" / "archive").exists()
    assert not (tmp_path / "run" / "evaluation_before.json").exists()


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


def test_a_sweep_survives_a_failed_job_and_ends_with_a_table(tmp_path: Path) -> None:
    printed = shell(
        "-m", "rubric=random,outcome", "credit=uniform", "steps=1", "tasks_per_step=2,999", "group_size=2",
        "eval.tasks=3", f"hydra.sweep.dir={tmp_path / 'sweep'}", code=1,
    )  # fmt: skip
    table = printed[printed.index("\nsweep") :]
    assert "random+uniform" in table
    assert "outcome+uniform" in table
    assert table.count("failed:") == 2
    summaries = list((tmp_path / "sweep").glob("*/summary.json"))
    assert len(summaries) == 2
    assert not (ROOT / "multirun").exists()
    assert not (ROOT / "outputs").exists()


def test_wandb_offline_stays_in_the_run_folder(tmp_path: Path) -> None:
    run = tmp_path / "wandb_run"
    env = {"WANDB_MODE": "offline", "WANDB_API_KEY": ""}
    printed = shell(*QUICK, "logger=wandb", f"run={run}", "rubric=random", "credit=uniform", env=env, cwd=tmp_path)
    assert "wandb: offline" in printed
    assert list(run.rglob("*.wandb"))
    assert not (tmp_path / "wandb").exists()
