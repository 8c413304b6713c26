"""Models behind an API as the agent: how episodes end, what faults become, against a server on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import evaluate
import pytest
from conftest import EchoEnvironment
from test_judge_loopback import CANARY, Server, server  # noqa: F401 - a fixture

from draco.agent import Limits
from draco.errors import ConfigError
from draco.evaluation.api_agent import ApiAgent
from draco.types import Termination, Trajectory


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", CANARY)


def agent(server: Server, **more: Any) -> ApiAgent:  # noqa: F811
    base = f"http://127.0.0.1:{server.server_address[1]}/v1"
    limits = Limits(max_turns=more.pop("max_turns", 4), max_response_tokens=more.pop("tokens", 10_000))
    return ApiAgent("openai/gpt-4o-mini", limits, api_base=base, backoff_s=0.001, **more)


def play(server: Server, **more: Any) -> Trajectory:  # noqa: F811
    """One episode of the echoing environment, its tasks not over at completion."""
    played, environment = agent(server, **more), EchoEnvironment(closes=False)
    (group,) = played.play(environment, environment.tasks("train")[:1], 1)
    played.close()
    assert environment.opened[0].closed == 1
    return group.trajectories[0]


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
    server: Server,  # noqa: F811
    turns: list[str],
    more: dict[str, Any],
    termination: Termination,
) -> None:
    server.answer = lambda n, body: (200, turns[sum(m["role"] == "assistant" for m in body["messages"])])
    trajectory = play(server, **more)
    assert trajectory.termination == termination
    assert all("what was not asked for" not in m.content for m in trajectory.messages)


def test_a_fault_that_passes_is_tried_again_and_one_that_stays_is_told_apart(server: Server) -> None:  # noqa: F811
    server.answer = lambda n, body: (503, "busy") if n < 3 else (200, "<code>done</code>" if n == 3 else "Over.")
    assert play(server).termination == Termination.SUBMITTED
    server.answer = lambda n, body: (503, "busy")
    lost = play(server, max_retries=1)
    assert (lost.termination, CANARY in lost.error) == (Termination.ENGINE_ERROR, False)
    server.answer = lambda n, body: (401, f"no such key {CANARY}")
    with pytest.raises(ConfigError, match=r"status 401.*check model=, its key") as caught:
        play(server)
    assert CANARY not in str(caught.value)


def test_a_model_that_does_not_answer_is_one_line_before_any_episode(server: Server) -> None:  # noqa: F811
    server.answer = lambda n, body: (503, "busy")
    with pytest.raises(ConfigError, match=r"status 503.*does not answer; check model= and api_base=") as caught:
        agent(server, max_retries=1).check()
    assert "\n" not in str(caught.value)
    assert len(server.bodies) == 2


def test_one_agent_plays_several_splits(server: Server) -> None:  # noqa: F811
    """Connections that were closed after the first split made every later episode a fault."""
    server.answer = lambda n, body: (200, "<code>done</code>")
    played, environment = agent(server), EchoEnvironment()
    for _ in range(2):
        played.check()
        for split in ("train", "test"):
            groups = played.play(environment, environment.tasks(split), 2)
            assert [t.termination for g in groups for t in g.trajectories] == [Termination.SUBMITTED] * 4
        played.close()
    task = environment.tasks("test")[0]
    usage = played.usage_of(groups[0].trajectories[0])
    assert (task.id, usage.input_tokens, usage.cached_tokens, usage.output_tokens) == ("test_0", 100, 0, 7)
    assert usage.cost_usd is not None


def script(server: Server, out: Path, *more: str) -> dict[str, Any]:  # noqa: F811
    """Result of scripts/evaluate.py on the embedded environment."""
    base = f"api_base=http://127.0.0.1:{server.server_address[1]}/v1"
    fixed = ["policy=litellm", "model=openai/gpt-4o-mini", "env=desk", "split=dev", f"out={out}", base]
    evaluate.main([*fixed, *more])
    n = next((m.removeprefix("n=") for m in more if m.startswith("n=")), "1")
    found: dict[str, Any] = json.loads((out / f"dev-api-n{n}.json").read_text())
    return found


def test_a_frontier_model_has_the_budgets_of_a_policy_and_not_those_of_the_toy(
    server: Server,  # noqa: F811
    tmp_path: Path,
) -> None:
    """An observation of 3,000 tokens, as AppWorld cuts them, ended every episode as length_limit."""
    turns = ["<code>print(1)</code>", "I give up.", "I give up."]
    server.answer = lambda n, body: (200, turns[min(len(body["messages"]) // 2 - 1, 2)] if n > 1 else "ready")
    server.prompt_tokens = lambda body: 100 if len(body["messages"]) < 3 else 3200
    found = script(server, tmp_path / "a", "tasks=2")
    assert found["terminations"] == {"gave_up": 1.0}
    assert found["limits"] == {
        "max_turns": 50, "max_prompt_tokens": 4096, "max_response_tokens": 24576, "max_turn_tokens": 0, "deadline_s": 0,
    }  # fmt: skip
    found = script(server, tmp_path / "b", "tasks=2", "limits.max_response_tokens=320")
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
