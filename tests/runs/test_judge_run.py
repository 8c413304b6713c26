"""Whole runs with a judge that is asked over HTTP, dies, costs money, and holds a key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.loopback_judge import Answer, LoopbackJudge
from support.runs import rows_of, same, train

from draco.core.errors import ConfigError, JudgeConfigError, TrainingStopped
from draco.env.desk.judge.reading import read_prompt
from draco.env.desk.judge.replies import reply
from draco.judge.cache import Store
from draco.run.archive import read_calls, read_table, step_folders

pytestmark = pytest.mark.judge

CANARY = "sk-canary-5f1d0c9be72a4488"
SMALL = (
    "steps=2", "tasks_per_step=2", "group_size=2", "eval.before=false", "eval.tasks=1", "policy.rank=4",
    "limits.max_response_tokens=160",
)  # fmt: skip


class Mortal:
    """The scripted judge behind HTTP; answers so many calls and is gone then."""

    def __init__(self) -> None:
        self.lives: float = float("inf")
        self.answered = 0
        self.server = LoopbackJudge(self.answer)

    def answer(self, body: dict[str, Any]) -> Answer:
        text = body["messages"][1]["content"]
        if self.answered >= self.lives:
            return Answer(status=503, error=f"gone; you came with {CANARY}", headers={"Retry-After": "0"})
        self.answered += "Greet me." not in text  # the call before every run is not one of a step
        return Answer(json.dumps(reply(read_prompt(text))))


@pytest.fixture(scope="module")
def judge() -> Iterator[Mortal]:
    made = Mortal()
    with made.server:
        yield made


@pytest.fixture
def options(judge: Mortal, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    monkeypatch.setenv("OPENAI_API_KEY", CANARY)
    judge.lives, judge.answered = float("inf"), 0
    ours = ("judge=litellm", "judge.model=openai/loopback", f"judge.api_base={judge.server.base}")
    return (*SMALL, *ours, "judge.backoff_s=0", "judge.max_retries=1", "judge.concurrency=1")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with the scripted judge in process."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    train(*SMALL, f"run={run}")
    return run


def leaks(folder: Path, *texts: str) -> list[str]:
    """Where the key is."""
    found = [str(p) for p in folder.rglob("*") if p.is_file() and CANARY.encode() in p.read_bytes()]
    return found + [text for text in texts if CANARY in text]


@pytest.mark.parametrize("when", ["in the middle", "at the last call"])
def test_a_judge_that_dies_stops_the_run_and_a_resume_ends_as_if_it_had_not(
    judge: Mortal, options: tuple[str, ...], undisturbed: Path, tmp_path: Path, when: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    calls = read_table(undisturbed, "judge_calls")
    first, both = calls["step"].to_pylist().count(0), calls.num_rows
    judge.lives = first + 4 if when == "in the middle" else both - 1
    if when == "at the last call":  # few enough to be trained without, had it been a flaw
        options = (*options, "judge.max_failed_share=0.6")
    run = tmp_path / "run"
    with pytest.raises(TrainingStopped) as caught:
        train(*options, f"run={run}")
    said = str(caught.value)
    assert ("max_failed_share=0.25" if when == "in the middle" else "no longer answers") in said
    assert len(step_folders(run)) == 1  # nothing of the second step was trained on
    with pytest.raises(JudgeConfigError, match="is the judge up"):
        train(f"resume={run}")  # still gone: said before any weights load
    judge.lives = float("inf")
    train(f"resume={run}")
    assert same(run, undisturbed)
    assert judge.answered == both  # none was paid for twice
    rows, whole = rows_of(run / "metrics.csv"), rows_of(undisturbed / "metrics.csv")
    assert [r["judge/calls"] for r in rows] == [r["judge/calls"] for r in whole]
    assert float(rows[1]["judge/cache_hits"]) > 0
    for row in rows:
        tokens, seconds = (float(row[f"judge/tokens_{way}"]) for way in ("in", "out")), float(row["time/judge_s"])
        asked = sum(tokens) - float(row["judge/cache_hit_tokens"] or 0)
        assert float(row["judge/tokens_per_s"]) == pytest.approx(asked / seconds)
    assert rows[0].get("judge/cost_usd", "") == ""  # unknown, not 0
    assert not leaks(tmp_path, said, caplog.text)


def test_a_cap_stops_the_run_with_its_state_and_a_higher_one_goes_on(
    judge: Mortal, options: tuple[str, ...], undisturbed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    rows = rows_of(undisturbed / "metrics.csv")
    step = sum(float(rows[0][f"judge/tokens_{k}"]) for k in ("in", "out"))
    with pytest.raises(TrainingStopped, match=r"judge.max_tokens_total=.* would be passed: \d+ judge tokens"):
        train(*options, f"judge.max_tokens_total={int(step * 1.4)}", f"run={run}")
    assert len(step_folders(run)) == 1
    store = Store(run / "judge")
    assert store.spent().tokens <= step * 1.4
    store.close()
    train(f"resume={run}", "judge.max_tokens_total=100000000")
    assert same(run, undisturbed)


def test_what_was_sent_and_said_is_kept_once_and_comes_back(
    judge: Mortal, options: tuple[str, ...], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    before = len(judge.server.bodies)
    train(*options, "steps=1", f"run={run}")
    calls = read_calls(run)
    sent = {json.dumps([[m["role"], m["content"]] for m in b["messages"]]) for b in judge.server.bodies[before + 1 :]}
    assert {json.dumps(c["messages"]) for c in calls} == sent
    assert all(json.loads(c["reply"]) for c in calls)
    texts = read_table(run, "judge_texts")["hash"].to_pylist()
    assert len(texts) == len(set(texts))
    assert len(texts) < sum(len(c["messages"]) for c in calls) * 2  # system texts and transcripts are shared


def test_a_refused_key_is_named_before_anything_loads(
    judge: Mortal, options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    denied = Answer(status=401, error=f"Incorrect API key provided: {CANARY}")
    monkeypatch.setattr(judge.server, "answer", lambda body: denied)
    monkeypatch.setattr("draco.policy.policy.Policy.__init__", lambda *a, **k: pytest.fail("weights were loaded"))
    with pytest.raises(JudgeConfigError, match="OPENAI_API_KEY") as caught:
        train(*options, f"run={tmp_path / 'run'}")
    assert not leaks(tmp_path, str(caught.value), caplog.text)


def test_preflight_tries_everything_and_leaves_nothing(
    judge: Mortal, options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert train(*options, "preflight=true", "judge.prices={input: 1, output: 10}", f"run={run}") == {}
    printed = capsys.readouterr().out
    for row in ("judge", "chat template", "disk", "adapter", "GPU kernels", "environment", "run folder", "USD"):
        assert row in printed
    for phase in ("propose_task", "propose_rollout", "merge", "score", "attribute"):
        assert f"call: {phase}" in printed
    assert not run.exists()
    judge.lives = 0
    with pytest.raises(ConfigError, match="preflight: judge failed"):
        train(*options, "preflight=true", f"run={run}")
    assert "is the judge up" in " ".join(capsys.readouterr().out.replace("│", " ").split())
