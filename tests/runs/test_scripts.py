"""`draco evaluate` on a real run, and the ablation."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import ablation
import pytest
from support import ROOT
from support.runs import QUICK, train

from draco.config.arguments import prices_of
from draco.core.errors import ConfigError
from draco.core.llm.money import Prices
from draco.study.verbs import evaluate


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "r"
    train(*QUICK, "rubric=random", "credit=uniform", "eval.tasks=3", "steps=1", f"run={folder}")
    return folder


def test_evaluate_gives_every_metric(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluate.main([f"run={run}", "split=dev,test_challenge", "n=2", "tasks=3"])
    printed = capsys.readouterr().out
    assert "pass^2" in printed
    assert "pass@2" in printed
    result = json.loads((run / "evaluations" / "dev-step=000001-n2-first3.json").read_text())
    assert (result["tasks"], result["n"], len(result["records"])) == (3, 2, 6)
    assert {"tgc_pass_hat", "tgc_pass_at", "sgc_pass_hat", "turns", "terminations"} <= result.keys()
    assert (run / "evaluations" / "test_challenge-step=000001-n2-first3.json").is_file()


def test_evaluating_the_base_is_the_evaluation_before_training(run: Path) -> None:
    evaluate.main([f"run={run}", "checkpoint=base", "tasks=3"])
    result = json.loads((run / "evaluations" / "test_normal-base-n1-first3.json").read_text())
    assert result["records"] == json.loads((run / "evaluation_before.json").read_text())["records"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "run=FOLDER is missing"),
        (["run=/nowhere"], "no run there"),
        (["run=x", "sampels=3"], r"^unknown option sampels; options of draco evaluate: api_base"),
        (["run=x", "tesks=3"], r"^unknown option tesks; did you mean tasks\?"),
    ],
)
def test_evaluate_names_bad_input(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluate.main(arguments)


def test_evaluate_takes_whole_numbers(run: Path) -> None:
    for argument in ("n=abc", "n=1.5", "tasks=-1", "n=0"):
        with pytest.raises(ConfigError, match="expected an integer ≥ 1"):
            evaluate.main([f"run={run}", argument])


def test_evaluate_lists_the_checkpoints_that_exist(run: Path) -> None:
    with pytest.raises(ConfigError, match="kept steps: 1"):
        evaluate.main([f"run={run}", "checkpoint=7"])


def test_a_bad_option_is_one_line_in_the_shell() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from draco.cli import main; main()", "evaluate", "run=/nowhere"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 2
    assert done.stderr == "error: run=/nowhere: no run there (config.yaml not found); pass the run folder\n"


def test_ablation_keeps_finished_cells_and_prints_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rubric, credit in ablation.SETTINGS:
        for seed, success in ((0, 0.5), (1, 0.7)):
            folder = tmp_path / f"{rubric}-{credit}-s{seed}"
            folder.mkdir()
            summary = {
                "final_success": success, "final_sgc": 0.25, "final_tgc_pass_hat": [success, 0.4, 0.3],
                "final_sgc_pass_hat": [0.25, 0.2, 0.1], "inert_share": None if rubric == "random" else 0.2,
                "rubric_pass_rate": None, "base_success": 0.4, "base_sgc": 0.1,
            }  # fmt: skip
            (folder / "summary.json").write_text(json.dumps(summary))
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("a finished cell was run again"))
    ablation.write_json(tmp_path / "options.json", {})
    assert ablation.main([f"out={tmp_path}", "seeds=0,1"]) == 0
    capsys.readouterr()
    table = (tmp_path / "ablation.md").read_text()
    assert "| dynamic+step | 60.0 ± 14.1 | 25.0 ± 0.0 | 30.0 ± 0.0 | 10.0 ± 0.0 | 20.0 ± 0.0 | – |" in table
    assert "| random+uniform | 60.0 ± 14.1 | 25.0 ± 0.0 | 30.0 ± 0.0 | 10.0 ± 0.0 | – | – |" in table
    assert "| base | 40.0 ± 0.0 | 10.0 ± 0.0 |" in table


def cells_of(monkeypatch: pytest.MonkeyPatch, success: float | None = 0.5) -> list[list[str]]:
    """Stand in for train.py: every cell is "trained" at once. Returns the commands."""
    calls: list[list[str]] = []

    def train_cell(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        folder = Path(next(c for c in command if c.startswith("run="))[4:])
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("{}")
        summary = {
            "final_success": success, "final_sgc": success, "final_tgc_pass_hat": [success],
            "final_sgc_pass_hat": [success], "inert_share": 0.2, "rubric_pass_rate": 0.1,
            "base_success": success, "base_sgc": success,
        }  # fmt: skip
        (folder / "summary.json").write_text(json.dumps(summary))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", train_cell)
    return calls


def test_ablation_never_mixes_cells_of_other_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, out = cells_of(monkeypatch), tmp_path / "out"
    assert ablation.main([f"out={out}", "seeds=0", "steps=2", "eval.tasks=3"]) == 0
    assert json.loads((out / "options.json").read_text()) == {"steps": "2", "eval.tasks": "3"}
    made = len(calls)
    assert made == len(ablation.SETTINGS)
    capsys.readouterr()
    assert ablation.main([f"out={out}", "seeds=0"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: the cells of {out} are made with steps=2 eval.tasks=3, this call asks for (none)")
    assert said.count("\n") == 1
    assert len(calls) == made
    assert ablation.main([f"out={out}", "seeds=0,1", "eval.tasks=3", "steps=2"]) == 0  # more seeds, another order
    assert len(calls) == 2 * made
    (out / "options.json").unlink()
    assert ablation.main([f"out={out}", "seeds=0"]) == 2
    assert "of unknown options" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("seed=5", "seed=5 would override every cell"),
        ("rubric=static", "would override every cell"),
        ("++credit=step", "would override every cell"),
        ("run=x", "would override every cell"),
        ("seeds=a", "seeds=a: expected different integers"),
        ("seeds=0,0", "seeds=0,0: expected different integers"),
        ("jobs=0", "jobs=0: expected an integer"),
        ("--cfg", "'--cfg' is no option"),
        ("fast", "'fast' is no option"),
    ],
)
def test_ablation_names_bad_input(
    argument: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = cells_of(monkeypatch)
    assert ablation.main([f"out={tmp_path / 'out'}", argument]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not calls
    assert not (tmp_path / "out").exists()


def test_ablation_explains_itself(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = cells_of(monkeypatch)
    assert ablation.main(["--help"]) == 0
    assert "python scripts/ablation.py" in capsys.readouterr().out
    assert not calls


def test_ablation_without_evaluations_still_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cells_of(monkeypatch, None)
    assert ablation.main([f"out={tmp_path / 'out'}", "seeds=0", "eval.n=1"]) == 0
    assert "TGC –" in capsys.readouterr().out
    assert "| dynamic+step | – | – | – | – | 20.0 | 10.0 |" in (tmp_path / "out/ablation.md").read_text()


def test_a_failed_cell_is_reported_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []

    def fail(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        return subprocess.CompletedProcess(command, 3, "", "error: judge gone")

    monkeypatch.setattr(subprocess, "run", fail)
    assert ablation.main([f"out={tmp_path}", "seeds=0", "steps=1"]) == 1
    assert len(calls) == len(ablation.SETTINGS)
    assert all("steps=1" in c for c in calls)
    assert "judge gone" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["policy=litellm", "run=x"], "takes no run="),
        (["policy=litellm", "model=m"], "needs env=…, out=… too"),
        (["policy=tiny"], "evaluates a model behind an API"),
        (["run=x", "checkpoint=1", "checkpoints=2"], "are the same; give one"),
        (["run=x", "model=m"], "model= is for policy=litellm"),
        (["policy=litellm", "model=m", "env=desk", "out=o", "checkpoints=last3"], "checkpoints= is for runs"),
    ],
)
def test_evaluate_names_options_that_do_not_go_together(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluate.options(arguments)


def test_prices() -> None:
    assert prices_of("1,4") == Prices(1.0, 4.0)
    assert prices_of("1,0.1,4") == Prices(1.0, 4.0, 0.1)
    assert prices_of(None) is None
    with pytest.raises(ConfigError, match="prices=free"):
        prices_of("free")


def test_several_checkpoints_make_one_table(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = run / "checkpoints"
    for step in (5, 10):  # as if the run had gone on: an epoch of desk is 30 steps of 3 tasks
        shutil.copytree(folder / "step=000001", folder / f"step={step * 6:06d}", dirs_exist_ok=True)
    evaluate.main(
        [f"run={run}", "env=desk", "split=dev", "tasks=3", "checkpoints=last2", f"out={tmp_path}", "prices=1,4"]
    )
    printed = " ".join(capsys.readouterr().out.split())
    assert "mean ± std over 2 checkpoints (step=000030, step=000060)" in printed
    assert "cost of one pass: $" in printed
    found = json.loads((tmp_path / "dev-last2-n1-first3.json").read_text())
    assert found["tgc"]["std"] == 0.0
    assert json.loads((tmp_path / "leaderboard.json").read_text())["dev"]["all"].keys() == {
        "task_goal_completion", "scenario_goal_completion", "interactions",
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"last3: the run has 2 epoch-end checkpoint\(s\) \(an epoch is 30 steps"):
        evaluate.main([f"run={run}", "split=dev", "checkpoints=last3", f"out={tmp_path}"])
    with pytest.raises(ConfigError, match="was trained on env=desk"):
        evaluate.main([f"run={run}", "env=appworld"])
    with pytest.raises(ConfigError, match=r"env\.typo=1: no such option; Valid choices in env: .*verbose_prompt"):
        evaluate.main([f"run={run}", "env.typo=1"])
