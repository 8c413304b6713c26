"""The vLLM engine against a loopback server: routing, retries, deadlines, adapters. No vLLM is needed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aiohttp import web
from support.configuration import configuration
from support.echo import EchoEpisode
from support.fake_vllm import FakeVllm
from support.policies import TINY, perturb

from callbacks.rubric.random import RandomRubric
from draco.config.compose import compose_config
from draco.core.background import BackgroundLoop
from draco.core.errors import ConfigError, TrainingStopped
from draco.core.types import Group, Judgement, Task, Termination
from draco.env.base import Episode, Reply
from draco.judge.client import JudgeClient
from draco.judge.ping import ping
from draco.judge.replies import json_schema
from draco.module import GRPOModule
from draco.policy.policy import Policy
from draco.rollout.engines.vllm import Launch, VllmEngine, adapters
from draco.rollout.engines.vllm.adapters import AdapterStore, served_keys
from draco.rollout.engines.vllm.replicas import wait_for
from draco.rollout.engines.vllm.routing import Router
from draco.rollout.loop import Limits
from draco.rollout.rollout import Rollout, sampling_seed
from draco.run.checkpoint import checkpoints, read_state
from draco.run.train import train
from draco.study.base_rollouts import sample_groups

SCRIPT = ("<code>a</code>", "<code>b</code>", "<code>done</code>")
LIMITS = Limits(max_turns=8, max_response_tokens=200)


@pytest.fixture(scope="module")
def behind() -> Policy:
    """The weights that the fake servers hold."""
    return Policy(TINY)


@pytest.fixture
def start(behind: Policy) -> Iterator[Callable[..., FakeVllm]]:
    made: list[FakeVllm] = []

    def build(script: Sequence[str] = SCRIPT, **options: str) -> FakeVllm:
        made.append(FakeVllm(behind, script, **options))
        return made[-1]

    yield build
    for server in made:
        server.stop()
    BackgroundLoop.shared().close()


@pytest.fixture
def opened(new_policy: Callable[[], Policy], tmp_path: Path) -> Iterator[Callable[..., tuple[VllmEngine, Policy]]]:
    made: list[VllmEngine] = []

    def build(*servers: FakeVllm, temperature: float = 1.0, **options: object) -> tuple[VllmEngine, Policy]:
        policy = new_policy()
        engine = VllmEngine(
            [s.url for s in servers], max_prompt_tokens=1000, max_response_tokens=200,
            **{"retries": 2, "cooldown_s": 60.0, **options},  # type: ignore[arg-type]
        )  # fmt: skip
        made.append(engine)
        engine.open(policy, tmp_path / "run", temperature=temperature)
        return engine, policy

    yield build
    for engine in made:
        engine.close()


def rollouts(
    policy: Policy,
    groups: int = 1,
    size: int = 1,
    limits: Limits = LIMITS,
    episode: Callable[[Task], Episode] = EchoEpisode,
) -> list[Rollout]:
    tasks = [Task(f"train_{i}", f"say {i}", "train", f"s{i}") for i in range(groups)]
    return [
        Rollout(
            episode(task), policy.chat, limits, task=task, sample=sample, group_index=index,
            seed=sampling_seed(0, "t", 0, task.id, sample), policy_version=0,
        )
        for index, task in enumerate(tasks)
        for sample in range(size)
    ]  # fmt: skip


def run(engine: VllmEngine, policy: Policy, rows: list[Rollout], temperature: float = 1.0) -> list[Rollout]:
    ended = list(engine.run(policy, rows, temperature=temperature))
    assert {id(r) for r in ended} == {id(r) for r in rows}
    return ended


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


# --- adapters ---------------------------------------------------------------------------------------------------------


def test_every_version_has_a_name_of_its_own_and_two_are_kept(
    start: Callable[..., FakeVllm], opened: Callable[..., object], tmp_path: Path
) -> None:
    server = start()
    engine, policy = opened(server)  # type: ignore[misc]
    for version in (1, 2, 3):
        policy.version = version
        perturb(policy, 0.05, version)
        run(engine, policy, rollouts(policy))
        assert server.requests[-1]["model"].startswith(f"draco-v{version:06d}-")
    assert len(set(server.loads)) == len(server.loads) == 4
    assert sorted(server.adapters) == sorted(server.loads[-2:])
    assert server.unloads == server.loads[:2]
    assert sorted(f.name for f in (tmp_path / "run/adapters").iterdir()) == sorted(server.loads[-2:])
    run(engine, policy, rollouts(policy))  # nothing new: nothing loaded
    assert len(server.loads) == 4
    perturb(policy, 0.05, 9)  # the same version with other weights, as after a resume
    run(engine, policy, rollouts(policy))
    assert server.loads[-1].startswith("draco-v000003-")
    assert server.loads[-1] != server.loads[-2]


def test_an_adapter_appears_complete_or_not_at_all(
    new_policy: Callable[[], Policy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, store = new_policy(), AdapterStore(tmp_path)
    saved = adapters.save_file

    def watched(*args: object, **options: object) -> None:
        assert not list(tmp_path.glob("draco-v*"))
        saved(*args, **options)  # type: ignore[arg-type]
        assert not list(tmp_path.glob("draco-v*"))

    monkeypatch.setattr(adapters, "save_file", watched)
    adapter = store.publish(policy)
    assert [f.name for f in tmp_path.iterdir()] == [adapter.name]
    assert {f.name for f in adapter.folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert adapter.trained
    again = Policy(TINY)
    again.load_adapter(adapter.folder)  # in PEFT's format
    state = policy.adapter_state()
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.adapter_state().items())
    monkeypatch.undo()
    assert not AdapterStore(tmp_path / "b").publish(Policy(TINY)).trained


def test_two_machines_may_prune_one_folder(policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"draco-v{version:06d}-0" for version in range(4)]
    for at, name in enumerate(names):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, ns=(at, at))
    glob, stat = Path.glob, Path.stat

    def listed(self: Path, pattern: str) -> Iterator[Path]:
        found = list(glob(self, pattern))
        (tmp_path / names[0]).rmdir()  # by the other one, after it was listed here
        return iter(found)

    def seen(self: Path, **options: bool) -> os.stat_result:
        found = stat(self, **options)
        if self.name == names[1]:
            self.rmdir()  # and this one after it was looked at
        return found

    monkeypatch.setattr(Path, "glob", listed)
    monkeypatch.setattr(Path, "stat", seen)
    current = AdapterStore(tmp_path).publish(policy)
    assert sorted(f.name for f in tmp_path.iterdir()) == sorted([names[-1], current.name])


def test_qwen3_5_weights_get_the_names_of_the_served_class() -> None:
    one = torch.zeros(1)
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    served = "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight"
    assert list(served_keys("qwen3_5_text", {key: one})) == [served]
    assert list(served_keys("qwen3_5", {served: one})) == [served]
    assert list(served_keys("qwen2", {key: one})) == [key]


def test_a_server_that_ignores_the_adapter_is_found(
    start: Callable[..., FakeVllm], opened: Callable[..., object]
) -> None:
    server = start()
    server.ignores_adapters = True
    with pytest.raises(ConfigError, match=r"exactly as the base model.*vllm#39369"):
        opened(server)


def test_a_server_with_another_adapter_is_found(
    start: Callable[..., FakeVllm], opened: Callable[..., object], new_policy: Callable[[], Policy]
) -> None:
    other = new_policy()
    perturb(other, 0.05, 5)
    server = start()
    server.wrong = {k: t.clone() for k, t in other.adapter_state().items()}
    with pytest.raises(ConfigError, match="serves other weights than the trainer holds"):
        opened(server)


def test_logprobs_at_another_temperature_are_found(
    start: Callable[..., FakeVllm], opened: Callable[..., object]
) -> None:
    server = start()
    server.raw_logprobs = True
    with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
        opened(server, temperature=0.5)


def test_a_server_that_cannot_read_the_run_folder_is_refused_before_the_start(
    start: Callable[..., FakeVllm], opened: Callable[..., object]
) -> None:
    server = start()
    server.reads_disk = False
    with pytest.raises(ConfigError, match=r"engine\.adapter_dir_on_server"):
        opened(server)


def test_an_adapter_folder_may_have_another_path_on_the_server(
    start: Callable[..., FakeVllm], opened: Callable[..., object], tmp_path: Path
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").symlink_to(tmp_path / "here")
    server = start()
    engine, policy = opened(server, adapter_dir=str(tmp_path / "here"), adapter_dir_on_server=str(tmp_path / "there"))  # type: ignore[misc]
    run(engine, policy, rollouts(policy))


def test_a_wrong_trained_adapter_stops_the_run_before_it_updates(
    start: Callable[..., FakeVllm], new_policy: Callable[[], Policy], tmp_path: Path
) -> None:
    """With the probe's bar out of the way, the mismatch of the batch itself stops it."""
    other = new_policy()
    perturb(other, 0.05, 5)
    server = start(["<code>apis.mail.list(page=1)</code>"])
    server.wrong = {k: t.clone() for k, t in other.adapter_state().items()}
    run = tmp_path / "run"
    config = configuration(
        f"run={run}", "engine=vllm", f"engine.servers=[{server.url}]", "engine.probe_tolerance=1e9", "steps=3",
        "rubric=random",  # no judge: the batch fails before its rewards count
        "tasks_per_step=1", "group_size=2", "eval.before=false", "limits.max_turns=2", "limits.max_prompt_tokens=500",
    )  # fmt: skip
    with pytest.raises(TrainingStopped, match=r"nats a token, more than engine\.max_mismatch=0\.1; .* further update"):
        train(config)
    (saved,) = checkpoints(run)
    assert read_state(saved)["policy_version"] == 0
    assert set(server.adapters) == {f.name for f in (run / "adapters").iterdir()}  # version 0 alone


# --- before the start -------------------------------------------------------------------------------------------------


def test_what_cannot_work_is_said_before_the_first_rollout(
    start: Callable[..., FakeVllm], opened: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()
    server.max_len = 300
    with pytest.raises(ConfigError, match=r"context of 300 tokens, shorter than .* = 1200"):
        opened(server)
    locked = start(api_key="s3cret-key")
    monkeypatch.setenv("VLLM_API_KEY", "an0ther-key")
    with pytest.raises(ConfigError, match="another API key") as caught:
        opened(locked)
    assert "an0ther" not in str(caught.value)
    monkeypatch.setenv("VLLM_API_KEY", "s3cret-key")
    opened(locked)
    with pytest.raises(ConfigError, match=r"needs engine\.servers"):
        VllmEngine()
    with pytest.raises(ConfigError, match="expected URLs"):
        VllmEngine(["localhost:8000"])


def test_servers_sleep_while_the_trainer_updates(
    start: Callable[..., FakeVllm], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Awake for rollouts and for whoever judges by them; nothing is updated before they sleep."""
    server = start(["<code>apis.mail.list(page=1)</code>"])
    seen: list[tuple[str, bool]] = []
    judge, worker = RandomRubric.judge, GRPOModule._worker

    def judged(self: RandomRubric, groups: Iterable[Group]) -> Iterator[Judgement]:
        for judgement in judge(self, groups):
            seen.append(("judge", server.asleep))
            yield judgement

    def updated(self: GRPOModule) -> Any:
        seen.append(("update", server.asleep))
        return worker(self)

    monkeypatch.setattr(RandomRubric, "judge", judged)
    monkeypatch.setattr(GRPOModule, "_worker", updated)
    train(
        configuration(
            f"run={tmp_path / 'run'}", "engine=vllm", f"engine.servers=[{server.url}]", "engine.sleep=true", "steps=2",
            "rubric=random", "tasks_per_step=1", "group_size=2", "eval.before=false", "eval.tasks=1", "report=false",
            "limits.max_turns=2", "limits.max_prompt_tokens=500", "update.order=arrival",
        )
    )  # fmt: skip
    assert seen == [("judge", False), ("update", True)] * 2
    assert server.order.count("/wake_up") == 2  # it was awake at first; the last time for the evaluation


def test_a_server_that_nobody_wakes_is_not_waited_for_for_ever(
    start: Callable[..., FakeVllm], opened: Callable[..., tuple[VllmEngine, Policy]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the rank that should, the request failed; the others go on, and a request of theirs says what is wrong."""
    server = start()
    engine, _ = opened(server, sleep=True)
    server.asleep, engine._replicas.timeout_s = True, 0.3
    monkeypatch.setattr("draco.rollout.engines.vllm.replicas.local_rank", lambda: 1)
    wait_for(asyncio.wait_for(engine._replicas.wake(patient=True), 20))
    assert server.asleep


# --- the policy as judge ----------------------------------------------------------------------------------------------


def test_the_policy_judges_through_the_served_adapter(
    start: Callable[..., FakeVllm], opened: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "s3cret-key")
    servers = start(api_key="s3cret-key"), start(api_key="s3cret-key")
    engine, policy = opened(*servers)  # type: ignore[misc]
    verdict = {"title": "Says hello first", "evidence": "e", "justification": "j", "score": 1}
    for server in servers:
        server.reply = json.dumps({"verdicts": [verdict]})
    judge = JudgeClient("hosted_vllm/unset", api_base="http://127.0.0.1:9/v1", max_retries=0, timeout_s=300.0)
    for version in (1, 2):
        policy.version = version
        perturb(policy, 0.05, version)
        run(engine, policy, rollouts(policy))
        base, name, key = engine.judge_endpoint()
        assert name.startswith(f"draco-v{version:06d}-")
        served = judge.endpoint(f"hosted_vllm/{name}", api_base=base, api_key=key)
        record = BackgroundLoop.shared().submit(ping(judge, served)).result(300)
        assert (record.outcome, record.served_model.split("/")[-1]) == ("ok", name)
        assert "s3cret" not in repr(record)
    BackgroundLoop.shared().submit(judge.aclose()).result(300)
    asked = [[c["model"] for c in s.chats] for s in servers]
    assert sorted(map(len, asked)) == [1, 1]  # batches take the servers in turn
    for body in servers[0].chats + servers[1].chats:  # a small model's JSON is valid because decoding is guided
        assert body["response_format"]["json_schema"]["schema"] == json_schema("score")


def test_scripts_that_roll_out_without_training_use_the_servers(start: Callable[..., FakeVllm]) -> None:
    server = start(["<code>apis.mail.list(page=1)</code>"])
    options = ("engine=vllm", f"engine.servers=[{server.url}]", "limits.max_turns=2", "limits.max_prompt_tokens=500")
    (group,) = sample_groups(compose_config(options), tasks=1, samples=2)
    assert [t.termination for t in group.trajectories] == [Termination.TURN_LIMIT] * 2
    assert len(server.requests) == 4


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


def test_what_cannot_work_is_found_before_weights_are_loaded(
    start: Callable[..., FakeVllm], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"max_prompt_tokens": 100, "max_response_tokens": 100}
    VllmEngine(servers=[start().url], **options).check()
    monkeypatch.setattr(
        "draco.rollout.engines.vllm.engine._REACH_S", 0.3
    )  # to wait for those that nobody will answer from
    with pytest.raises(ConfigError, match=r"engine.servers: http://127.0.0.1:1 is not healthy"):
        VllmEngine(servers=["http://127.0.0.1:1"], **options).check()
    with pytest.raises(ConfigError, match=r"engine.python=.*no such interpreter; make the environment with"):
        VllmEngine(launch=Launch(), python=str(tmp_path / "python"), **options).check()
    dead = ("engine=vllm", "engine.servers=[http://127.0.0.1:1]", f"run={tmp_path / 'run'}")
    monkeypatch.setattr(GRPOModule, "configure_model", lambda self: pytest.fail("weights were loaded"))
    with pytest.raises(ConfigError, match=r"engine.servers"):
        train(configuration(*dead))
