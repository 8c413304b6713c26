"""AppWorld's real engine on the miniature data: `make test-appworld` (not part of `make test`)."""

# ruff: noqa: E501 - the programs of policies are quoted whole

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.appworld import DATA, PYTHON, TASKS, on_loop, run, task_of
from support.appworld_coder import GOLD, mini, script, wrong
from support.model_server import ModelServer
from support.policies import TINY
from support.runs import train

from draco.core.errors import ConfigError
from draco.core.files import resolve
from draco.env.appworld import AppWorldEnvironment, AppWorldEvaluator
from draco.env.appworld.environment import unpack_state
from draco.env.appworld.inside.state import restore
from draco.env.records import EvalRecord
from draco.env.success import leaderboard, summarise
from draco.run.archive import read_calls, read_table
from draco.study.runs import open_run
from draco.study.tables import all_tables
from draco.study.verbs import evaluate, replay

pytestmark = pytest.mark.appworld

# --- right and wrong ---


@pytest.mark.parametrize("task_id", TASKS)
def test_gold_passes_and_wrong_and_idle_fail(
    environment: AppWorldEnvironment, evaluator: AppWorldEvaluator, task_id: str
) -> None:
    task = task_of(environment, task_id)
    seen, state = run(environment, task_id, GOLD[task_id])
    assert seen == ["all done"]
    assert evaluator.evaluate(task, state).success is True
    for codes in ([wrong(task_id)], ["apis.supervisor.complete_task()"], []):
        outcome = evaluator.evaluate(task, run(environment, task_id, *codes)[1])
        assert outcome.success is False, codes
        assert outcome.detail["failures"]
    assert task.difficulty == int(task_id[4])


def test_an_episode_leaves_no_files_and_no_process(environment: AppWorldEnvironment) -> None:
    run(environment, TASKS[0], "print(1)")
    fork_server = environment.pools.made.servers[0].server  # type: ignore[union-attr]
    assert fork_server is not None
    assert on_loop(fork_server.request("ping"))["children"] == 0
    command = Path(f"/proc/{fork_server.pid}/cmdline").read_text().split("\0")
    stage = Path(json.loads(command[-2])["root"])
    assert list((stage / "experiments" / "outputs").iterdir()) == []


def test_completion_is_no_end_and_failure_is_told(environment: AppWorldEnvironment) -> None:
    episode = environment.open(task_of(environment, TASKS[0]), seed=0)
    assert episode.step(["print(1)"]).completed is False
    reply = episode.step(["apis.supervisor.complete_task(status='fail')"])
    assert (reply.done, reply.completed, reply.failed) == (False, True, True)
    reply = episode.step(["x = 5\nprint(x)"])
    assert reply.observations == ("5",)
    assert episode.step(["print(x + 1)"]).observations == ("6",)
    episode.close()


def test_tgc_and_sgc_are_appworlds(
    environment: AppWorldEnvironment, evaluator: AppWorldEvaluator, tmp_path: Path
) -> None:
    """One scenario solved, one in part, one not; AppWorld's own `evaluate_tasks` on the same outputs agrees."""
    solved = {*TASKS[:3], *TASKS[3:5], TASKS[8]}
    states = {t: run(environment, t, *([GOLD[t]] if t in solved else [wrong(t)]))[1] for t in TASKS}
    records = []
    for task in environment.tasks("train"):
        outcome = evaluator.evaluate(task, states[task.id])
        records.append(
            EvalRecord(
                task.id, task.scenario_id, task.difficulty, 0, outcome.success, "submitted", 2, 0, interactions=1
            )
        )
    ours = leaderboard({"train": summarise(records)})["train"]
    root = tmp_path / "root"
    root.mkdir()
    (root / "data").symlink_to(Path(DATA).absolute() / "full" / "data")
    for task_id, state in states.items():
        dbs = root / "experiments" / "outputs" / "x" / "tasks" / task_id / "dbs"
        dbs.mkdir(parents=True)
        restore(unpack_state(state)["dbs"], dbs, root, task_id)
    program = (
        "import json, sys; from appworld.evaluator import Metric, evaluate_tasks\n"
        f"found = evaluate_tasks({TASKS!r}, 'x', save_reports=False)\n"
        "report = Metric.build_report(found)\n"
        "print('RESULT', json.dumps(report))"
    )
    said = subprocess.run(
        [PYTHON, "-c", program], cwd=root, env={"PATH": os.environ["PATH"], "APPWORLD_ROOT": str(root)},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    theirs = json.loads(said.split("RESULT", 1)[1])
    for row, name in enumerate(("all", "level 1", "level 2", "level 3")):
        for key in ("task_goal_completion", "scenario_goal_completion"):
            assert ours[name][key] == theirs[key][row], (name, key)
    assert ours["all"]["task_goal_completion"] == 66.7
    assert ours["all"]["scenario_goal_completion"] == 33.3


# --- training and evaluating ---


def judged(n: int, body: dict[str, Any]) -> tuple[int, str]:
    """A loopback judge that reads: did the attempt do more than complete?"""
    phase = body["response_format"]["json_schema"]["name"]
    text = body["messages"][-1]["content"]
    row = {
        "title": "Performs required actions",
        "description": "d",
        "evaluator_instruction": "i",
        "grounding_references": [],
    }
    if phase in ("propose_task", "merge"):
        return 200, json.dumps({"criteria": [row]})
    if phase == "propose_rollout":
        return 200, json.dumps({"criteria": []})
    score = 1 if "def solution" in text else -1
    title = next(
        known for known in (row["title"], "Says hello first") if known in text
    )  # the second: draco's own check
    if phase == "score":
        verdict = {"title": title, "evidence": "e", "justification": "j", "score": score}
        return 200, json.dumps({"verdicts": [verdict]})
    given = {"title": title, "explanation": "x", "verdict": score, "relevant_steps": [2]}
    return 200, json.dumps({"attributions": [given]})


OPTIONS = (
    "env=appworld", f"env.python={PYTHON}", f"env.data={DATA}", "engine._target_=support.appworld_coder.ScriptedCoder",
    "limits.max_prompt_tokens=12000", "limits.max_response_tokens=12000", "limits.max_turn_tokens=0", "policy.rank=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One step of DRACO on five of the nine tasks, an epoch, judged by a loopback model; then two checkpoints more."""
    folder = tmp_path_factory.mktemp("appworld") / "run"
    longer = shutil.copytree(resolve(TINY), folder.with_name("longer"), ignore=shutil.ignore_patterns("__pycache__"))
    config = json.loads((longer / "config.json").read_text())
    (longer / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 24_000}))
    with ModelServer() as made, pytest.MonkeyPatch.context() as patch:
        made.says = judged
        patch.setenv("OPENAI_API_KEY", "sk-canary-0123456789")
        summary = train(
            *OPTIONS, f"policy.path={longer}", "judge=litellm", "judge.model=openai/some-model", "judge.response_schema=on", "steps=1",
            f"judge.api_base={made.base}", "tasks_per_step=5", "group_size=2", "loss.kl_coef=0",
            "eval.before=false", "eval.tasks=2", f"run={folder}", "checkpoint.check_disk=false",
        )  # fmt: skip
    assert summary["final_success"] == 1.0
    assert summary["setting"] == "dynamic+step"
    for version in (2, 3):  # as if it had gone on; a step takes a minute of the packaged policy on prompts of this size
        made_up = folder / "checkpoints" / f"step={version:06d}"
        shutil.copytree(folder / "checkpoints" / "step=000001", made_up)
        state = json.loads((made_up / "state.json").read_text())
        assert state["policy_version"] == 1
        (made_up / "state.json").write_text(json.dumps(state | {"policy_version": version}))
    return folder


def test_a_training_step_leaves_trajectories_verdicts_citations_credits_and_an_archive(run_folder: Path) -> None:
    trajectories = read_table(run_folder, "trajectories", [0]).to_pylist()
    hard = sum(t["task_id"].startswith("mini3") for t in trajectories) // 2
    assert Counter(t["termination"] for t in trajectories) == Counter({"submitted": 10 - hard, "gave_up": hard})
    assert all(t["end_state"] for t in trajectories)
    verdicts = read_table(run_folder, "verdicts", [0]).to_pylist()
    assert Counter(v["score"] for v in verdicts) == {1: 5, -1: 5}
    assert all(list(v["cited_steps"]) == [2] for v in verdicts)
    credits = read_table(run_folder, "credits", [0]).to_pylist()
    assert len(credits) == 10
    calls = read_calls(run_folder, [0])
    assert {c["phase"] for c in calls} == {"propose_task", "propose_rollout", "merge", "score", "attribute"}
    for call in calls:  # the environment's caveats reach every judge prompt
        assert "does not end the episode" in " ".join(content for _, content in call["messages"]), call["phase"]
    assert replay.main([str(run_folder)]) == 0  # rewards and credits follow from the archive, to the bit
    success = list(csv.DictReader((run_folder / "train_success.csv").read_text().splitlines()))
    assert Counter((row["sample"], row["success"]) for row in success) == {("0", "1"): 5, ("1", "0"): 5}
    assert "sk-canary" not in "".join(f.read_text() for f in run_folder.glob("*.*") if f.suffix != ".html")


def test_the_last_three_epoch_ends_are_evaluated_on_both_splits(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By hand: of three runs of a task the even two succeed, the odd one from version level + 1 on."""

    evaluate.main([
        f"run={run_folder}", "env=appworld", "split=test_normal,test_challenge", "n=3", "checkpoints=last3",
        "prices=1,0.1,4",
    ])  # fmt: skip
    printed = " ".join(capsys.readouterr().out.split())
    board = json.loads((run_folder / "evaluations" / "leaderboard.json").read_text())
    for split in ("test_normal", "test_challenge"):
        one = json.loads((run_folder / "evaluations" / f"{split}-step=000002-n3.json").read_text())
        assert one["tgc_pass_hat"] == pytest.approx([7 / 9, 5 / 9, 3 / 9])
        assert one["scaffold"].startswith("draco's own code agent")
        found = json.loads((run_folder / "evaluations" / f"{split}-last3-n3.json").read_text())
        assert found["checkpoints"] == ["step=000001", "step=000002", "step=000003"]
        for name in ("tgc", "sgc"):  # 6/9, 7/9, 8/9; a scenario's three tasks go together
            assert found[name] == pytest.approx({"mean": 7 / 9, "std": 1 / 9})
            assert found[f"{name}_pass_hat"][2] == pytest.approx({"mean": 1 / 3, "std": 1 / 3})
            levels = found[f"{name}_by_difficulty"]
            assert [levels[k]["mean"] for k in "123"] == pytest.approx([8 / 9, 7 / 9, 2 / 3])
            assert levels["3"]["std"] == pytest.approx(0.0)
        assert found["terminations"]["gave_up"] == pytest.approx({"mean": 1 / 9, "std": 0.0})
        assert found["turns"] == {"mean": 3.0, "std": 0.0}
        assert found["cost_usd"]["mean"] > 0
        assert found["input_tokens"]["mean"] > found["step_tokens"]["mean"] > 0
        assert board[split]["all"] == {
            "task_goal_completion": 77.8, "scenario_goal_completion": 77.8, "interactions": 1.89,
        }  # fmt: skip
        assert board[split].keys() == {"all", "level 1", "level 2", "level 3"}
        assert f"{split}, mean ± std over 3 checkpoints (step=000001, step=000002, step=000003)" in printed
    assert "77.8% ± 11.1%" in printed
    assert "TGC by difficulty level 1: 88.9% ± 19.2% level 2: 77.8% ± 19.2% level 3: 66.7% ± 0.0%" in printed
    assert "gave_up 11.1% ± 0.0%" in printed
    assert "agent: draco's own code agent" in printed
    table = next(t for t in all_tables([open_run(run_folder)]) if t.name == "T4_success_std")
    row = dict(zip(table.columns, next(r for r in table.rows if r[0] == "dynamic+step"), strict=True))
    assert row["test_normal TGC p1"] == "77.8 ± 11.1"
    assert any("draco's own code agent" in note for note in table.notes)


def test_a_policy_that_is_too_small_is_refused_before_the_first_rollout(tmp_path: Path) -> None:
    options = ("rubric=random", "credit=uniform", "eval.tasks=1", "tasks_per_step=1", f"run={tmp_path / 'run'}")
    with pytest.raises(ConfigError, match=r"may take 16\d+ tokens .*policy\.tiny was made for 2048; set"):
        train(*OPTIONS, *options)
    assert not (tmp_path / "run").exists()


def test_an_unknown_split_is_refused_before_anything_is_evaluated(run_folder: Path, tmp_path: Path) -> None:

    with pytest.raises(ConfigError, match="no split 'test_hard'; expected one of dev, test_challenge"):
        evaluate.main([f"run={run_folder}", "split=dev,test_hard", "tasks=1", f"out={tmp_path}"])
    assert not list(tmp_path.iterdir())


def test_any_model_behind_an_api_plays_on_the_same_harness(
    model_server: ModelServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A row of Table 8: two of three scenarios, three turns, the cost of a pass by the provider's counts."""

    monkeypatch.setenv("OPENAI_API_KEY", "sk-canary-0123456789")
    opened: list[str] = []

    def agent(n: int, body: dict[str, Any]) -> tuple[int, str]:
        if len(body["messages"]) == 1:
            return 200, "ready"
        opened.append(body["messages"][0]["content"])
        asked = body["messages"][1]["content"].split("Task: ")[1]
        who = body["messages"][1]["content"].split("supervisor, ")[1].split(" (")[0]
        task_id = next(
            s["id"] for s in mini.scenarios()
            if s["instruction"] == asked and " ".join(s["supervisor"][:2]) == who
        )  # fmt: skip
        sample = int(task_id == "mini2bb_2")  # completes this one without doing it
        return 200, script(task_id, sample)[sum(m["role"] == "assistant" for m in body["messages"])] + "and more"

    model_server.says = agent
    evaluate.main([
        "policy=litellm", "model=openai/gpt-4o-mini", f"api_base={model_server.base}",
        "env=appworld", f"env.python={PYTHON}", f"env.data={DATA}", "env.thinking=true", "split=test_normal",
        f"out={tmp_path}", "prices=2,0.5,8",
    ])  # fmt: skip
    found = json.loads((tmp_path / "test_normal-api-n1.json").read_text())
    assert [r["error"] for r in found["records"]] == [""] * 9
    assert (found["agent"], found["quarantined"], found["unevaluated"]) == ("openai/gpt-4o-mini", 0, 0)
    assert (found["tgc"], found["sgc"]) == (pytest.approx(8 / 9), pytest.approx(2 / 3))
    assert found["terminations"] == {"submitted": 1.0}
    assert (found["turns"], found["interactions"]) == (3.0, 2.0)
    # The server counts 100 tokens read and 7 written a turn: 100 at first, 200 again, 21 written.
    assert found["cost_usd"] == pytest.approx(9 * (100 * 2 + 200 * 0.5 + 21 * 8) / 1e6)
    assert all("think first" in text for text in opened)  # the prompt for thinking, as env.thinking=true says
    assert "sk-canary" not in json.dumps(found)
    assert "openai/gpt-4o-mini" in capsys.readouterr().out
    table = next(t for t in all_tables([open_run(tmp_path)]) if t.name == "T8_models")
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert (row["model"], row["turns"]) == ("openai/gpt-4o-mini", 3.0)
    assert (row["TGC"], row["SGC"]) == (pytest.approx(8 / 9), pytest.approx(2 / 3))
    assert row["cost of one pass (USD)"] == pytest.approx(found["cost_usd"])
