"""The vLLM engine against loopback servers: sampling, lost servers, deadlines, routing. No vLLM is needed."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
from aiohttp import web
from support.echo import EchoEpisode
from support.fake_vllm import SCRIPT, FakeVllm, rollouts, run
from support.policies import perturb

from draco.core.background import BackgroundLoop
from draco.core.errors import TrainingStopped
from draco.core.types import Termination
from draco.env.base import Reply
from draco.rollout.engines.vllm.routing import Router
from draco.rollout.loop import Limits
from draco.rollout.rollout import Rollout

# --- what is sampled --------------------------------------------------------------------------------------------------


def test_rollouts_are_what_the_server_sampled(start: Callable[..., FakeVllm], opened: Callable[..., object]) -> None:
    server = start()
    engine, policy = opened(server)  # type: ignore[misc]
    (row,) = run(engine, policy, rollouts(policy))
    t = row.trajectory()
    assert t.termination is Termination.SUBMITTED
    assert [s.action for s in t.steps] == list(SCRIPT)
    for request, step in zip(server.requests, t.steps, strict=True):
        assert request["prompt"] == list(t.token_ids[: step.span[0]])
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([t.token_ids]), use_cache=False).logits[0]
    for i, j in enumerate(t.step_of):
        expected = float(logits[i - 1].log_softmax(-1)[t.token_ids[i]]) if j >= 0 else 0.0
        assert t.logprobs[i] == pytest.approx(expected, abs=1e-4)


def test_requests_ask_for_the_plain_distribution_and_a_seed_of_their_own(
    start: Callable[..., FakeVllm], opened: Callable[..., object]
) -> None:
    server = start()
    engine, policy = opened(server)  # type: ignore[misc]
    run(engine, policy, rollouts(policy, groups=2, size=2), 0.5)
    assert len({r["seed"] for r in server.requests}) == len(server.requests) == 12
    for r in server.requests:
        assert (r["temperature"], r["top_p"], r["top_k"], r["repetition_penalty"]) == (0.5, 1.0, 0, 1.0)
        assert r["ignore_eos"] is True
        assert r["stop_token_ids"] == sorted(policy.chat.end_ids)
    seeds = {r["seed"] for r in server.requests}
    server.requests.clear()
    run(engine, policy, rollouts(policy, groups=2, size=2), 0.5)
    assert {r["seed"] for r in server.requests} == seeds  # keyed, not drawn


def test_budgets_reach_the_server(start: Callable[..., FakeVllm], opened: Callable[..., object]) -> None:
    server = start(["<code>abcdefghij</code>"])
    engine, policy = opened(server)  # type: ignore[misc]
    (row,) = run(engine, policy, rollouts(policy, limits=Limits(max_response_tokens=6, max_turn_tokens=4)))
    t = row.trajectory()
    assert t.termination in {Termination.LENGTH_LIMIT, Termination.NO_ACTION}
    assert {r["max_tokens"] for r in server.requests} <= set(range(1, 5))
    assert max(t.step_tokens) == 4


def test_a_turn_that_a_server_cuts_short_goes_on_from_its_prefix(
    start: Callable[..., FakeVllm], opened: Callable[..., object]
) -> None:
    """A server may stop a request early; the turn ends where the rollout says."""
    server = start()
    engine, policy = opened(server)  # type: ignore[misc]
    server.fault = lambda body: body.update(max_tokens=1)
    (row,) = run(engine, policy, rollouts(policy))
    assert [s.action for s in row.steps] == list(SCRIPT)
    assert len(server.requests) == sum(row.trajectory().step_tokens)


# --- losses -----------------------------------------------------------------------------------------------------------


def test_a_lost_server_is_replaced_from_the_token_prefix(
    start: Callable[..., FakeVllm], opened: Callable[..., object]
) -> None:
    servers = start(), start()
    engine, policy = opened(*servers)  # type: ignore[misc]
    turns = threading.Event()

    def die(body: dict[str, object]) -> float | None:
        if turns.is_set():
            servers[0].kill_soon()
            return 30.0  # the request breaks off
        turns.set()
        return None

    servers[0].fault = die
    rows = run(engine, policy, rollouts(policy, groups=2, size=2))
    assert {r.termination for r in rows} == {Termination.SUBMITTED}
    assert all([s.action for s in r.steps] == list(SCRIPT) for r in rows)
    assert engine.take_metrics()["engine/retries"] > 0
    # The next batch goes on with the server that is left.
    assert {r.termination for r in run(engine, policy, rollouts(policy, groups=2))} == {Termination.SUBMITTED}


def test_no_server_left_is_an_engine_error_and_then_the_end_of_the_run(
    start: Callable[..., FakeVllm], opened: Callable[..., object]
) -> None:
    server = start()
    engine, policy = opened(server, retries=1)  # type: ignore[misc]

    def die(body: object) -> float:
        server.kill_soon()
        return 30.0

    server.fault = die
    (row,) = run(engine, policy, rollouts(policy))
    assert row.termination is Termination.ENGINE_ERROR
    assert server.url in row.error
    policy.version += 1
    perturb(policy, 0.05, 5)
    with pytest.raises(TrainingStopped, match=r"could not be served: http://127\.0\.0\.1"):
        run(engine, policy, rollouts(policy))


def test_faults_are_retried_and_refusals_are_not(start: Callable[..., FakeVllm], opened: Callable[..., object]) -> None:
    server = start()
    engine, policy = opened(server)  # type: ignore[misc]
    replies = [web.Response(status=503), web.Response(status=500), None]
    server.fault = lambda body: replies.pop(0) if replies else None
    (row,) = run(engine, policy, rollouts(policy))
    assert row.termination is Termination.SUBMITTED
    assert engine.take_metrics()["engine/retries"] == 2
    server.requests.clear()
    server.fault = lambda body: web.Response(status=400, text="bad prompt")
    (row,) = run(engine, policy, rollouts(policy))
    assert row.termination is Termination.ENGINE_ERROR
    assert "answered 400: bad prompt" in row.error
    assert len(server.requests) == 1


def test_a_restarted_server_gets_the_adapter_again(
    start: Callable[..., FakeVllm], opened: Callable[..., object]
) -> None:
    server = start()
    engine, policy = opened(server)  # type: ignore[misc]
    server.forget()
    (row,) = run(engine, policy, rollouts(policy))
    assert row.termination is Termination.SUBMITTED
    assert len(server.loads) == 2


def test_a_server_restarted_between_batches_gets_the_adapter_with_the_others(
    start: Callable[..., FakeVllm], opened: Callable[..., object]
) -> None:
    servers = start(), start()
    engine, policy = opened(*servers)  # type: ignore[misc]
    servers[0].forget()
    engine._replicas.each[1].adapters.clear()  # one that was lost before: all are asked again
    rows = run(engine, policy, rollouts(policy, groups=2))
    assert {r.termination for r in rows} == {Termination.SUBMITTED}
    assert [len(s.loads) for s in servers] == [2, 2]


@pytest.mark.parametrize("value", [None, math.nan])
def test_a_logprob_that_is_no_number_is_an_engine_error(
    value: float | None, start: Callable[..., FakeVllm], opened: Callable[..., object]
) -> None:
    server = start()
    engine, policy = opened(server)  # type: ignore[misc]
    content = {"choices": [{"token_ids": [5], "logprobs": {"token_logprobs": [value]}, "finish_reason": "stop"}]}
    server.fault = lambda body: web.json_response(content)
    (row,) = run(engine, policy, rollouts(policy))
    assert row.termination is Termination.ENGINE_ERROR
    assert "not a number" in row.error


# --- deadlines --------------------------------------------------------------------------------------------------------


def test_a_straggler_ends_by_deadline_and_holds_nobody_up(
    start: Callable[..., FakeVllm], opened: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both kinds: an environment that hangs, and a server that does."""
    deadlines: list[tuple[asyncio.AbstractEventLoop, asyncio.Timeout]] = []
    release, timeout = threading.Event(), asyncio.timeout

    def watched(delay: float | None) -> asyncio.Timeout:
        clock = timeout(delay)
        if delay is not None and delay > 1000:  # limits.deadline_s, no other is as long
            deadlines.append((asyncio.get_running_loop(), clock))
        return clock

    class Stuck(EchoEpisode):
        """Hangs in its first step until it is let go; its deadline comes in the middle of that."""

        def step(self, actions: Sequence[str]) -> Reply:
            ((loop, clock),) = deadlines
            loop.call_soon_threadsafe(clock.reschedule, loop.time())
            release.wait(60)
            return super().step(actions)

    monkeypatch.setattr(asyncio, "timeout", watched)
    server = start()
    engine, policy = opened(server)  # type: ignore[misc]
    rows = [
        *rollouts(policy, limits=Limits(deadline_s=5000.0), episode=Stuck),
        *rollouts(policy),  # no deadline, no hang
    ]
    run(engine, policy, rows)
    assert [r.termination for r in rows] == [Termination.DEADLINE, Termination.SUBMITTED]
    assert rows[0].trajectory().steps == ()
    assert rows[0].episode.closed == 0  # type: ignore[attr-defined]
    release.set()
    until = time.monotonic() + 60
    while not rows[0].episode.closed and time.monotonic() < until:  # type: ignore[attr-defined]
        time.sleep(0.01)
    assert rows[0].episode.closed == 1  # type: ignore[attr-defined]
    server.fault = lambda body: 30.0
    (row,) = run(engine, policy, rollouts(policy, limits=Limits(deadline_s=0.5)))
    assert row.termination is Termination.DEADLINE
    assert row.episode.closed == 1  # type: ignore[attr-defined]


class OnLoop(EchoEpisode):
    """Closes by way of the background loop, as AppWorld's episodes do."""

    def close(self) -> None:
        async def release() -> None:
            self.closed += 1

        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            return  # it would wait for itself for ever; here it stays open instead
        BackgroundLoop.shared().submit(release()).result()


class StuckOnLoop(OnLoop):
    """Hangs in its first step until it is let go."""

    release = threading.Event()

    def step(self, actions: Sequence[str]) -> Reply:
        self.release.wait(60)
        return super().step(actions)


def let_go(stuck: Rollout) -> None:
    """Its thread comes out of the environment, and the episode must be closed, once."""
    StuckOnLoop.release.set()
    until = time.monotonic() + 60
    while not stuck.episode.closed and time.monotonic() < until:  # type: ignore[attr-defined]
        time.sleep(0.01)
    assert stuck.episode.closed == 1  # type: ignore[attr-defined]


def test_an_episode_that_closes_by_way_of_the_loop_does_not_stop_it(
    start: Callable[..., FakeVllm], opened: Callable[..., object]
) -> None:
    """After a refusal, and after a deadline that passes in a request or in the environment."""
    StuckOnLoop.release.clear()
    server = start()
    engine, policy = opened(server)  # type: ignore[misc]
    server.fault = lambda body: web.Response(status=400, text="bad prompt")
    (refused,) = run(engine, policy, rollouts(policy, episode=OnLoop))
    server.fault = lambda body: 30.0
    (late,) = run(engine, policy, rollouts(policy, limits=Limits(deadline_s=0.5), episode=OnLoop))
    server.fault = lambda body: None
    (stuck,) = run(engine, policy, rollouts(policy, limits=Limits(deadline_s=2.0), episode=StuckOnLoop))
    kinds = [Termination.ENGINE_ERROR, Termination.DEADLINE, Termination.DEADLINE]
    assert [row.termination for row in (refused, late, stuck)] == kinds
    assert [row.episode.closed for row in (refused, late)] == [1, 1]  # type: ignore[attr-defined]
    let_go(stuck)


def test_an_episode_that_was_left_behind_is_closed_though_the_loop_is_gone(
    start: Callable[..., FakeVllm], opened: Callable[..., object]
) -> None:
    """A run that ends early closes the loop while a thread is still inside an environment."""
    StuckOnLoop.release.clear()
    engine, policy = opened(start())  # type: ignore[misc]
    (stuck,) = run(engine, policy, rollouts(policy, limits=Limits(deadline_s=2.0), episode=StuckOnLoop))
    assert stuck.termination is Termination.DEADLINE
    BackgroundLoop.shared().close()
    engine.close()
    let_go(stuck)


def test_waiting_for_a_place_takes_nothing_of_the_deadline(
    start: Callable[..., FakeVllm], opened: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    late = [0.0]
    monkeypatch.setattr("draco.rollout.loop.time", SimpleNamespace(monotonic=lambda: time.monotonic() + late[0]))

    class Slow(EchoEpisode):
        def step(self, actions: Sequence[str]) -> Reply:
            late[0] += 1000.0
            return super().step(actions)

    engine, policy = opened(start(), concurrency=1)  # type: ignore[misc]
    rows = [*rollouts(policy, episode=Slow), *rollouts(policy, size=2, limits=Limits(deadline_s=500.0))]
    assert run(engine, policy, rows) == rows  # one after the other
    assert [r.termination for r in rows] == [Termination.SUBMITTED] * 3
    seconds = [r.trajectory().timings["total_s"] for r in rows]
    assert seconds[0] >= 1000.0
    assert max(seconds[1:]) < 500.0


def test_an_interrupted_batch_closes_its_episodes(
    start: Callable[..., FakeVllm], opened: Callable[..., object]
) -> None:
    server = start()
    engine, policy = opened(server)  # type: ignore[misc]
    server.fault = lambda body: 30.0 if "say 1" in policy.chat.decode(body["prompt"]) else None
    rows = rollouts(policy, groups=2)
    stream = engine.run(policy, rows, temperature=1.0)
    assert next(stream) is rows[0]
    stream.close()  # type: ignore[attr-defined]
    assert [r.episode.closed for r in rows] == [1, 1]  # type: ignore[attr-defined]


# --- routing ----------------------------------------------------------------------------------------------------------


def test_groups_stay_together_and_servers_are_filled_evenly() -> None:
    router = Router(3, cooldown_s=10)
    homes = {g: {router.enter(g) for _ in range(4)} for g in "abcdef"}
    assert all(len(found) == 1 for found in homes.values())
    assert router.loads == [8, 8, 8]


def test_a_lost_server_gives_its_groups_away_and_comes_back() -> None:
    now = [0.0]
    router = Router(2, cooldown_s=10, clock=lambda: now[0])
    assert [router.enter("a"), router.enter("b")] == [0, 1]
    router.lost(0)
    assert router.enter("a") == 1
    router.lost(1)
    assert router.enter("c") == 0  # all are down: the one that rests the shortest
    now[0] = 11
    assert router.up(0)
    assert router.enter("a", avoid=[1]) == 0


def test_a_group_is_asked_of_one_server_alone(start: Callable[..., FakeVllm], opened: Callable[..., object]) -> None:
    servers = start(), start()
    engine, policy = opened(*servers)  # type: ignore[misc]
    run(engine, policy, rollouts(policy, groups=4, size=3))
    counts = []
    for server in servers:
        asked = {policy.chat.decode(r["prompt"]).split("say ")[1][0] for r in server.requests}
        counts.append(len(asked))
    assert counts == [2, 2]  # no group on both
