"""Models behind an API as the agent: how episodes end, what faults become, against a server on this machine."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.echo import EchoEnvironment, EchoEpisode, EchoEvaluator
from support.factory import rollout_of
from support.model_server import CANARY, ModelServer

from draco.core.errors import ConfigError
from draco.core.llm.money import Usage
from draco.core.types import Task, Termination, Trajectory
from draco.env.records import record_of
from draco.policy.chat import ChatFormat
from draco.rollout.engines.api import ApiEngine, TextRollout
from draco.rollout.loop import Limits
from draco.study.episodes import EpisodeFile
from draco.study.verbs import evaluate


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", CANARY)


def engine(model_server: ModelServer, **more: Any) -> ApiEngine:
    return ApiEngine("openai/gpt-4o-mini", api_base=model_server.base, backoff_s=0.001, **more)


def episodes(
    engine: ApiEngine, environment: EchoEnvironment, limits: Limits, asked: Sequence[tuple[Task, int]]
) -> list[TextRollout]:
    rollouts = [TextRollout(environment.open(t, seed=i), limits, task=t, sample=i, seed=i) for t, i in asked]
    ended = list(engine.run(None, rollouts, temperature=engine.temperature))
    assert {id(r) for r in ended} == {id(r) for r in rollouts}
    return ended


def play(
    model_server: ModelServer,
    *,
    max_turns: int = 4,
    tokens: int = 10_000,
    turn: int = 0,
    deadline_s: float = 0.0,
    **options: Any,
) -> Trajectory:
    """One episode of the echoing environment, its tasks not over at completion."""
    limits = Limits(max_turns=max_turns, max_response_tokens=tokens, max_turn_tokens=turn, deadline_s=deadline_s)
    played, environment = engine(model_server, **options), EchoEnvironment(closes=False)
    try:
        (rollout,) = episodes(played, environment, limits, [(environment.tasks("train")[0], 0)])
    finally:
        played.close()
    assert environment.opened[0].closed == 1
    return rollout.trajectory()


def no_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses are listed, not made."""
    slept: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float, *more: Any) -> None:
        slept.append(seconds)
        await real(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return slept


@pytest.mark.parametrize(
    ("turns", "more", "termination"),
    [
        (["<code>a</code>", "<code>done</code>", "That is all."], {}, Termination.SUBMITTED),
        (["<code>fail</code> and what was not asked for", "Sorry."], {}, Termination.GAVE_UP),
        (["I think.", "I still think."], {}, Termination.GAVE_UP),
        (["I think.", "<code>done</code>", "Over."], {}, Termination.SUBMITTED),
        (["", ""], {}, Termination.NO_ACTION),
        (["<code>never closed", "<code>never closed"], {}, Termination.NO_ACTION),
        (["<code>a</code>"] * 9, {"max_turns": 3}, Termination.TURN_LIMIT),
        (["<code>a</code>"] * 9, {"tokens": 7}, Termination.LENGTH_LIMIT),  # the server says 7 a turn
        (["<code>boom</code>"], {}, Termination.ENVIRONMENT_ERROR),
    ],
)
def test_terminations(
    model_server: ModelServer,
    turns: list[str],
    more: dict[str, Any],
    termination: Termination,
) -> None:
    model_server.says = lambda n, body: (200, turns[sum(m["role"] == "assistant" for m in body["messages"])])
    trajectory = play(model_server, **more)
    assert trajectory.termination == termination
    assert all("what was not asked for" not in m.content for m in trajectory.messages)


@pytest.mark.parametrize("closes", [True, False])
@pytest.mark.parametrize(
    ("turns", "limits"),
    [
        (["<code>a</code>", "<code>done</code>", "That is all."], {}),  # closes with an action, or with a closing turn
        (["I think.", "<code>a</code>", "<code>fail</code>", "Sorry."], {}),
        (["", ""], {}),
        (["<code>a</code>"] * 3, {"max_turns": 3}),
        (["<code>a</code>", "<code>boom</code>"], {}),
        (["<code>a</code>"], {"max_response_tokens": 7}),  # so many the server says; to the other it is less
    ],
)
def test_turns_and_ends_are_counted_as_those_of_a_policy(
    model_server: ModelServer,
    chat: ChatFormat,
    turns: list[str],
    limits: dict[str, Any],
    closes: bool,
) -> None:
    """Tables show both side by side."""
    budgets = Limits(**limits)
    model_server.says = lambda n, body: (200, turns[sum(m["role"] == "assistant" for m in body["messages"])])
    environment = EchoEnvironment(closes=closes)
    task = environment.tasks("train")[0]
    played = engine(model_server)
    try:
        (ours,) = episodes(played, environment, budgets, [(task, 0)])
    finally:
        played.close()
    policy = rollout_of(chat, turns, limits=budgets, episode=EchoEpisode(task, closes=closes)).trajectory()

    def counted(trajectory: Trajectory) -> tuple[Any, ...]:
        record = record_of(trajectory, EchoEvaluator(), Usage())
        steps = [(s.index, s.turn, s.observation) for s in trajectory.steps]
        said = [(m.role, m.content * (m.role != "assistant")) for m in trajectory.messages]
        return record.termination, record.turns, record.interactions, record.success, steps, said

    assert counted(ours.trajectory()) == counted(policy)


def test_a_fault_that_passes_is_tried_again_and_one_that_stays_is_told_apart(model_server: ModelServer) -> None:
    model_server.says = lambda n, body: (503, "busy") if n < 3 else (200, "<code>done</code>" if n == 3 else "Over.")
    assert play(model_server).termination == Termination.SUBMITTED
    model_server.says = lambda n, body: (503, "busy")
    lost = play(model_server, max_retries=1)
    assert (lost.termination, CANARY in lost.error) == (Termination.ENGINE_ERROR, False)
    model_server.says = lambda n, body: (401, f"no such key {CANARY}")
    with pytest.raises(ConfigError, match=r"status 401.*check model=, its key") as caught:
        play(model_server)
    assert CANARY not in str(caught.value)


def test_a_model_that_does_not_answer_is_one_line_before_any_episode(model_server: ModelServer) -> None:
    model_server.says = lambda n, body: (503, "busy")
    with pytest.raises(ConfigError, match=r"status 503.*does not answer; check model= and api_base=") as caught:
        engine(model_server, max_retries=1).check()
    assert "\n" not in str(caught.value)
    assert len(model_server.bodies) == 2


def test_a_refused_prompt_ends_its_episode_and_is_not_asked_again(model_server: ModelServer) -> None:
    said = {"error": {"message": f"flagged by the content policy {CANARY}", "code": "content_policy_violation"}}
    model_server.says = lambda n, body: (400, said) if n == 2 else (200, "<code>a</code>")
    lost = play(model_server)
    assert (lost.termination, len(model_server.bodies), len(lost.steps)) == (Termination.ENGINE_ERROR, 2, 1)
    assert lost.error.startswith("refused: openai/gpt-4o-mini: ")
    assert "flagged by the content policy" in lost.error
    assert CANARY not in lost.error
    model_server.says = lambda n, body: (404, said)
    with pytest.raises(ConfigError, match=r"status 404.*; check model=") as caught:
        engine(model_server).check()
    assert CANARY not in str(caught.value)


def test_the_pause_that_a_provider_asks_for_is_made(
    model_server: ModelServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept = no_pauses(monkeypatch)
    model_server.headers = {"Retry-After": "17"}
    answers = [(429, "slow down"), (200, "<code>done</code>"), (200, "Over.")]
    model_server.says = lambda n, body: answers[min(n, 3) - 1]
    assert play(model_server).termination == Termination.SUBMITTED
    assert 17.0 in slept


def test_a_turn_is_capped_where_the_model_writes_it(model_server: ModelServer) -> None:
    model_server.says = lambda n, body: (200, "Over.")
    play(model_server, turn=96)
    assert {body.get("max_tokens") for body in model_server.bodies} == {96}
    model_server.bodies.clear()
    play(model_server)
    assert {body.get("max_tokens") for body in model_server.bodies} == {None}


def test_the_deadline_ends_a_call_and_is_looked_at_after_an_action(
    model_server: ModelServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = threading.Event()

    def hangs(n: int, body: dict[str, Any]) -> tuple[int, Any]:
        free.wait(30)
        return 200, "Over."

    play(model_server)  # litellm loads
    model_server.says = hangs
    assert play(model_server, deadline_s=0.2).termination == Termination.DEADLINE
    free.set()
    model_server.says = lambda n, body: (200, "<code>a</code>")
    act, ahead = EchoEpisode.step, [0.0]  # the action takes ten minutes; how long the call takes decides nothing
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(ahead))
    monkeypatch.setattr("draco.rollout.loop.time", clock)
    monkeypatch.setattr(EchoEpisode, "step", lambda self, actions: (ahead.append(600.0), act(self, actions))[1])
    late = play(model_server, deadline_s=300.0)
    assert (late.termination, late.steps[0].observation) == (Termination.DEADLINE, "got a")


def test_one_agent_plays_several_splits(model_server: ModelServer) -> None:
    """Connections that were closed after the first split made every later episode a fault."""
    model_server.says = lambda n, body: (200, "<code>done</code>")
    played, environment = engine(model_server), EchoEnvironment()
    for _ in range(2):
        played.check()
        for split in ("train", "test"):
            asked = [(task, sample) for task in environment.tasks(split) for sample in range(2)]
            found = episodes(played, environment, Limits(), asked)
            assert [t.termination for t in found] == [Termination.SUBMITTED] * 4
        played.close()
    assert (found[0].task.split, found[0].usage) == ("test", Usage(100, 7))
    assert found[0].cost_usd is not None


def script(model_server: ModelServer, out: Path, *more: str) -> dict[str, Any]:
    """Result of `draco evaluate` on the embedded environment."""
    base = f"api_base={model_server.base}"
    fixed = ["policy=litellm", "model=openai/gpt-4o-mini", "env=desk", "split=dev", f"out={out}", base]
    evaluate.main([*fixed, *more])
    n = next((m.removeprefix("n=") for m in more if m.startswith("n=")), "1")
    tasks = next((m.removeprefix("tasks=") for m in more if m.startswith("tasks=")), "")
    file = out / f"dev-api-n{n}{f'-first{tasks}' if tasks else ''}.json"
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_a_frontier_model_has_the_budgets_of_a_policy_and_not_those_of_the_toy(
    model_server: ModelServer,
    tmp_path: Path,
) -> None:
    """An observation of 3,000 tokens, as AppWorld cuts them, ended every episode as length_limit."""
    turns = ["<code>print(1)</code>", "I give up.", "I give up."]
    model_server.says = lambda n, body: (200, turns[min(len(body["messages"]) // 2 - 1, 2)] if n > 1 else "ready")
    model_server.prompt_tokens = lambda body: 100 if len(body["messages"]) < 3 else 3200
    found = script(model_server, tmp_path / "a", "tasks=2")
    assert found["terminations"] == {"gave_up": 1.0}
    assert found["limits"] == {
        "max_turns": 50, "max_prompt_tokens": 4096, "max_response_tokens": 24576, "max_turn_tokens": 0, "deadline_s": 0,
    }  # fmt: skip
    found = script(model_server, tmp_path / "b", "tasks=2", "limits.max_response_tokens=320")
    assert (found["terminations"], found["limits"]["max_response_tokens"]) == ({"length_limit": 1.0}, 320)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["env=nope"], r"Could not find 'env/nope'.*desk"),
        (["env=appworld", "env.dta=x"], r"env\.dta.*no such option; did you mean env\.data\?"),
        (["env=desk", "limits.max_turn=3"], r"limits\.max_turn.*did you mean limits\.max_turns"),
        (["env=desk", "limits.max_turns=0"], r"limits\.max_turns"),
    ],
)
def test_what_does_not_compose_is_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        evaluate.main(["policy=litellm", "model=openai/gpt-4o-mini", f"out={tmp_path}", *arguments])
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_nothing_paid_for_is_lost_and_the_same_command_goes_on(model_server: ModelServer, tmp_path: Path) -> None:
    """One prompt in the middle is refused, then the key is: three episodes are over by then."""
    one = "concurrency=1"
    refusal = {"error": {"message": "flagged", "code": "content_policy_violation"}}
    model_server.says = lambda n, body: (200, "No.") if n < 6 else (400, refusal) if n == 6 else (401, CANARY)
    with pytest.raises(ConfigError, match=r"status 401.*; 3 episodes are kept in .*jsonl: the same command goes on"):
        script(model_server, tmp_path, "tasks=3", "n=2", one)
    file = tmp_path / "dev-api-n2.jsonl"
    lines = file.read_text().splitlines()
    assert len(lines) == 4
    assert CANARY not in file.read_text()
    assert not (tmp_path / "dev-api-n2.json").exists()

    file.write_text("\n".join(lines) + '\n{"record": {"task_')  # a kill in the middle of a line
    model_server.bodies.clear()
    model_server.says = lambda n, body: (200, "No.")
    found = script(model_server, tmp_path, "tasks=3", "n=2", one, "prices=1,4")
    assert len(model_server.bodies) == 1 + 3 * 2  # the check and three episodes of two turns
    assert (found["tasks"], found["n"], found["quarantined"]) == (3, 2, 1)
    assert found["terminations"] == pytest.approx({"gave_up": 5 / 6, "engine_error": 1 / 6})
    (lost,) = (r for r in found["records"] if r["termination"] == "engine_error")
    assert lost["success"] is False
    assert "quarantined: engine_error: refused: " in lost["error"]
    assert "flagged" in lost["error"]

    model_server.bodies.clear()
    assert script(model_server, tmp_path, "tasks=3", "n=2", one, "prices=1,4") == found
    assert model_server.bodies == []
    for other, name in (("temperature=0.5", "temperature"), ("limits.max_turns=7", "limits")):
        with pytest.raises(ConfigError, match=rf"holds episodes with {name}=.*give another out="):
            script(model_server, tmp_path, "tasks=3", "n=2", other)
    with pytest.raises(ConfigError, match="holds episodes with agent=openai/gpt-4o-mini, not openai/gpt-4o"):
        script(model_server, tmp_path, "tasks=3", "n=2", "model=openai/gpt-4o")
    assert model_server.bodies == []


def test_episodes_that_the_provider_lost_are_played_again(
    model_server: ModelServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    no_pauses(monkeypatch)
    model_server.says = lambda n, body: (200, "No.") if n < 4 else (503, "down")
    assert script(model_server, tmp_path, "tasks=2", "concurrency=1")["terminations"]["engine_error"] == 0.5
    model_server.says = lambda n, body: (200, "No.")
    assert script(model_server, tmp_path, "tasks=2", "concurrency=1")["terminations"] == {"gave_up": 1.0}


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("[1]\n")
    with pytest.raises(ConfigError, match="no list of evaluated episodes"):
        EpisodeFile(tmp_path / "x.jsonl", {})
