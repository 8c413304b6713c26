"""Whole runs: what a user types, what is left behind, what happens when things go wrong.

Most runs are made in this process (`train`); what belongs to the process itself, in one of its own (`shell`).
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig
from support import ROOT
from support.runs import QUICK, SMALL, rows_of, same, shell, start, train

from callbacks.credit.step import StepLevelCredit
from callbacks.evaluation import Evaluations
from draco.core.errors import ConfigError, TrainingStopped
from draco.core.files import publish
from draco.core.signals import Interrupted
from draco.core.types import Credit, Judgement, Task
from draco.env.base import Evaluator, Outcome
from draco.env.desk import DeskEnvironment
from draco.judge.client import JudgeClient
from draco.run import archive as draco_archive
from draco.run.archive import read_table, step_folders
from draco.run.checkpoint import checkpoints
from draco.run.train import _train
from draco.study.verbs.train import _job

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
    assert "OSError in the middle of step 2, which is lost: resume goes on before it" in caplog.text


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


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_saves_a_checkpoint_and_says_how_to_go_on(number: int, status: int, tmp_path: Path) -> None:
    run = tmp_path / "long"
    process = start(*QUICK, "steps=100000", f"run={run}", "eval.tasks=3", "checkpoint.save_every=1000")
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


@pytest.mark.parametrize(
    ("argument", "code", "message"),
    [
        ("rubric=nonsense", 2, "dynamic"),
        ("loss.klcoef=1", 2, "did you mean loss.kl_coef?"),
        ("+stepz=3", 2, "nothing reads; did you mean steps?"),
        ("steps=", 2, "error: steps is ''"),
        (f"run={__file__}", 2, "test_run.py cannot be made: File exists"),
    ],
)
def test_bad_input_is_one_message_and_a_status(argument: str, code: int, message: str, tmp_path: Path) -> None:
    where = [] if argument.startswith("run=") else [f"run={tmp_path / 'run'}"]
    printed = shell(argument, *where, code=code)
    assert message in printed
    assert "Traceback" not in printed
    assert len(printed.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


BAD = [
    ("group_size=1", "group_size is 1"),
    ("eval.split=nowhere", "test_challenge"),
    ("tasks_per_step=91", "set tasks_per_step to 90 or less"),
    ("limits.max_prompt_tokens=1", "raise the limit"),
    ("limits.max_response_tokens=2048", r"policy\.tiny was made for 2048; set limits\.max_response_tokens=20\d\d"),
    ("policy.adapter=/nowhere", "not a PEFT adapter"),
    ("policy.path=/nowhere", r"policy\.path="),
    ("policy.chat_template=/nowhere", r"policy\.chat_template='/nowhere' cannot be read"),
    ("resume=/nowhere", "no run there"),
    ("loss.zero_signal=maybe", "zero_signal"),
    ("env.step=word", "code_block"),
    ("rubric.criteria=/nowhere", "no static rubric"),
    ("rubric=outcome env.evaluator=null", "rubric=outcome needs the environment's evaluator"),
]


@pytest.mark.parametrize(("argument", "message"), BAD, ids=[a for a, _ in BAD])
def test_bad_input_is_named_before_any_rollout(argument: str, message: str, tmp_path: Path) -> None:
    rubric = ["rubric=static"] if "criteria" in argument else []
    with pytest.raises(ConfigError, match=message):
        train(*rubric, *argument.split(), f"run={tmp_path / 'run'}")
    assert not (tmp_path / "run").exists()  # so that the corrected command may use the name


def test_the_scripted_judge_refuses_a_static_rubric_that_it_has_no_rule_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rubric = tmp_path / "mine.yaml"
    own = "{title: Speaks Latin, description: d, evaluator_instruction: e}"
    rubric.write_text(f"criteria: [{own}]", encoding="utf-8")
    chosen = ("rubric=static", f"rubric.criteria={rubric}", f"run={tmp_path / 'run'}")
    with pytest.raises(ConfigError, match="has a rule for none of the static rubric's criteria"):
        train(*chosen)
    known = "{title: Fetches complete data, description: d, evaluator_instruction: e}"
    rubric.write_text(f"criteria: [{own}, {known}]", encoding="utf-8")
    with pytest.raises(ConfigError, match="set tasks_per_step to 90"):
        train(*chosen, "tasks_per_step=91")
    assert "has no rule for Speaks Latin" in caplog.text


def test_a_moved_run_goes_on_where_it_is(finished: tuple[Path, str], tmp_path: Path) -> None:
    run = tmp_path / "moved"
    shutil.copytree(finished[0], run)
    before = sorted(p.relative_to(finished[0]) for p in finished[0].rglob("*"))
    assert train(f"resume={run}", "steps=3")["steps"] == 3
    assert len(step_folders(run)) == len(rows_of(run / "metrics.csv")) == 3
    assert sorted(p.relative_to(finished[0]) for p in finished[0].rglob("*")) == before


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


def test_hydras_callback_imports_nothing_heavy() -> None:
    heavy = "import sys, draco.run.sweep; print([m for m in ('torch', 'lightning') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout == "[]\n"


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


@pytest.mark.parametrize(("options", "group"), [((), "big"), (("logger.wandb.group=mine",), "mine")])
def test_a_sweep_is_one_wandb_group(
    options: tuple[str, ...], group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("draco.run.train.train", lambda config, *_: seen.append(config.logger.wandb.group))
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


def test_what_a_refused_run_has_started_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment's server, for one: the next job of a sweep runs in the same process."""
    closed: list[Any] = []
    monkeypatch.setattr(DeskEnvironment, "close", lambda environment: closed.append(environment))
    with pytest.raises(ConfigError, match="was made for 2048"):
        train(*QUICK, "limits.max_response_tokens=2048", f"run={tmp_path / 'run'}")
    assert len(closed) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_the_table_of_a_finished_run_is_shown_once(rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = {"setting": "dynamic+step"}
    monkeypatch.setattr("draco.run.train.rank", lambda: rank)
    monkeypatch.setattr("draco.run.train.main_only", lambda _: (None, {"step": 3}, summary))
    assert _train(DictConfig({}), tmp_path, 0.0) == ({} if rank else summary)


def test_wandb_offline_stays_in_the_run_folder(tmp_path: Path) -> None:
    run = tmp_path / "wandb_run"
    env = {"WANDB_MODE": "offline", "WANDB_API_KEY": ""}
    printed = shell(*QUICK, "logger=wandb", f"run={run}", "rubric=random", "credit=uniform", env=env, cwd=tmp_path)
    assert "wandb: offline" in printed
    assert list(run.rglob("*.wandb"))
    assert not (tmp_path / "wandb").exists()


def test_a_group_that_is_null_on_the_command_line_is_one_line() -> None:
    said = shell("experiment=appworld_qwen36_27b", "placement=null", code=2)
    assert "Traceback" not in said
    assert "leave a group out with ~GROUP, here perhaps ~placement" in said
