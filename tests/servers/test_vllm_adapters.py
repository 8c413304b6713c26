"""Adapters on vLLM servers: pushed, named, pruned, verified, and used by the policy as its own judge."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.configuration import configuration
from support.fake_vllm import FakeVllm, rollouts, run
from support.policies import TINY, perturb

from callbacks.rubric.random import RandomRubric
from draco.config.compose import compose_config
from draco.core.background import BackgroundLoop
from draco.core.errors import ConfigError, TrainingStopped
from draco.core.types import Group, Judgement, Termination
from draco.judge.client import JudgeClient
from draco.judge.ping import ping
from draco.judge.replies import json_schema
from draco.module import GRPOModule
from draco.policy.policy import Policy
from draco.rollout.engines.vllm import Launch, VllmEngine, adapters
from draco.rollout.engines.vllm.adapters import AdapterStore, served_keys
from draco.rollout.engines.vllm.replicas import wait_for
from draco.run.checkpoint import checkpoints, read_state
from draco.run.train import train
from draco.study.base_rollouts import sample_groups


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
