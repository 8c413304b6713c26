"""`engine.staleness=1`: the next batch rolls out by the weights of now while this one is judged and trained."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from support.configuration import configuration
from support.echo import EchoEnvironment, TypedEngine
from support.fake_vllm import FakeVllm
from support.module import Rewards, make_module, make_trainer, script
from support.policies import TINY

from callbacks.credit.uniform import UniformCredit
from callbacks.rollout import AgentRollout
from callbacks.rubric.random import RandomRubric
from draco.core.background import BackgroundLoop
from draco.core.errors import ConfigError, EngineError, TrainingStopped
from draco.core.signals import Interrupted
from draco.core.types import Credit, Group, Judgement, Task
from draco.env.base import Reply
from draco.env.desk.environment import DeskEnvironment, DeskEpisode
from draco.module import GRPOModule
from draco.policy.policy import Policy
from draco.rollout.engines.vllm import VllmEngine
from draco.rollout.loop import Limits
from draco.rollout.rollout import Rollout
from draco.run.archive import read_table, step_folders
from draco.run.checkpoint import checkpoints
from draco.run.loader import TaskLoader
from draco.run.loggers import read_metrics
from draco.run.train import train
from draco.update.options import LossOptions

LOOK = "<code>apis.mail.list(page=1)</code>"


# --- order of calls ---------------------------------------------------------------------------------------------------


class Ahead(TypedEngine):
    """Types in `begin` what `run` would type later; says what was asked of it."""

    staleness = 1

    def __init__(self, journal: list[str], fault: int | None = None) -> None:
        super().__init__(script)
        self.journal, self.fault = journal, fault

    def run(self, policy: Any, rollouts: Sequence[Rollout], *, temperature: float) -> Iterator[Rollout]:
        self.journal.append(f"run {len(rollouts)} by {policy.version}")
        yield from super().run(policy, rollouts, temperature=temperature)

    def begin(self, policy: Any, rollouts: Sequence[Rollout], *, temperature: float) -> Iterator[Rollout]:
        self.journal.append(f"begin {len(rollouts)} by {policy.version}")
        return self._hand_over(list(super().run(policy, rollouts, temperature=temperature)), policy.version)

    def _hand_over(self, ended: list[Rollout], version: int) -> Iterator[Rollout]:
        for rollout in ended:
            if version == self.fault:
                raise EngineError("no server is left")
            self.journal.append(f"ended {rollout.group_index}/{rollout.sample} of {rollout.policy_version}")
            yield rollout


class Updates(Callback):
    def __init__(self, journal: list[str]) -> None:
        self.journal = journal

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.journal.append(f"trained {batch.step}: now {pl_module.policy.version}")


def fit(policy: Callable[[], Policy], journal: list[str], steps: int, fault: int | None = None, **options: Any) -> None:
    environment = EchoEnvironment()
    stages = [
        AgentRollout(environment, Ahead(journal, fault), Limits()),
        Rewards(lambda g: [float(t.sample) for t in g.trajectories], journal),
        UniformCredit(),
        Updates(journal),
    ]
    module = make_module(policy, stages, loss=LossOptions(tis_cap=2.0))
    loader = TaskLoader(environment.tasks("train"), steps=steps, tasks_per_step=1, group_size=2, seed=0)
    make_trainer(stages, **options).fit(module, train_dataloaders=loader)


def test_the_next_batch_begins_before_this_one_is_judged_and_the_last_begins_none(
    new_policy: Callable[[], Policy],
) -> None:
    journal: list[str] = []
    fit(new_policy, journal, steps=3)
    assert journal == [
        "run 2 by 0", "begin 2 by 0", "judge 0", "trained 0: now 1",
        "ended 0/0 of 0", "ended 0/1 of 0", "begin 2 by 1", "judge 0", "trained 1: now 2",
        "ended 0/0 of 1", "ended 0/1 of 1", "begin 0 by 2", "judge 0", "trained 2: now 3",
    ]  # fmt: skip


def test_the_last_batch_is_the_one_that_the_trainer_says(new_policy: Callable[[], Policy]) -> None:
    journal: list[str] = []
    fit(new_policy, journal, steps=3, limit_train_batches=2)
    assert [entry for entry in journal if "begin" in entry] == ["begin 2 by 0", "begin 0 by 1"]


def test_a_fault_on_the_way_is_raised_by_the_step_that_uses_the_batch(new_policy: Callable[[], Policy]) -> None:
    journal: list[str] = []
    with pytest.raises(EngineError, match="no server is left"):
        fit(new_policy, journal, steps=3, fault=1)
    assert journal[-1] == "trained 1: now 2"  # the batch that those weights sampled is the third


# --- by servers -------------------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[FakeVllm]:
    built = FakeVllm(Policy(TINY), [LOOK, "<code>apis.notes.list(page=1)</code>"])
    yield built
    built.stop()
    BackgroundLoop.shared().close()


def options(server: FakeVllm, run: Path, *more: str) -> list[str]:
    return [
        f"run={run}", "engine=vllm", f"engine.servers=[{server.url}]", "engine.staleness=1", "loss.tis_cap=2.0",
        "rubric=random", "credit=uniform", "tasks_per_step=2", "group_size=2", "lr=0.02", "eval.before=false",
        "eval.tasks=1", "report=false", "limits.max_turns=2", "limits.max_prompt_tokens=500", *more,
    ]  # fmt: skip


def versions(run: Path) -> list[set[int]]:
    steps = range(len(step_folders(run)))
    return [set(read_table(run, "trajectories", [step]).column("policy_version").to_pylist()) for step in steps]


def asked(server: FakeVllm) -> list[str]:
    """Versions that requests named, in order, each run of them once."""
    names = [str(request["model"])[:14] for request in server.requests]
    return [name for name, before in zip(names, [None, *names], strict=False) if name != before]


def test_batches_are_sampled_one_update_behind_and_corrected_for_it(
    server: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bar on the mismatch holds where versions are equal, and an evaluation between has the weights of now."""

    def vary(body: dict[str, Any]) -> float | None:  # rollouts of a group differ, or there would be nothing to learn
        server.script = (LOOK, LOOK) if body["seed"] % 2 else ("<code>apis.notes.list(page=2)</code>", LOOK)
        return 1.0 if 12 < len(server.requests) <= 16 else None  # the second batch: an evaluation could overtake it

    evaluating, batch, start = threading.Event(), VllmEngine._batch, GRPOModule.on_validation_epoch_start
    journal: list[str] = []
    step = DeskEpisode.step

    async def watched(self: VllmEngine, *arguments: Any) -> None:
        journal.append("begin")
        await batch(self, *arguments)
        journal.append("end")

    def stepped(self: DeskEpisode, actions: Sequence[str]) -> Reply:
        if len(server.requests) > 8:
            assert evaluating.wait(30)
        return step(self, actions)

    def started(self: GRPOModule) -> None:
        start(self)
        evaluating.set()

    monkeypatch.setattr(VllmEngine, "_batch", watched)
    monkeypatch.setattr(DeskEpisode, "step", stepped)
    monkeypatch.setattr(GRPOModule, "on_validation_epoch_start", started)
    monkeypatch.setattr("callbacks.rubric.random.toss", lambda seed, step, task, sample: (-1.0) ** sample)
    server.fault = vary
    run = tmp_path / "run"
    train(configuration(*options(server, run, "steps=3", "eval.every=1", "engine.max_mismatch=1e-4")))
    assert versions(run) == [{0}, {0}, {1}]
    # Two batches; an evaluation, which begins while the second is under way and waits for it; the third batch; …
    assert journal == ["begin", "end"] * 7
    assert asked(server) == ["draco-v000000-", "draco-v000001-", "draco-v000002-", "draco-v000003-"]
    assert server.unloads == sorted(server.loads)[:-2]
    _, (first, *later) = read_metrics(run / "metrics.csv")
    assert 0 < float(first["engine/mismatch_abs"]) < 1e-4
    assert first["engine/stale_abs"] == ""
    for row in later:
        assert row["engine/mismatch_abs"] == row["engine/mismatch_k3"] == row["engine/mismatch_ratio_max"] == ""
        assert float(row["engine/stale_abs"]) > 1e-4
        assert float(row["engine/stale_ratio_max"]) > 1
        assert float(row["rollout/tokens_per_s"]) > 0
        assert "engine/tis_capped_share" in row


def while_judged(monkeypatch: pytest.MonkeyPatch, during: Callable[[int], None]) -> None:
    """Call `during(step)` while a batch is judged."""
    judge = RandomRubric.judge

    def judged(rubric: RandomRubric, groups: Iterable[Group]) -> Iterator[Judgement]:
        groups = list(groups)
        during(groups[0].step)
        yield from judge(rubric, groups)

    monkeypatch.setattr(RandomRubric, "judge", judged)


def test_a_batch_rolls_out_while_the_one_before_is_judged_and_updated(
    server: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is judged until an episode of the second is under way, which hangs until the first is trained."""
    under_way, trained = threading.Event(), threading.Event()
    step, update = DeskEpisode.step, GRPOModule.update

    def stepped(self: DeskEpisode, actions: Sequence[str]) -> Reply:
        if len(server.requests) > 8:  # 2 tasks · 2 rollouts · 2 turns: the first batch is done
            under_way.set()
            assert trained.wait(30)
        return step(self, actions)

    def during(number: int) -> None:
        assert under_way.wait(30)

    def updated(self: GRPOModule, credited: Iterable[Credit]) -> None:
        update(self, credited)
        trained.set()

    monkeypatch.setattr(DeskEpisode, "step", stepped)
    monkeypatch.setattr(GRPOModule, "update", updated)
    while_judged(monkeypatch, during)
    train(configuration(*options(server, tmp_path / "run", "steps=2")))
    _, rows = read_metrics(tmp_path / "run/metrics.csv")
    assert [row["rollout/quarantined"] for row in rows] == ["0.0", "0.0"]


def test_a_failed_batch_ahead_stops_the_step_that_uses_it(
    server: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, batch, calls = tmp_path / "run", VllmEngine._batch, [0]

    async def broken(self: VllmEngine, *arguments: Any) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise EngineError("a wire was cut")
        await batch(self, *arguments)

    monkeypatch.setattr(VllmEngine, "_batch", broken)
    with pytest.raises(EngineError, match="a wire was cut"):
        train(configuration(*options(server, run, "steps=3", "eval.every=1")))  # an evaluation does not hide it
    assert checkpoints(run)[-1].name == "step=000001"
    assert [folder.name for folder in step_folders(run)] == ["step=000000"]


def test_refused_requests_of_a_batch_ahead_quarantine_its_rollouts(server: FakeVllm, tmp_path: Path) -> None:
    server.fault = lambda body: web.Response(status=400, text="no") if len(server.requests) > 8 else None
    run = tmp_path / "run"
    train(configuration(*options(server, run, "steps=2")))
    _, rows = read_metrics(run / "metrics.csv")
    assert [row["rollout/quarantined"] for row in rows] == ["0.0", "4.0"]


@pytest.mark.parametrize("how", ["guard", "signal"])
def test_a_run_that_ends_early_leaves_nothing_on_its_way(
    how: str, server: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every episode is closed once, no task and no worker thread goes on."""
    opened: list[DeskEpisode] = []
    closed: list[DeskEpisode] = []
    arrived = threading.Event()
    batches: list[str] = []
    open_, close, batch = DeskEnvironment.open, DeskEpisode.close, VllmEngine._batch

    def made(self: DeskEnvironment, task: Task, *, seed: int) -> DeskEpisode:
        opened.append(open_(self, task, seed=seed))
        return opened[-1]

    def ended(self: DeskEpisode) -> None:
        closed.append(self)
        close(self)

    def fault(body: dict[str, Any]) -> float | None:
        if len(server.requests) > 8:
            arrived.set()
            return 60.0
        return None

    async def watched(self: VllmEngine, *arguments: Any) -> None:
        try:
            await batch(self, *arguments)
            batches.append("ended")
        except asyncio.CancelledError:
            batches.append("cancelled")
            raise

    def during(step: int) -> None:
        assert arrived.wait(30)
        if how == "guard":
            raise TrainingStopped("enough")
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(DeskEnvironment, "open", made)
    monkeypatch.setattr(DeskEpisode, "close", ended)
    monkeypatch.setattr(VllmEngine, "_batch", watched)
    server.fault = fault
    while_judged(monkeypatch, during)
    with pytest.raises(TrainingStopped if how == "guard" else Interrupted):
        train(configuration(*options(server, tmp_path / "run", "steps=2")))
    assert batches == ["ended", "cancelled"]
    assert sorted(map(id, closed)) == sorted(map(id, opened))
    for thread in [thread for thread in threading.enumerate() if thread.name.startswith("draco-env")]:
        thread.join(30)
        assert not thread.is_alive()


def test_a_resumed_run_samples_its_first_batch_by_the_checkpoint(
    server: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"

    def during(step: int) -> None:
        if step == 2:
            raise TrainingStopped("enough")

    with monkeypatch.context() as patch:
        while_judged(patch, during)
        with pytest.raises(TrainingStopped):
            train(configuration(*options(server, run, "steps=4")))
    assert versions(run) == [{0}, {0}]
    train(configuration(*options(server, run, "steps=4", f"resume={run}")))
    assert versions(run) == [{0}, {0}, {2}, {2}]  # undisturbed: …, {1}, {2}


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["loss.tis_cap=null"], r"loss\.tis_cap is not set: add .* such as loss\.tis_cap=2\.0"),
        (["engine.staleness=2"], r"engine\.staleness is 2; expected an integer from 0 to 1"),
        (["engine.sleep=true"], r"engine\.sleep=true has them asleep"),
    ],
)
def test_what_cannot_work_with_it_is_refused(more: list[str], message: str, tmp_path: Path) -> None:
    overrides = [
        f"run={tmp_path / 'run'}", "engine=vllm", "engine.servers=[http://127.0.0.1:1]", "engine.staleness=1",
        "loss.tis_cap=2.0", *more,
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=message):
        train(configuration(*overrides))
