"""One job a folder, nothing lost on resume, and the disk is big enough."""

from __future__ import annotations

import json
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from draco.core.errors import ConfigError
from draco.core.files import publish, remove, write_text
from draco.core.types import Task
from draco.policy.policy import Policy
from draco.run import disk as diskplan
from draco.run.disk import check_disk
from draco.run.folder import discard_empty, locked, prepare, resume_config, set_aside, write_config
from draco.run.loader import TaskLoader
from draco.run.loggers import read_metrics


def test_a_folder_in_use_is_refused_with_its_owner(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with locked(run), pytest.raises(ConfigError, match=f"in use by process {os.getpid()} on") as caught, locked(run):
        pass
    assert "\n" not in str(caught.value)
    assert list(run.iterdir()) == []
    with locked(run):
        pass


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="draco")
    (tmp_path / "lock").write_text(json.dumps({"pid": 12, "host": "there", "since": "yesterday"}))
    with locked(tmp_path):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    assert "took over the lock of process 12 on there since yesterday" in caplog.text


def test_a_job_that_just_ended_may_take_lock_and_folder_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    opened, takes = os.open, ["the folder", "the lock"]

    def open_(path: Path, *arguments: int) -> int:
        if takes[:1] == ["the folder"]:
            takes.pop(0)
            run.rmdir()  # between our mkdir and our open
        descriptor = opened(path, *arguments)
        if takes and takes.pop(0):
            path.unlink()  # between our open and our look at it
        return descriptor

    monkeypatch.setattr(os, "open", open_)
    with locked(run):
        assert [p.name for p in run.iterdir()] == ["lock"]


def test_what_a_very_early_kill_leaves_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    (tmp_path / "config.yaml.tmp").touch()
    prepare(tmp_path, overwrite=False)


def test_overwrite_keeps_the_lock(tmp_path: Path) -> None:
    (tmp_path / "archive").mkdir()
    (tmp_path / "config.yaml").touch()
    with locked(tmp_path):
        prepare(tmp_path, overwrite=True)
        assert [p.name for p in tmp_path.iterdir()] == ["lock"]


def a_run(run: Path) -> Path:
    for step in range(4):
        write_text(folder(run, "archive", step) / "credits.parquet", str(step))
    for name in ("archive/step=000004.tmp", "checkpoints/step=000004.tmp"):
        (run / name).mkdir(parents=True)
    for name in ("evaluation_after.json", "summary.json", "train_success.csv", "evaluation_before.json"):
        write_text(run / name, name)
    for step in (2, 4):
        write_text(folder(run, "evaluations", step).with_suffix(".json"), "{}")
    write_text(run / "metrics.csv", "step,a,late,summary/x\n1,1,,\n2,2,,7\n3,3,5,\n4,4,6,8\n5,5")
    return run


def folder(run: Path, kind: str, step: int) -> Path:
    path = run / kind / f"step={step:06d}"
    (path if kind == "archive" else path.parent).mkdir(parents=True, exist_ok=True)
    return path


def test_later_steps_are_moved_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="draco")
    run = a_run(tmp_path)
    set_aside(run, 2, goes_on=True)
    left = sorted(p.relative_to(run).as_posix() for p in run.rglob("*") if p.is_file() and "aside" not in p.parts)
    assert left == [
        "archive/step=000000/credits.parquet", "archive/step=000001/credits.parquet", "evaluation_before.json",
        "evaluations/step=000002.json", "metrics.csv",
    ]  # fmt: skip
    assert not list(run.rglob("*.tmp"))
    (aside,) = run.glob("aside/*")
    moved = sorted(p.relative_to(aside).as_posix() for p in aside.rglob("*") if p.is_file())
    assert moved == [
        "archive/step=000002/credits.parquet", "archive/step=000003/credits.parquet", "evaluation_after.json",
        "evaluations/step=000004.json", "metrics.csv", "summary.json", "train_success.csv",
    ]  # fmt: skip
    for name in ("archive/step=000003", "metrics of steps 3 to 4", "summary.json"):
        assert name in caplog.text
    columns, rows = read_metrics(run / "metrics.csv")
    assert (columns, rows) == (["step", "a"], [{"step": "1", "a": "1"}, {"step": "2", "a": "2"}])
    assert "5,5" in (aside / "metrics.csv").read_text()
    set_aside(run, 2, goes_on=True)
    assert len(list(run.glob("aside/*"))) == 1  # nothing more to move
    set_aside(run, 1, goes_on=True)
    assert len(list(run.glob("aside/*"))) == 2  # the same second is another folder


def test_an_evaluation_of_the_last_step_need_not_be_made_again(tmp_path: Path) -> None:
    set_aside(a_run(tmp_path), 4, goes_on=False)
    assert (tmp_path / "evaluation_after.json").is_file()
    assert not (tmp_path / "summary.json").exists()


def test_raised_steps_and_checkpoint_options_are_remembered(tmp_path: Path) -> None:
    stored = OmegaConf.create(
        {
            "run": "x",
            "resume": None,
            "overwrite": False,
            "steps": 3,
            "checkpoint": {"keep_last": 3},
            "callbacks": {"checkpoint": {"keep_last": "${checkpoint.keep_last}"}},
        }
    )
    write_config(stored, tmp_path)
    given = OmegaConf.create({"steps": 9, "checkpoint": {"keep_last": 1, "check_disk": False}})
    names = ["steps=9", "checkpoint.keep_last=1", "checkpoint.check_disk=false"]
    config = resume_config(tmp_path, given, [f"resume={tmp_path}", *names])
    assert (config.steps, config.callbacks.checkpoint, config.checkpoint.check_disk) == (9, {"keep_last": 1}, False)
    write_config(config, tmp_path)
    again = resume_config(tmp_path, OmegaConf.create({}), [f"resume={tmp_path}"])
    assert (again.steps, again.callbacks.checkpoint.keep_last, again.resume) == (9, 1, str(tmp_path))


def test_a_secret_that_was_not_kept_must_be_given_again(tmp_path: Path) -> None:
    stored = {"run": "x", "resume": None, "judge": {"api_key": "s3cret"}, "rubric": {"judge": {"api_key": "s3cret"}}}
    write_config(OmegaConf.create(stored), tmp_path)
    assert "s3cret" not in (tmp_path / "config.yaml").read_text()
    with pytest.raises(ConfigError, match="api_key is not kept in a run folder; give it again"):
        resume_config(tmp_path, OmegaConf.create({}), [f"resume={tmp_path}"])
    given = OmegaConf.create({"judge": {"api_key": "s3cret"}})
    config = resume_config(tmp_path, given, [f"resume={tmp_path}", "+judge.api_key=s3cret"])
    assert (config.judge.api_key, config.rubric.judge.api_key) == ("s3cret", "s3cret")


def test_a_moved_folder_is_named_in_every_part(tmp_path: Path) -> None:
    old = {"run": "runs/a", "resume": None, "parts": [{"run": "runs/a"}, "runs/a/adapters", "runs/ab"]}
    write_config(OmegaConf.create(old), tmp_path)
    config = resume_config(tmp_path, OmegaConf.create({}), [f"resume={tmp_path}"])
    assert config.parts == [{"run": str(tmp_path)}, f"{tmp_path}/adapters", "runs/ab"]


def test_a_password_in_an_address_is_redacted(tmp_path: Path) -> None:
    write_config(OmegaConf.create({"a": ["http://me:s3cret@host/v1", "http://host/x@y"]}), tmp_path)
    text = (tmp_path / "config.yaml").read_text()
    assert "s3cret" not in text
    assert "http://host/x@y" in text


def test_only_what_a_refused_run_made_is_removed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in ("config.yaml", "transcript_secret"):
        (run / name).write_text("x")
    (run / "metrics.csv").write_text("x")
    discard_empty(run)
    assert (run / "config.yaml").is_file()
    (run / "metrics.csv").unlink()
    discard_empty(run)
    assert not any(run.iterdir())


# --- durable files ---


def test_publish_replaces_whole_folders(tmp_path: Path) -> None:
    target = tmp_path / "x"
    for text in ("old", "new"):
        temporary = tmp_path / "x.tmp"
        temporary.mkdir()
        (temporary / text).write_text(text)
        publish(temporary, target)
    assert [p.name for p in target.iterdir()] == ["new"]
    remove(target)
    assert list(tmp_path.iterdir()) == []


def test_what_is_published_was_synced_before_it_was_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        done.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).relative_to(tmp_path).as_posix()}")
        real(descriptor)

    replace = Path.replace
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", lambda self, to: (done.append(f"rename {self.name}"), replace(self, to))[1])
    (tmp_path / "x.tmp").mkdir()
    (tmp_path / "x.tmp" / "file").touch()
    publish(tmp_path / "x.tmp", tmp_path / "x")
    assert done == ["sync x.tmp/file", "sync x.tmp", "rename x.tmp", "sync ."]


# --- the disk ---

Usage = namedtuple("Usage", "free")
OPTIONS = {"save_every": 1, "keep_last": 3, "keep_every": 0}


@pytest.fixture
def loader() -> TaskLoader:
    tasks = [Task(str(i), "x", "train", "s") for i in range(90)]
    return TaskLoader(tasks, steps=100, tasks_per_step=16, group_size=6, seed=0)


def test_the_plan_is_one_line(
    tmp_path: Path,
    policy: Policy,
    loader: TaskLoader,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="draco")
    monkeypatch.setattr(diskplan, "size_of", lambda policy: 1_400_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(500e9))
    check_disk(tmp_path, policy, loader, OPTIONS, 28_672, refuse=True)
    (record,) = caplog.records
    assert record.getMessage() == (
        "disk: a checkpoint is 1.4 GB, 22 are kept = 30.8 GB; archive at most 124 MB a step, 100 steps to go = 12.4 "
        f"GB; 500 GB free in {tmp_path}"
    )


def test_a_disk_that_cannot_hold_the_checkpoints_is_refused(
    tmp_path: Path, policy: Policy, loader: TaskLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diskplan, "size_of", lambda policy: 1_400_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(32e9))  # 22 are kept, and one more for a moment
    with pytest.raises(ConfigError, match=r"too small; free some.*keep_every") as caught:
        check_disk(tmp_path, policy, loader, OPTIONS, 100, refuse=True)
    assert "\n" not in str(caught.value)
    check_disk(tmp_path, policy, loader, OPTIONS, 100, refuse=False)
    check_disk(tmp_path, policy, loader, {**OPTIONS, "save_every": 100}, 100, refuse=True)


def test_the_archive_counts_as_it_was_measured(
    tmp_path: Path,
    policy: Policy,
    loader: TaskLoader,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2e9))
    check_disk(tmp_path, policy, loader, OPTIONS, 10**6, refuse=True)  # a bound refuses nothing
    assert caplog.messages == ["the disk may be too small for this run; if it fills up, free some and resume"]
    archived = folder(tmp_path, "archive", 0)
    with open(archived / "trajectories.parquet", "wb") as file:
        file.truncate(30_000_000)
    loader.position = 1
    with pytest.raises(ConfigError, match=r"archive 30 MB a step, 99 steps to go = 2\.97 GB"):
        check_disk(tmp_path, policy, loader, OPTIONS, 10**6, refuse=True)


def test_a_resume_may_change_what_errors_recommend(tmp_path: Path) -> None:
    """The command line of a resume is composed with the default judge, whose file must name these options too."""
    from hydra import compose, initialize_config_module

    options = {
        "prices": "{input: 1.0, output: 2.0}", "deadline_s": "5", "group_deadline_s": "6", "fallbacks": "[a/b]",
        "fallback_s": "7",
    }  # fmt: skip
    overrides = [f"judge.{name}={value}" for name, value in options.items()]
    with initialize_config_module("conf", version_base="1.3"):
        given = compose("train", overrides)
    write_config(OmegaConf.create({"run": str(tmp_path), "judge": {"model": "a/c"}}), tmp_path)
    config = resume_config(tmp_path, given, [f"resume={tmp_path}", *overrides])
    assert {name: config.judge[name] for name in options} == {
        "prices": {"input": 1.0, "output": 2.0}, "deadline_s": 5, "group_deadline_s": 6, "fallbacks": ["a/b"],
        "fallback_s": 7,
    }  # fmt: skip


def test_a_resume_may_raise_the_share_of_lost_judgements_of_a_judge_and_of_a_self_judge(tmp_path: Path) -> None:
    """The first one's guard is the judge's, the second one's is the stage's own."""
    for at, own in enumerate((None, 0.25)):
        stage = {"judge": {"max_failed_share": 0.25}, "max_failed_share": own}
        stored = {"run": "x", "resume": None, "judge": {"max_failed_share": 0.25}, "rubric": stage}
        folder = tmp_path / str(at)
        folder.mkdir()
        write_config(OmegaConf.create(stored), folder)
        given = OmegaConf.create({"judge": {"max_failed_share": 0.6}})
        config = resume_config(folder, given, [f"resume={folder}", "judge.max_failed_share=0.6"])
        assert config.rubric.judge.max_failed_share == 0.6
        assert config.rubric.max_failed_share == (own and 0.6)
