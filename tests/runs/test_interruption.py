"""Runs that are interrupted or break off: a whole step is saved, and a resume ends as if nothing had happened."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from support.runs import QUICK, SMALL, rows_of, same, shell, start, train

from callbacks.credit.step import StepLevelCredit
from callbacks.evaluation import Evaluations
from draco.core.errors import ConfigError, TrainingStopped
from draco.core.files import publish
from draco.core.signals import Interrupted
from draco.core.types import Credit, Judgement
from draco.judge.client import JudgeClient
from draco.run import archive as draco_archive
from draco.run.archive import step_folders
from draco.run.checkpoint import checkpoints
from draco.study.verbs.train import _job


class Poisoned(StepLevelCredit):
    """NaN advantages in the second batch."""

    def assign_one(self, judgement: Judgement) -> Credit:
        credit = super().assign_one(judgement)
        if judgement.group.step != 1:
            return credit
        steps = tuple(tuple(math.nan for _ in a) for a in credit.step_advantages)
        return Credit(judgement, credit.advantages, steps, credit.qualities, credit.reasons)


def test_a_guard_stops_the_run_with_its_state_and_says_how_to_go_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("eval.before=false", "eval.tasks=3", "update.max_bad_steps=1", "checkpoint.save_every=50")
    GlobalHydra.instance().clear()
    with initialize_config_module("conf", version_base="1.3"):
        config = compose("train", [*QUICK, *options, f"credit._target_={__name__}.Poisoned", f"run={run}"])
    with pytest.raises(TrainingStopped, match=f"non-finite.*saved up to step=\\d+, go on with: .* resume={run}"):
        _job(config, [], str(run), sweeping=False)
    (saved,) = checkpoints(run)
    state = json.loads((saved / "state.json").read_text())
    assert (state["step"], state["policy_version"], state["bad_steps"]) == (2, 1, 1)
    assert len(rows_of(run / "metrics.csv")) == len(step_folders(run)) == 2  # the step that went wrong can be read


INTERRUPTED = (*SMALL, "steps=2", "eval.every=1", "limits.max_response_tokens=160")


@pytest.fixture(scope="module")
def uninterrupted_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "whole"
    train(*INTERRUPTED, f"run={run}")
    return run


HOOKS = {
    "optimizer step": (torch.optim.AdamW, "step"),
    "judge": (JudgeClient, "call"),
    "archive": (draco_archive, "publish"),
    "evaluation": (Evaluations, "on_validation_end"),
}


@pytest.mark.parametrize("where", HOOKS)
def test_sigterm_anywhere_saves_a_whole_step(
    uninterrupted_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    run, whole = tmp_path / "run", uninterrupted_run
    owner, name = HOOKS[where]
    inner = getattr(owner, name)
    calls: list[int] = []

    def signalled(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == (2 if where == "judge" else 1):  # the judge's first call is the one before the run
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.02)
        return inner(*args, **kwargs)

    monkeypatch.setattr(owner, name, signalled)
    with pytest.raises(Interrupted) as caught:
        train(*INTERRUPTED, "checkpoint.save_every=50", f"run={run}")
    assert caught.value.status == 75
    steps = 0 if where == "judge" else 1
    assert [int(f.name[5:]) for f in checkpoints(run)] == [1] * steps
    assert len(step_folders(run)) == steps
    assert [r["step"] for r in rows_of(run / "metrics.csv")] == ["1"] * steps if steps else True
    train(f"resume={run}")
    assert same(run, whole)
    kept = [
        {k: v for k, v in r.items() if k.startswith(("reward", "update/loss", "eval"))}
        for r in rows_of(run / "metrics.csv")
    ]
    assert kept == [{k: r[k] for k in kept[0]} for r in rows_of(whole / "metrics.csv")]
    assert len(list(run.glob("evaluations/*.json"))) == 2


def test_a_step_whose_archive_cannot_be_written_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(temporary: Path, target: Path) -> None:
        if target.name == "step=000001":
            raise OSError(28, "No space left on device")
        publish(temporary, target)

    monkeypatch.setattr(draco_archive, "publish", full)
    run = tmp_path / "run"
    with pytest.raises(OSError, match="No space left"):
        train(*INTERRUPTED, "eval.every=0", "eval.before=false", f"run={run}")
    assert [f.name for f in checkpoints(run)] == ["step=000001"]
    assert "OSError in the middle of step 2, which is lost: resume continues before it" in caplog.text


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_saves_a_checkpoint_and_says_how_to_go_on(number: int, status: int, tmp_path: Path) -> None:
    run = tmp_path / "long"
    process = start(*INTERRUPTED, "steps=100000", "eval.every=0", f"run={run}", "checkpoint.save_every=1000")
    deadline = time.monotonic() + 600
    while len(step_folders(run)) < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with pytest.raises(ConfigError, match=f"in use by process {process.pid} on"):
        train(f"resume={run}")
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert process.returncode == status, out + err
    assert f"resume={run}" in err
    assert "Traceback" not in err
    (saved,) = checkpoints(run)
    step = json.loads((saved / "state.json").read_text())["step"]
    assert step == len(step_folders(run)) == len(rows_of(run / "metrics.csv"))
    assert train(f"resume={run}", f"steps={step + 1}")["steps"] == step + 1


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_while_libraries_load_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == os.environ['INTERRUPT_AT']:\n"
        "            os.environ['INTERRUPT_AT'] = ''\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting())\n"
    )
    for module in ("hydra", "draco.run.sweep", "lightning"):
        env = {"PYTHONPATH": str(tmp_path), "INTERRUPT_AT": module}
        printed = shell(f"run={tmp_path / 'run'}", code=130, env=env)
        assert printed == "interrupted before the run began\n"
