"""Requests and tokens a minute, prices and caps: pure arithmetic with a clock of our own."""

from __future__ import annotations

import asyncio
import random
import time
from email.utils import formatdate
from typing import Any

import pytest

from draco.core.errors import JudgeConfigError, TrainingStopped
from draco.core.llm.faults import retry_after
from draco.core.llm.money import Prices, Usage
from draco.core.llm.redact import Redactor
from draco.judge.budget import Spend
from draco.judge.endpoints import JudgeEndpoint
from draco.judge.limits import Pace
from draco.judge.options import prices_of


class Clock:
    """Time passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)
        self.now += seconds


def paced(sizes: list[int], **limits: Any) -> tuple[list[float], Pace, Clock]:
    clock = Clock()
    pace = Pace(**limits, clock=clock, sleep=clock.sleep)

    async def run() -> list[float]:
        return [(await pace.enter(size)).at for size in sizes]

    return asyncio.run(run()), pace, clock


def test_the_sixth_request_of_five_a_minute_waits_for_the_first_to_leave_the_window() -> None:
    assert paced([1] * 11, requests_per_min=5)[0] == [0.0] * 5 + [60.0] * 5 + [120.0]


def test_no_minute_holds_more_tokens_than_the_limit() -> None:
    draw = random.Random(3)
    sizes = [draw.randint(1, 400) for _ in range(200)]
    at, _, _ = paced(sizes, tokens_per_min=1000)
    assert at == sorted(at)
    for i, start in enumerate(at):
        inside = [s for t, s in zip(at[i:], sizes[i:], strict=True) if t < start + 60.0]
        assert sum(inside) <= 1000


def test_a_call_larger_than_the_limit_goes_alone() -> None:
    assert paced([10, 5000, 10], tokens_per_min=100)[0] == [0.0, 60.0, 120.0]


def test_the_true_use_replaces_the_estimate() -> None:
    clock = Clock()
    pace = Pace(tokens_per_min=100, clock=clock, sleep=clock.sleep)

    async def run() -> float:
        first = await pace.enter(100)
        first.tokens = 40
        return (await pace.enter(60)).at

    assert asyncio.run(run()) == 0.0


def test_retry_after_holds_everybody_back() -> None:
    clock = Clock()
    pace = Pace(clock=clock, sleep=clock.sleep)

    async def run() -> list[float]:
        await pace.enter(1)
        pace.hold(7.0)
        held = await asyncio.gather(*(pace.enter(1) for _ in range(3)))
        return [use.at for use in held]

    assert asyncio.run(run()) == [7.0] * 3


class Told(Exception):
    def __init__(self, **headers: str) -> None:
        self.litellm_response_headers = {k.replace("_", "-"): v for k, v in headers.items()}


def test_what_retry_after_may_look_like() -> None:
    assert retry_after(Told(Retry_After="3")) == 3.0
    assert retry_after(Told(retry_after_ms="1500")) == 1.5
    assert 2900 < retry_after(Told(retry_after=formatdate(time.time() + 3000))) < 3001
    for nonsense in ("soon", "nan", "-4", ""):
        assert retry_after(Told(retry_after=nonsense)) == 0.0
    assert retry_after(Told(retry_after="1e9")) == 3600.0
    assert retry_after(ValueError()) == 0.0


def test_prices() -> None:
    prices = prices_of({"input": 2, "output": 8, "cached": None})
    assert prices is not None
    assert prices.cost(Usage(500_000, 250_000, 100_000)) == pytest.approx(1.0 + 2.0)
    assert Prices(2.0, 8.0, 0.5).cost(Usage(500_000, 0, 100_000)) == pytest.approx(0.8 + 0.05)
    assert prices_of(None) is None
    for wrong in ({"input": 1}, {"input": "dear", "output": 1}, {"input": -1, "output": 1}, {"price": 3}):
        with pytest.raises(JudgeConfigError, match="million tokens"):
            prices_of(wrong)


def test_a_cap_stops_before_the_call_that_would_pass_it() -> None:
    spend = Spend(max_usd=1.0)
    for _ in range(9):
        spend.check(55)
        spend.add(Usage(100, 10), 0.1, 55)
    spend.check(55)  # 0.9 + 0.1: calls take twice what is guessed
    spend.under_way = 55
    with pytest.raises(TrainingStopped, match=r"judge.max_usd=1 .*990 judge tokens in 9 attempts, 0.9 USD"):
        spend.check(55)  # 0.9 + 0.1 under way + 0.1


def test_calls_that_start_together_are_counted_before_any_is_answered() -> None:
    spend = Spend(max_tokens=1000)
    spend.add(Usage(40, 10), None, 50)  # the small call before a run
    for _ in range(4):
        spend.check(200)
        spend.under_way += 200
    with pytest.raises(TrainingStopped, match=r"max_tokens_total=1000 .* about 1e\+03 more"):
        spend.check(200)


def test_a_cap_in_tokens_needs_no_price() -> None:
    spend = Spend(max_tokens=200)
    spend.add(Usage(100, 10), None)
    spend.check(90)
    with pytest.raises(TrainingStopped, match=r"max_tokens_total=200.*of unknown price"):
        spend.check(91)


def test_a_cap_in_usd_with_an_unknown_price_is_refused() -> None:
    spend = Spend(max_usd=5.0)
    spend.add(Usage(1, 1), None)
    with pytest.raises(JudgeConfigError, match=r"judge.prices"):
        spend.check(1)


def test_ranks_share_a_cap() -> None:
    mine = Spend(max_usd=10.0, world=4)
    mine.agree(2.0, 100)  # spent by all before
    mine.add(Usage(10, 0), 1.0)
    assert mine.total() == (6.0, 140)  # the others are supposed to spend alike
    mine.agree(3.5, 120)  # and say what they did
    assert mine.total() == (3.5, 120)
    assert mine.own() == (0.0, 0)
    mine.max_usd, mine.max_tokens = None, 160
    mine.check(10)
    with pytest.raises(TrainingStopped):
        mine.check(11)  # the others are supposed to make such a call too


def test_no_known_key_and_nothing_like_one_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "correct-horse-battery")
    redact = Redactor(["mine-12345678", None])
    assert redact("a correct-horse-battery b mine-12345678") == "a [redacted] b [redacted]"
    said = redact.error("Bearer abcdefgh12 sk-12345678abc AIzaSyA12345678 https://me:pw123@host/v1?x=1")
    assert "12345678" not in said
    assert "abcdefgh12" not in said
    assert "pw123" not in said
    assert len(redact.error("x" * 9000)) == 2000


def test_fallbacks_are_names_or_mappings() -> None:
    assert JudgeEndpoint.listed("a/b", "judge.fallbacks") == JudgeEndpoint("a/b")
    assert JudgeEndpoint.listed({"model": "a/b", "api_base": "http://x"}, "judge.fallbacks") == JudgeEndpoint(
        "a/b", "http://x"
    )
    assert "secret" not in repr(JudgeEndpoint.listed({"model": "a/b", "api_key": "secret"}, "judge.fallbacks"))
    for wrong in ({"name": "x"}, 3):
        with pytest.raises(JudgeConfigError, match="fallbacks"):
            JudgeEndpoint.listed(wrong, "judge.fallbacks")  # type: ignore[arg-type]
