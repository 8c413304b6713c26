"""Models behind an API as the agent: how episodes end, what faults become, against a server on this machine."""

from __future__ import annotations

from typing import Any

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
