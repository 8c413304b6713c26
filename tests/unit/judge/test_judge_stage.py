"""The rubric callbacks: streams, order, guard, records, state, the background loop."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import ROOT
from support.factory import group, tasks, trajectory
from support.fake_judge import FakeJudge, client

from callbacks.rubric.dynamic import DynamicRubric
from callbacks.rubric.outcome import OutcomeRubric
from callbacks.rubric.random import RandomRubric, toss
from callbacks.rubric.static import StaticRubric, load_criteria
from draco.config.compose import instantiate_group
from draco.core.background import BackgroundLoop
from draco.core.errors import ConfigError, JudgeConfigError, TrainingStopped
from draco.core.types import Failure, Group, Judgement, Task, Termination
from draco.env.base import Evaluator, Outcome
from draco.judge.stage import Busy, JudgedRubric
from draco.judge.transcript import read_secret
from draco.stages import RunContext, Taken
from draco.update.metrics import judge_speed


@pytest.fixture
def stages() -> Iterator[list[JudgedRubric]]:
    """Stages to close, so that no thread outlives its test."""
    made: list[JudgedRubric] = []
    yield made
    for stage in made:
        stage.close()
    assert not [t for t in threading.enumerate() if t.name == "draco-background"]


def dynamic(stages: list[JudgedRubric], fake: FakeJudge, **options: Any) -> DynamicRubric:
    stage = DynamicRubric(client(fake), **options)
    stages.append(stage)
    return stage


def slow_first_group(text: str) -> float:
    return 0.2 if "slow" in text else 0.0


def three_groups() -> list[Group]:
    """The first one is slow to judge."""
    return [group(2, i, 0, task=t, observation="ok" if i else "slow") for i, t in enumerate(tasks(3))]


def test_batch_order(fake: FakeJudge, stages: list[JudgedRubric]) -> None:
    fake.delay = slow_first_group
    stage = dynamic(stages, fake, order="batch")
    assert [j.group.index for j in stage.judge(reversed(three_groups()))] == [0, 1, 2]


def test_arrival_order(fake: FakeJudge, stages: list[JudgedRubric]) -> None:
    inner, others = fake.acompletion, threading.Event()

    async def held(*args: Any, **kwargs: Any) -> Any:
        """The first group gets no reply before the others have been yielded."""
        if "slow" in kwargs["messages"][1]["content"]:
            await asyncio.to_thread(others.wait, 60)
        return await inner(*args, **kwargs)

    fake.acompletion = held  # type: ignore[method-assign]
    judged = dynamic(stages, fake, order="arrival").judge(three_groups())
    assert {next(judged).group.index, next(judged).group.index} == {1, 2}
    others.set()
    assert [j.group.index for j in judged] == [0]


def test_judging_starts_while_groups_still_roll_out(fake: FakeJudge, stages: list[JudgedRubric]) -> None:
    stage = dynamic(stages, fake)
    called = threading.Event()
    fake.delay = lambda text: called.set() or 0.0  # type: ignore[func-returns-value]
    threads = []

    def rollouts() -> Iterator[Group]:
        threads.append(threading.current_thread())
        yield three_groups()[1]
        assert called.wait(60), "the first group is not judged before the second ends"
        yield three_groups()[2]

    assert len(list(stage.judge(rollouts()))) == 2
    assert threads == [threading.main_thread()]


def test_nothing_is_yielded_before_all_rollouts_ended(fake: FakeJudge, stages: list[JudgedRubric]) -> None:
    events: list[str] = []

    def rollouts() -> Iterator[Group]:
        yield from three_groups()
        events.append("rolled out")

    for _ in dynamic(stages, fake, order="arrival").judge(rollouts()):
        events.append("judged")
    assert events == ["rolled out", "judged", "judged", "judged"]


def test_citations_only_where_they_are_needed(fake: FakeJudge, stages: list[JudgedRubric]) -> None:
    stage = dynamic(stages, fake)
    stage.needs_citations = False
    list(stage.judge([group(2)]))
    assert "attribute" not in fake.phases()


def test_records_and_metrics_are_taken_once(fake: FakeJudge, stages: list[JudgedRubric]) -> None:
    stage = dynamic(stages, fake)
    judged = list(stage.judge(three_groups()))
    taken = stage.take()
    records = taken.calls
    assert len(records) == len(fake.calls) == 3 * 8
    assert [r.task_id for r in records] == sorted(r.task_id for r in records)
    assert [r.phase for r in records[:8]] == [
        "propose_task",
        *["propose_rollout"] * 2,
        "merge",
        *["score"] * 2,
        *["attribute"] * 2,
    ]
    metrics = taken.metrics
    assert metrics["judge/calls"] == 24
    assert metrics["rubric/pass_rate"] == pytest.approx(judged[0].metrics["rubric/pass_rate"])
    assert stage.take() == Taken()


def test_the_seconds_of_judging_and_its_speed(fake: FakeJudge, stages: list[JudgedRubric]) -> None:
    stage = dynamic(stages, fake)
    hands = iter([3.0, 5.0, 7.0, 7.5])
    stage.busy = Busy(lambda: next(hands))
    list(stage.judge([group(2)]))
    metrics = stage.take().metrics
    assert metrics["time/judge_s"] == 2.0
    assert judge_speed(metrics) == {"judge/tokens_per_s": 8 * (10 + 5) / 2.0}
    dead = tuple(trajectory(i, termination=Termination.DEADLINE) for i in range(2))
    list(stage.judge([group(dead)]))
    metrics = stage.take().metrics
    assert metrics["judge/calls"] == 0
    assert "time/judge_s" not in metrics  # nothing was asked


def test_groups_that_are_judged_side_by_side_take_their_time_once() -> None:
    now = 0.0
    busy = Busy(lambda: now)
    with busy:
        now = 1.0
        with busy:
            now = 4.0
        now = 6.0
    now = 10.0
    with busy:
        now = 11.0
    assert busy.take() == 7.0
    assert busy.take() == 0.0
    with busy:
        now = 20.0
        busy.restart()  # until now they only waited
        now = 22.0
    assert busy.take() == 2.0


def test_the_order_of_records_is_not_that_of_arrival(fake: FakeJudge, stages: list[JudgedRubric]) -> None:
    stage = dynamic(stages, fake)
    list(stage.judge([group(2)]))
    one = next(r for r in stage.take().calls if r.phase == "score")
    ways = [("model", ("a", "b")), ("repeat", (0, 1)), ("attempt", (1, 2)), ("prompt_hash", ("0", "1"))]
    for name, values in ways:
        both = [replace(one, **{name: value}) for value in values]
        for arrived in (both, both[::-1]):
            stage._records.extend(arrived)
            assert stage.take().calls == both


def test_too_many_failures_stop_the_run(fake: FakeJudge, stages: list[JudgedRubric]) -> None:
    fake.overrides["score"] = lambda text, n: "no" if "of sample 0" in text else None
    stage = dynamic(stages, fake, max_failed_share=0.25)
    with pytest.raises(TrainingStopped, match=r"3 of 9 .*max_failed_share=0.25; last reason, in score: "):
        list(stage.judge([group(3, i) for i in range(3)]))
    stage = dynamic(stages, fake, max_failed_share=0.34)
    assert len(list(stage.judge([group(3)]))) == 1


@pytest.mark.parametrize(("mine", "theirs", "stops"), [(2, 0, False), (0, 6, True), (2, 1, False), (2, 2, True)])
def test_failures_are_a_share_of_the_batch_of_all_ranks(
    fake: FakeJudge, stages: list[JudgedRubric], monkeypatch: pytest.MonkeyPatch, mine: int, theirs: int, stops: bool
) -> None:
    """Three members here, nine at the other rank; every rank decides alike, and hears what the other has spent."""
    other = (0.5, 1000, [Failure(i, "merge", "merge: no reply") for i in range(theirs)], 9)
    monkeypatch.setattr("draco.judge.stage.gather", lambda own: [own, other])
    bad = [f"of sample {i}" for i in range(mine)]
    fake.overrides["propose_rollout"] = lambda text, n: "no" if any(b in text for b in bad) else None
    stage = dynamic(stages, fake, max_failed_share=0.34)
    stage.client.spend.world = 2
    judged = stage.judge([group(3)])
    lost = {0: 0, 2: 3}[mine]  # one member left makes no group
    if stops:
        with pytest.raises(TrainingStopped, match=rf"{lost + theirs} of 12 .*max_failed_share=0.34; last reason, in "):
            list(judged)
    else:
        assert len(list(judged)) == 1
    spent = stage.client.spend
    assert spent.agreed == (0.5, 1000 + spent.tokens)
    assert spent.own() == (0, 0)


def test_rollout_failures_do_not_count_as_failed_judgements(fake: FakeJudge, stages: list[JudgedRubric]) -> None:
    dead = [trajectory(i, termination=Termination.ENVIRONMENT_ERROR) for i in (2, 3)]
    stage = dynamic(stages, fake, max_failed_share=0.0)
    j = next(stage.judge([group((*group(2).trajectories, *dead))]))
    assert len(j.group.trajectories) == 2


def test_a_refusing_provider_stops_the_run(fake: FakeJudge, stages: list[JudgedRubric]) -> None:
    import litellm

    fake.overrides["merge"] = lambda text, n: litellm.exceptions.AuthenticationError("bad", "fake-judge", "m")
    with pytest.raises(JudgeConfigError):
        list(dynamic(stages, fake).judge(three_groups()))


def test_abandoning_the_stream_cancels_what_is_pending(fake: FakeJudge, stages: list[JudgedRubric]) -> None:
    fake.delay = lambda text: 0.0 if "propose_task" in text and "slow" not in text else 600.0
    stage = dynamic(stages, fake)

    def rollouts() -> Iterator[Group]:
        yield from three_groups()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(stage.judge(rollouts()))
    assert stage._loop is not None

    async def others() -> int:
        while left := [t for t in asyncio.all_tasks() if "judge_group" in repr(t)]:
            await asyncio.sleep(0.01)
        return len(left)

    assert stage._loop.submit(others()).result(60) == 0


def test_close_leaves_no_task_and_the_stage_can_go_on(fake: FakeJudge, stages: list[JudgedRubric]) -> None:
    stage = dynamic(stages, fake)
    assert len(list(stage.judge([group(2)]))) == 1
    stage.close()
    stage.close()
    assert not [t for t in threading.enumerate() if t.name == "draco-background"]
    assert len(list(stage.judge([group(2)]))) == 1


def test_background_loop_cancels_on_close() -> None:
    loop = BackgroundLoop()
    seen: list[str] = []

    async def endless() -> None:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def running() -> int:
        await asyncio.sleep(0)
        return len(asyncio.all_tasks()) - 1

    future = loop.submit(endless())
    assert loop.submit(running()).result(60) == 1
    loop.close()
    assert seen == ["cancelled"]
    assert future.cancelled()
    assert loop.closed
    with pytest.raises(RuntimeError, match="closed"):
        loop.submit(running())


def test_one_loop_a_process() -> None:
    first = BackgroundLoop.shared()
    assert BackgroundLoop.shared() is first
    first.close()
    second = BackgroundLoop.shared()
    assert second is not first
    second.close()


def test_open_adds_caveats_and_secret(fake: FakeJudge, stages: list[JudgedRubric]) -> None:
    stage = dynamic(stages, fake, caveats=["mine"])
    stage.open(RunContext(caveats=("theirs",), secret=b"0123456789abcdef"))
    list(stage.judge([group(2)]))
    system = fake.prompts[0][0]["content"]
    assert system.index("- mine\n") < system.index("- theirs\n")
    codes = {line for p in fake.prompts for line in p[1]["content"].split("\n") if line.startswith("<<<BEGIN")}
    stage.open(RunContext(caveats=("theirs",), secret=b"another secret!!"))
    list(stage.judge([group(2)]))
    assert codes.isdisjoint(
        line for p in fake.prompts[8:] for line in p[1]["content"].split("\n") if line.startswith("<<<BEGIN")
    )
    with pytest.raises(ConfigError):
        stage.open(RunContext(secret=b"short"))


def test_secret_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    first = read_secret(path)
    assert len(first) == 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_secret(path) == first
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match="16"):
        read_secret(path)


def test_state_keeps_proposals(fake: FakeJudge, stages: list[JudgedRubric]) -> None:
    stage = dynamic(stages, fake, propose_cache="run")
    list(stage.judge([group(2)]))
    state = stage.state_dict()
    again = dynamic(stages, FakeJudge(), propose_cache="run")
    again.load_state_dict(state)
    assert again.pipeline.proposals == stage.pipeline.proposals
    other = FakeJudge()
    third = dynamic(stages, other, propose_cache="run")
    third.load_state_dict(state)
    list(third.judge([group(2)]))
    assert "propose_task" not in other.phases()


def test_static_rubric(fake: FakeJudge, stages: list[JudgedRubric], tmp_path: Path) -> None:
    stage = StaticRubric(client(fake), "desk")
    stages.append(stage)
    j = next(stage.judge([group(6)]))
    assert fake.phases() == ["score"] * 6 + ["attribute"] * 6
    assert len(j.criteria) == 14
    mine = tmp_path / "mine.yaml"
    mine.write_text("criteria:\n  - {title: A b c, description: d, evaluator_instruction: i}\n")
    assert [c.title for c in load_criteria(str(mine))] == ["A b c"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("criteria: []", "must hold a list"),
        ("other: 1", "must hold a list"),
        ("criteria:\n  - {title: a, description: b}", "evaluator_instruction"),
        ("criteria:\n" + "  - {title: a, description: b, evaluator_instruction: c}\n" * 2, "unique"),
        ("criteria: [", "no valid YAML"),
    ],
)
def test_bad_static_sets(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_criteria(str(path))


def test_a_static_set_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match=r"packaged set.*desk"):
        load_criteria("nowhere")


def test_no_evaluator_can_enter_a_judged_rubric() -> None:
    for kind in (DynamicRubric, StaticRubric, JudgedRubric):
        names = set(inspect.signature(kind).parameters)
        assert not {n for n in names if "evaluator" in n or "outcome" in n or "environment" in n}
        assert "Evaluator" not in inspect.getsource(inspect.getmodule(kind))  # type: ignore[arg-type]


class ByEndState(Evaluator):
    """Success is what the end state says."""

    def evaluate(self, task: Task, end_state: str) -> Outcome:
        if end_state == "raise":
            raise RuntimeError("database gone")
        return Outcome({"yes": True, "no": False}.get(end_state), error="lost" if end_state == "lost" else "")


def with_end_states(*states: str) -> Group:
    return group(trajectory(i, end_state=s) for i, s in enumerate(states))


def test_outcome_rubric() -> None:
    stage = OutcomeRubric(ByEndState(), max_failed_share=0.5)
    assert not stage.gives_citations
    j = next(stage.judge([with_end_states("yes", "no", "raise", "lost")]))
    assert j.rewards == (1.0, 0.0)
    assert j.criteria == j.verdicts == j.dropped == ()
    assert [(f.sample, f.phase) for f in j.failures] == [(2, "evaluate"), (3, "evaluate")]
    assert "database gone" in j.failures[0].reason
    assert j.failures[1].reason == "lost"
    taken = stage.take()
    assert taken.metrics["judge/failed"] == 2
    assert taken.calls == []
    j = next(stage.judge([with_end_states("yes", "raise")]))
    assert j.group.trajectories == ()
    assert [f.phase for f in j.failures] == ["group", "evaluate"]
    with pytest.raises(TrainingStopped, match=r"2 of 4 rollouts of this batch have no outcome.*the last: lost"):
        next(OutcomeRubric(ByEndState()).judge([with_end_states("yes", "no", "raise", "lost")]))


def test_random_rubric() -> None:
    def rewards(seed: int, step: int) -> tuple[float, ...]:
        judgement: Judgement = next(RandomRubric(seed).judge([group(20, step=step)]))
        return judgement.rewards

    assert rewards(0, 1) == rewards(0, 1)
    assert set(rewards(0, 1)) == {-1.0, 1.0}
    assert rewards(0, 1) != rewards(0, 2)
    assert rewards(0, 1) != rewards(1, 1)
    tosses = [toss(0, step, "t", sample) for step in range(100) for sample in range(10)]
    assert abs(sum(tosses)) < 100
    assert not RandomRubric().gives_citations


CONF = ROOT / "conf"


@pytest.mark.parametrize("name", ["dynamic", "static", "random", "outcome"])
def test_configurations_build_their_stage(name: str) -> None:
    from omegaconf import OmegaConf

    evaluator = {"_target_": f"{__name__}.ByEndState"}
    config = OmegaConf.create({"seed": 3, "env": {"evaluator": evaluator}, "update": {"order": "batch"}})
    config.judge = OmegaConf.load(CONF / "judge" / "scripted.yaml")
    config.rubric = OmegaConf.load(CONF / "rubric" / f"{name}.yaml")
    stage = instantiate_group(config.rubric)
    assert config.rubric.name == name
    assert type(stage).__name__ == f"{name.title()}Rubric"
    if isinstance(stage, JudgedRubric):
        assert stage.client.model == "draco-scripted/desk"


def test_the_litellm_configuration_asks_for_a_model() -> None:
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    config = OmegaConf.load(CONF / "judge" / "litellm.yaml")
    assert OmegaConf.missing_keys(config) == {"model"}
    config.model = "openai/some-model"
    assert instantiate(config).model == "openai/some-model"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "random"}, "^rubric.order is 'random'; expected batch or arrival$"),
        ({"max_failed_share": 2.0}, "^judge.max_failed_share is 2.0; expected a number"),
        ({"attribution_overrides": "maybe"}, "^rubric.attribution_overrides is 'maybe'; expected ignore or"),
        ({"propose_cache": "always"}, "^rubric.propose_cache is 'always'; expected group or run$"),
    ],
)
def test_bad_options(fake: FakeJudge, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DynamicRubric(client(fake), **options)


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan"), "half", None])
def test_the_outcome_rubric_refuses_what_is_no_share(share: Any) -> None:
    with pytest.raises(ConfigError, match=r"^rubric\.max_failed_share is "):
        OutcomeRubric(ByEndState(), max_failed_share=share)
