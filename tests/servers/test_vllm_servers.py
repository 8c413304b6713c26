"""Against real vLLM servers on the CPU (`make test-vllm`): two of them, started once, that every test here uses."""

from __future__ import annotations

import csv
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.configuration import configuration
from support.policies import perturb, tiny_policy
from support.sampling import recomputed
from support.vllm import PYTHON, rollouts

from draco.core.background import BackgroundLoop
from draco.core.errors import ConfigError, TrainingStopped
from draco.core.types import Termination
from draco.policy.policy import Policy
from draco.rollout.engines.transformers import TransformersEngine
from draco.rollout.engines.vllm import Launch, VllmEngine
from draco.rollout.engines.vllm.adapters import Adapter, AdapterStore
from draco.run.archive import read_table
from draco.run.train import train

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.is_file(), reason="no .venv-vllm: make test-vllm sets it up"),
]


@pytest.fixture(scope="module")
def served() -> Policy:
    return tiny_policy()


@pytest.fixture(scope="module")
def engine(served: Policy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    built = VllmEngine(
        launch=Launch(count=2, dtype="float32"), python=str(PYTHON), max_prompt_tokens=512, max_response_tokens=512
    )
    try:
        built.open(served, tmp_path_factory.mktemp("servers"), temperature=1.0)
        yield built
    finally:
        built.close()
        BackgroundLoop.shared().close()


def test_logprobs_are_the_trainers_with_a_trained_adapter(engine: VllmEngine, served: Policy) -> None:
    perturb(served, 0.02)
    rows = rollouts(served, 4)
    ended = list(engine.run(served, rows, temperature=1.0))
    assert {id(r) for r in ended} == {id(r) for r in rows}
    gaps = []
    for row in rows:
        t = row.trajectory()
        assert not t.termination.quarantined, t.error
        expected = recomputed(served, t)
        gaps += [abs(t.logprobs[i] - float(expected[i - 1])) for i, j in enumerate(t.step_of) if j >= 0]
    assert sum(gaps) / len(gaps) <= 1e-4
    assert max(gaps) <= 1e-3


def test_a_new_adapter_changes_greedy_outputs_into_those_of_the_trainer(engine: VllmEngine, served: Policy) -> None:
    seen = []
    for seed in (1, 2):
        perturb(served, 0.3, seed)
        here, there = rollouts(served, 2), rollouts(served, 2)
        list(engine.run(served, here, temperature=0.0))
        list(TransformersEngine().run(served, there, temperature=0.0))
        ids = [r.token_ids for r in here]
        assert ids == [r.token_ids for r in there]
        seen.append(ids)
    assert seen[0] != seen[1]


def test_a_wrong_adapter_is_found_by_the_probe(
    engine: VllmEngine, served: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder holds another trained adapter than the trainer."""
    perturb(served, 0.05, 3)
    publish = AdapterStore.publish

    def wrong(self: AdapterStore, policy: Policy) -> Adapter:
        perturb(policy, 0.05, 4)
        adapter = publish(self, policy)
        perturb(policy, 0.05, 3)
        return adapter

    monkeypatch.setattr(AdapterStore, "publish", wrong)
    with pytest.raises(TrainingStopped, match="serves other weights than the trainer holds"):
        list(engine.run(served, rollouts(served, 1), temperature=1.0))


def test_temperature_is_in_the_logprobs(engine: VllmEngine, served: Policy) -> None:
    perturb(served, 0.02, 5)
    (row,) = rollouts(served, 1)
    list(engine.run(served, [row], temperature=0.6))
    t = row.trajectory()
    expected = recomputed(served, t, 0.6)
    assert all(abs(t.logprobs[i] - float(expected[i - 1])) < 1e-3 for i, j in enumerate(t.step_of) if j >= 0)


@pytest.mark.parametrize("staleness", [0, 1])
def test_desk_training_swaps_the_adapter_every_step(staleness: int, engine: VllmEngine, tmp_path: Path) -> None:
    run, urls = tmp_path / "run", ",".join(replica.url for replica in engine._replicas.each)
    train(
        configuration(
            f"run={run}", "engine=vllm", f"engine.servers=[{urls}]", "steps=3",
            "tasks_per_step=2", "group_size=3", "eval.before=false", "eval.tasks=2",
            "limits.max_prompt_tokens=512", "limits.max_response_tokens=256",
            *(["engine.staleness=1", "loss.tis_cap=2.0", "lr=1e-3"] if staleness else []),
        )
    )  # fmt: skip
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2", "3"]
    same = rows[:1] if staleness else rows
    assert all(0 < float(row["engine/mismatch_abs"]) <= 1e-4 for row in same)
    assert all(row["engine/mismatch_abs"] == "" and float(row["engine/stale_abs"]) > 1e-4 for row in rows[len(same) :])
    sampled = [set(read_table(run, "trajectories", [step])["policy_version"].to_pylist()) for step in range(3)]
    assert sampled == ([{0}, {0}, {1}] if staleness else [{0}, {1}, {2}])
    assert [folder.name[:14] for folder in sorted((run / "adapters").iterdir())] == ["draco-v000002-", "draco-v000003-"]


def test_no_server_is_a_configuration_error_before_the_start(served: Policy, tmp_path: Path) -> None:
    launch = Launch(dtype="float32", extra=["--no-such-flag"])
    broken = VllmEngine(launch=launch, python=str(PYTHON), max_prompt_tokens=64, max_response_tokens=64)
    with pytest.raises(ConfigError, match="no-such-flag"):
        broken.open(served, tmp_path, temperature=1.0)


def test_a_server_killed_in_the_middle_of_a_step_costs_nothing(engine: VllmEngine, served: Policy) -> None:
    """The last test: server 1 stays dead."""
    assert engine._launched is not None
    watchdog = engine._launched._processes[1].pid
    (server,) = map(int, Path(f"/proc/{watchdog}/task/{watchdog}/children").read_text().split())
    rows = rollouts(served, 4, samples=3, purpose="kill")
    turns = threading.Event()

    def kill() -> None:
        turns.wait(300)
        os.kill(server, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    for row in rows:
        step: Callable[..., object] = row.episode.step

        def watched(actions: object, step: Callable[..., object] = step) -> object:
            turns.set()
            return step(actions)

        row.episode.step = watched  # type: ignore[assignment, method-assign]
    ended = list(engine.run(served, rows, temperature=1.0))
    assert len(ended) == len(rows)
    assert Termination.ENGINE_ERROR not in {r.termination for r in rows}, [r.error for r in rows]
    assert engine.take_metrics()["engine/retries"] > 0
    until = time.monotonic() + 60
    while engine._launched._processes[1].poll() is None:  # the watchdog cleans up after its server
        assert time.monotonic() < until
        time.sleep(0.2)
    perturb(served, 0.02, 6)
    again = rollouts(served, 1)
    list(engine.run(served, again, temperature=1.0))  # the next step goes on with the other server
    assert not again[0].termination.quarantined  # type: ignore[union-attr]
    assert engine.take_metrics()["engine/servers_lost"] == 1
