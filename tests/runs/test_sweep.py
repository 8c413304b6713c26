"""Sweeps, and what a job does for Hydra and for the other ranks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig
from support import ROOT
from support.runs import shell

from draco.run.train import _train
from draco.study.verbs.train import _job


def test_hydras_callback_imports_nothing_heavy() -> None:
    heavy = "import sys, draco.run.sweep; print([m for m in ('torch', 'lightning') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout == "[]\n"


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


@pytest.mark.parametrize(("options", "group"), [((), "big"), (("logger.wandb.group=mine",), "mine")])
def test_a_sweep_is_one_wandb_group(
    options: tuple[str, ...], group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("draco.run.train.train", lambda config, *_, **__: seen.append(config.logger.wandb.group))
    with initialize_config_module("conf", version_base="1.3"):
        config = compose("train", ["logger=wandb", *options])
    _job(config, [], str(tmp_path / "big" / "0-dynamic-step-s0"), sweeping=True)
    assert seen == [group]


@pytest.mark.parametrize("resumed", [False, True])
def test_a_rank_removes_what_its_hydra_made_when_all_ranks_are_past_theirs(
    resumed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hydra's mkdir fails in the moment in which another rank takes the same folder away."""
    run, made = tmp_path / "first", tmp_path / "second"  # rank 0 started in another second
    run.mkdir()
    (run / "config.yaml").touch()
    made.mkdir()
    there: list[bool] = []

    @contextmanager
    def joined(*_: object, **__: object) -> Iterator[None]:
        there.append(made.is_dir())
        yield

    for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("draco.run.train.joined", joined)
    monkeypatch.setattr("draco.run.train.rank", lambda: 1)
    monkeypatch.setattr("draco.run.train.broadcast", lambda _: str(run))
    monkeypatch.setattr("draco.run.train._train", lambda *_: there.append(made.is_dir()) or {})
    GlobalHydra.instance().clear()
    with initialize_config_module("conf", version_base="1.3"):
        config = compose("train", ["trainer=ddp", "trainer.accelerator=cpu", f"run={made}"])
    if resumed:
        config.resume = str(run)
        monkeypatch.setattr("draco.run.folder.resume_config", lambda folder, given, _: given)
    _job(config, [], str(made), sweeping=False)
    assert there == [True, False]
    assert run.is_dir()


@pytest.mark.parametrize("rank", [0, 1])
def test_the_table_of_a_finished_run_is_shown_once(rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = {"setting": "dynamic+step"}
    monkeypatch.setattr("draco.run.train.rank", lambda: rank)
    monkeypatch.setattr("draco.run.train.main_only", lambda _: (None, {"step": 3}, summary))
    assert _train(DictConfig({}), tmp_path, 0.0, None) == ({} if rank else summary)
