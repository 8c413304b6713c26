"""Whole runs in which the policy judges itself: in process, at an endpoint named by hand, and at its engine's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.chat_model import Chatty, save_chat_model
from support.loopback_judge import Answer, LoopbackJudge
from support.runs import rows_of, same, train

from callbacks.archive import ArchiveWriter
from draco.core.errors import ConfigError, JudgeConfigError, TrainingStopped
from draco.env.desk.judge.reading import read_prompt
from draco.env.desk.judge.replies import reply
from draco.run.archive import read_calls, read_table, step_folders

pytestmark = pytest.mark.judge


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture
def options(model: Path) -> tuple[str, ...]:
    return (
        "steps=2", "tasks_per_step=2", "group_size=3", "eval.before=false", "eval.tasks=1", "policy=hf",
        f"policy.path={model}", "policy.dtype=float32", "policy.rank=2", "lr=1e-3", "rubric=self_judge",
        "engine._target_=support.chat_model.Chatty", "limits.max_response_tokens=4000", "report=false",
        "rubric.max_reply_tokens=30000",
    )  # fmt: skip


class Served(LoopbackJudge):
    """The policy behind an OpenAI-compatible address."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        super().__init__(self.say)

    def say(self, body: dict[str, Any]) -> Answer:
        self.calls.append(body)
        return Answer(f"<think>let me see</think>{json.dumps(reply(read_prompt(body['messages'][1]['content'])))}")


@pytest.fixture
def served() -> Iterator[Served]:
    with Served() as made:
        yield made


def test_in_process(options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three scoring calls with thoughts; a run that breaks off goes on to the same adapter."""
    asked: list[str] = []
    monkeypatch.setattr(Chatty, "judged", asked)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(*options, f"run={whole}")
    assert all(prompt.endswith("<think>\n") for prompt in asked)
    calls = read_calls(whole)
    assert {c["model"].split("/")[0] for c in calls} == {"draco-policy"}
    assert len({c["model"] for c in calls}) == 2  # the adapter's hash, one a step
    scores = [c for c in calls if c["phase"] == "score"]
    assert {c["repeat"] for c in scores} == {0, 1, 2}
    assert all(c["reply"].startswith("<think>let me see</think>") for c in calls)
    rows = rows_of(whole / "metrics.csv")
    assert [float(r["judge/failed_share"]) for r in rows] == [0.0, 0.0]
    assert [float(r["judge/vote_agreement"]) for r in rows] == [1.0, 1.0]
    assert [float(r["judge/cost_usd"]) for r in rows] == [0.0, 0.0]
    assert any(float(r["update/grad_norm"]) > 0 for r in rows)
    assert -1 in read_table(whole, "verdicts")["score"].to_pylist()

    write = ArchiveWriter.on_train_batch_end

    def once(self: Any, *args: Any) -> None:
        if len(step_folders(cut)) == 1:
            raise TrainingStopped("cut")
        write(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(ArchiveWriter, "on_train_batch_end", once)
        with pytest.raises(TrainingStopped, match="cut"):
            train(*options, f"run={cut}")
    train(f"resume={cut}")
    assert same(whole, cut)


def test_at_an_endpoint_the_name_follows_the_adapter(
    options: tuple[str, ...], served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOSTED_VLLM_API_KEY", "key-of-the-server")
    place = (f"rubric.api_base={served.base}", "rubric.model='hosted_vllm/policy-{version}'")
    train(*options, *place, "rubric.thinking=false", "rubric.k=1", f"run={tmp_path / 'run'}")
    assert {b["model"] for b in served.calls} == {"policy-0", "policy-1"}
    assert {b["chat_template_kwargs"]["enable_thinking"] for b in served.calls} == {False}
    assert {b["max_tokens"] for b in served.calls} == {30000}
    assert {b["temperature"] for b in served.calls} == {1.0}
    rows = rows_of(tmp_path / "run" / "metrics.csv")
    assert [r["judge/calls"] for r in rows] == [
        str(float(sum(b["model"] == f"policy-{v}" for b in served.calls))) for v in (0, 1)
    ]


def test_the_engines_endpoint(
    options: tuple[str, ...], served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked anew for every batch, and its key stays secret."""
    names = iter(["draco-v000000-aa", "draco-v000001-bb"])
    monkeypatch.setattr(Chatty, "judge_endpoint", lambda self: (served.base, next(names), "secret-of-the-engine"))
    run = tmp_path / "run"
    train(*options, f"run={run}")
    assert [b["model"] for b in served.calls] == sorted(b["model"] for b in served.calls)
    assert {b["model"] for b in served.calls} == {"draco-v000000-aa", "draco-v000001-bb"}
    assert set(served.keys) == {"Bearer secret-of-the-engine"}
    assert {b["chat_template_kwargs"]["enable_thinking"] for b in served.calls} == {True}
    assert not [p for p in run.rglob("*") if p.is_file() and b"secret-of-the-engine" in p.read_bytes()]


def test_an_endpoint_that_does_not_answer(options: tuple[str, ...], served: Served, tmp_path: Path) -> None:
    """Named without a version it is asked before the weights load; else the first batch is lost, and the run stops."""
    served.answer = lambda body: Answer(status=404, error="The model `policy` does not exist.")
    place = (f"rubric.api_base={served.base}", "rubric.judge.backoff_s=0")
    with pytest.raises(JudgeConfigError, match=r"does not exist.*rubric\.model"):
        train(*options, *place, "rubric.model=hosted_vllm/policy", f"run={tmp_path / 'a'}")
    served.answer = lambda body: Answer(status=503)
    with pytest.raises(TrainingStopped, match=r"max_failed_share|no longer answers"):
        train(*options, *place, "rubric.model='hosted_vllm/p-{version}'", f"run={tmp_path / 'b'}")


def test_preflight(options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(*options, "preflight=true", f"run={tmp_path / 'run'}") == {}
    said = capsys.readouterr().out
    assert "call: score" in said
    assert not (tmp_path / "run").exists()


def test_what_does_not_fit_is_said_before_a_rollout(options: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"merge call of judge.plan=paper may need .* judge.plan=lean"):
        train(*options, "rubric.context=60000", f"run={tmp_path / 'run'}")
