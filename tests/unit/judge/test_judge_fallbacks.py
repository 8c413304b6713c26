"""Fallbacks, deadlines, pauses and caps of the judge's client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import litellm
import pytest
from support.factory import CRITERIA, group
from support.fake_judge import GOOD, FakeJudge, ask, call_once, client

from draco.core.errors import ConfigError, JudgeCallError, JudgeConfigError
from draco.judge.client import JudgeClient
from draco.judge.prompts import messages
from draco.judge.records import CallRecord
from draco.judge.replies import check_scores
from draco.judge.requests import JudgeRequest

EXC = litellm.exceptions


def served(fake: FakeJudge, replies: Any, **options: Any) -> tuple[Any, list[CallRecord]]:
    """One call; `replies(model, n)` is the reply of a model to its n-th request."""
    models: list[str] = []
    fake.overrides["score"] = lambda text, n: None
    inner = fake.acompletion

    async def by_model(*args: Any, **kwargs: Any) -> Any:
        models.append(kwargs["model"])
        reply = replies(kwargs["model"], models.count(kwargs["model"]))
        fake.overrides["score"] = lambda text, n: reply
        return await inner(*args, **kwargs)

    fake.acompletion = by_model  # type: ignore[method-assign]
    return call_once(client(fake, **options))


BUSY = EXC.ServiceUnavailableError("busy", "fake-judge", "m")


def test_a_fallback_answers_where_the_judge_does_not(fake: FakeJudge) -> None:
    replies = {"m": BUSY, "n": EXC.ContextWindowExceededError("long", "n", "fake-judge"), "o": GOOD}
    value, records = served(
        fake, lambda model, n: replies[model], fallbacks=["fake-judge/n", {"model": "fake-judge/o"}]
    )
    assert [v.score for v in value] == [-1]
    assert [(r.model[-1], r.outcome) for r in records] == [("m", "server_error")] * 3 + [("n", "too_long"), ("o", "ok")]
    assert [r.attempt for r in records] == [1, 2, 3, 4, 5]


class Town:
    """Models that are up or down, asked by many calls of one client."""

    def __init__(self, fake: FakeJudge, **options: Any) -> None:
        self.down = {"m"}
        inner = fake.acompletion

        async def acompletion(*args: Any, **kwargs: Any) -> Any:
            name = kwargs["model"]
            await asyncio.sleep(0)
            fake.overrides["score"] = lambda text, n: BUSY if name in self.down else GOOD
            return await inner(*args, **kwargs)

        fake.acompletion = acompletion  # type: ignore[method-assign]
        self.now = 0.0
        self.judge = client(fake, **({"fallbacks": ["fake-judge/n"], "fallback_s": 60.0} | options))
        self.judge.router.breaker._clock = lambda: self.now

    def ask(self, times: int = 1) -> str:
        """Models in the order in which they were asked, by calls that start together."""
        records: list[CallRecord] = []
        request = JudgeRequest(
            "score", messages("score", ["<<<END"], ()), lambda data: check_scores(CRITERIA[:1], data), records.append
        )

        async def calls() -> None:
            found = await asyncio.gather(*(self.judge.call(request) for _ in range(times)))
            assert all(value[0].score == -1 for value in found)

        asyncio.run(calls())
        return "".join(r.model[-1] for r in records)


def test_a_dead_model_costs_its_retries_once(fake: FakeJudge, caplog: pytest.LogCaptureFixture) -> None:
    town = Town(fake)
    assert town.ask() == "mmmn"
    assert "its fallback is asked for 60 s" in caplog.text
    assert town.ask() == "n"
    town.now = 59.0
    assert town.ask(3) == "nnn"
    town.now = 61.0
    assert sorted(town.ask(4)) == sorted("mnnnn")  # one of them tries it, once
    town.now = 61.0 + 119.0
    assert town.ask() == "n"  # twice as long
    town.down.clear()
    town.now = 61.0 + 121.0
    assert town.ask() == "m"
    assert town.ask(2) == "mm"
    assert "fake-judge/m answers again" in caplog.text


def test_calls_under_way_stop_retrying_a_model_that_another_gave_up(fake: FakeJudge) -> None:
    town = Town(fake, max_retries=3, concurrency=1)
    asked = town.ask(8)
    assert asked.count("n") == 8
    assert asked.count("m") == 8 * 3 + 1  # they take turns: the first one to give it up spares the others their last


def test_the_last_model_is_always_asked(fake: FakeJudge) -> None:
    """Nobody stands in for it."""
    town = Town(fake, max_retries=0)
    town.down.add("n")
    for _ in range(2):
        with pytest.raises(JudgeCallError, match="fake-judge/n failed 1 times"):
            town.ask()
    town.down.clear()
    assert town.ask() == "n"
    alone = Town(FakeJudge(), fallbacks=[], max_retries=0)
    for _ in range(2):
        with pytest.raises(JudgeCallError, match="fake-judge/m failed 1 times"):
            alone.ask()


def test_a_trial_that_is_cancelled_leaves_the_next_one_to_another(fake: FakeJudge) -> None:
    town = Town(fake, max_retries=0)
    assert town.ask() == "mn"
    town.now = 61.0
    assert town.judge.router.breaker.enter(town.judge.endpoints[0].place) == "try"
    assert town.ask() == "n"
    town.judge.router.breaker.left(town.judge.endpoints[0].place)
    assert town.ask() == "mn"


def test_without_a_working_fallback_the_last_fault_is_named(fake: FakeJudge) -> None:
    value, records = served(fake, lambda model, n: BUSY, fallbacks=["fake-judge/n"], max_retries=0)
    assert isinstance(value, JudgeCallError)
    assert "fake-judge/n failed 1 times" in str(value)
    assert len(records) == 2


def test_a_refused_key_asks_no_fallback(fake: FakeJudge) -> None:
    error = EXC.AuthenticationError("bad key", "fake-judge", "m")
    value, records = served(fake, lambda model, n: error, fallbacks=["fake-judge/n"])
    assert isinstance(value, JudgeConfigError)
    assert len(records) == 1


def test_a_call_has_a_deadline_over_its_attempts(fake: FakeJudge) -> None:
    value, records = ask(fake, [BUSY] * 9, deadline_s=0.5, backoff_s=0.2, max_retries=8)
    assert isinstance(value, JudgeCallError)
    assert 1 <= len(records) < 9
    fake.delay = lambda text: 600.0
    value, records = ask(fake, [GOOD], deadline_s=0.05)
    assert isinstance(value, JudgeCallError)
    assert [r.outcome for r in records] == ["timeout"]


def test_a_group_has_a_deadline_and_leaves_nothing_behind(fake: FakeJudge) -> None:
    from draco.judge.pipeline import JudgePipeline

    fake.delay = lambda text: 600.0
    judge = client(fake, concurrency=1, group_deadline_s=0.5)
    records: list[CallRecord] = []
    pipeline = JudgePipeline(judge, secret=b"x" * 16, sink=records.append)

    async def run() -> tuple[Any, list[Any]]:
        judgement = await pipeline.judge_group(group(4), CRITERIA)
        left = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        return judgement, [t for t in left if "Judge" in repr(t)]  # litellm's logging goes on

    judgement, left = asyncio.run(run())
    assert not left
    assert judgement.group.trajectories == ()
    assert [(f.sample, f.phase) for f in judgement.failures] == [(i, "score") for i in range(4)]
    assert "group_deadline_s" in judgement.failures[-1].reason  # it waited for a slot in vain
    assert not {r.outcome for r in records} & {"ok", "repaired"}
    assert judge.spend.under_way == 0


def test_a_cancelled_call_is_recorded_and_gives_its_slot_back(fake: FakeJudge) -> None:
    fake.delay = lambda text: 600.0
    records: list[CallRecord] = []
    request = JudgeRequest("score", messages("score", ["<<<END"], ()), lambda data: (data, None), records.append)
    judge = client(fake, concurrency=1)

    async def run() -> None:
        task = asyncio.ensure_future(judge.call(request))
        while not fake.calls:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not judge.router.slot().locked()

    asyncio.run(run())
    assert [r.outcome for r in records] == ["cancelled"]


def test_a_usable_first_reply_is_kept_when_the_re_ask_fails(fake: FakeJudge) -> None:
    fake.overrides["score"] = lambda text, n: GOOD if n == 1 else BUSY
    records: list[CallRecord] = []
    request = JudgeRequest("score", messages("score", ["<<<END"], ()), lambda data: (data, "uncited"), records.append)
    assert asyncio.run(client(fake).call(request)) == json.loads(GOOD)
    assert [r.outcome for r in records] == ["reask"] + ["server_error"] * 3


def test_caps_and_prices_from_the_configuration(fake: FakeJudge) -> None:
    from draco.core.errors import TrainingStopped

    prices = {"input": 1000.0, "output": 2000.0}  # 10 and 5 tokens: 0.02 USD a call
    _, records = ask(fake, [GOOD], prices=prices, max_usd=0.03)
    assert records[0].cost_usd == pytest.approx(0.02)
    judge = client(fake, prices=prices, max_usd=0.03)
    request = JudgeRequest("score", messages("score", ["<<<END"], ()), lambda data: (data, None), records.append)
    fake.overrides["score"] = lambda text, n: GOOD
    asyncio.run(judge.call(request))
    with pytest.raises(
        TrainingStopped, match=r"judge.max_usd=0.03 would be passed: 15 judge tokens in 1 attempts, 0.02"
    ):
        asyncio.run(judge.call(request))


@pytest.mark.parametrize(
    "options",
    [
        {"cache": "maybe"}, {"max_usd": 0}, {"requests_per_min": -1}, {"on_model_change": "x"}, {"max_failed_share": 2},
        {"max_usd": "abc"}, {"max_failed_share": "abc"}, {"deadline_s": "abc"}, {"requests_per_min": "1"},
        {"fallbacks": "openai/x"}, {"members": "openai/x"}, {"fallbacks": None}, {"ensemble": "foo"},
        {"prices": {"input": float("nan"), "output": 1}}, {"prices": {"input": 1, "output": float("inf")}},
    ],
)  # fmt: skip
def test_more_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"judge\.{next(iter(options))}"):
        JudgeClient("m", **options)
