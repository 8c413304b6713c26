"""The client against an OpenAI-compatible server on this machine: what really goes over the wire and comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.fake_judge import call_once
from support.loopback_judge import Answer, LoopbackJudge

from draco.core.errors import JudgeCallError, JudgeConfigError, TrainingStopped
from draco.judge.client import JudgeClient
from draco.judge.records import CallRecord, call_metrics

CANARY = "sk-canary-9876543210fedcba"
GOOD = json.dumps({"verdicts": [{"title": "Pays ana", "evidence": "e", "justification": "j", "score": 1}]})


def said(body: dict[str, Any], text: str = GOOD, **more: Any) -> Answer:
    """A reply whose tokens are 100 read, 64 of them cached, and 7 written."""
    return Answer(text, model=f"{body['model']}-2026", **({"tokens": (100, 7, 64)} | more))


@pytest.fixture
def server() -> Iterator[LoopbackJudge]:
    with LoopbackJudge(said) as made:
        yield made


def ask(server: LoopbackJudge, model: str = "openai/some-model", **options: Any) -> tuple[Any, list[CallRecord]]:
    defaults: dict[str, Any] = {"max_retries": 2, "timeout_s": 120.0, "backoff_s": 0.0, "api_key": CANARY}
    return call_once(JudgeClient(model, **({"api_base": server.base} | defaults | options)))


def test_a_call_as_sent_and_as_recorded(server: LoopbackJudge) -> None:
    value, records = ask(server, response_schema="on")
    assert [v.score for v in value] == [1]
    body = server.bodies[0]
    assert body["model"] == "some-model"
    assert body["temperature"] == 0.1
    assert body["response_format"]["json_schema"]["name"] == "score"
    assert body["response_format"]["json_schema"]["strict"] is True
    assert server.keys == [f"Bearer {CANARY}"]
    r = records[0]
    assert (r.served_model, r.fingerprint) == ("some-model-2026", "fp_1")
    assert (r.tokens_in, r.tokens_out, r.tokens_cached) == (100, 7, 64)
    assert r.cost_usd is None
    assert CANARY not in repr(records)


def test_a_known_model_has_a_price(server: LoopbackJudge) -> None:
    _, records = ask(server, "openai/gpt-4o-mini")
    assert records[0].cost_usd is not None
    assert records[0].cost_usd > 0


def test_server_errors_and_rate_limits_are_retried_once_each_and_no_more_by_litellm(server: LoopbackJudge) -> None:
    first = iter((Answer(status=500), Answer(status=429)))
    server.answer = lambda body: next(first, said(body))
    value, records = ask(server)
    assert [v.score for v in value] == [1]
    assert [r.outcome for r in records] == ["server_error", "rate_limit", "ok"]
    assert len(server.bodies) == 3


def test_a_refused_key_is_final_and_stays_secret(server: LoopbackJudge, capfd: pytest.CaptureFixture[str]) -> None:
    server.answer = lambda body: Answer(status=401, error=f"Incorrect API key provided: {CANARY}")
    value, records = ask(server)
    assert isinstance(value, JudgeConfigError)
    assert len(server.bodies) == 1
    assert "OPENAI_API_KEY" in str(value)
    assert CANARY not in str(value) + repr(records) + "".join(capfd.readouterr())


@pytest.mark.parametrize(("model", "variable"), [("openai/x", "OPENAI_API_KEY"), ("gemini/x", "GEMINI_API_KEY")])
def test_a_missing_key_is_named_at_once(
    server: LoopbackJudge, model: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "GEMINI_API_KEY", "GOOGLE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    value, records = ask(server, model, api_key=None, api_base=None)
    assert server.bodies == []
    assert isinstance(value, JudgeConfigError)
    assert variable in str(value)
    assert len(str(value).splitlines()) == 1
    assert len(str(value)) < 500
    assert [r.outcome for r in records] == ["auth"]


def test_a_server_of_ones_own_needs_no_key(server: LoopbackJudge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    _, records = ask(server, api_key=None)
    assert [r.outcome for r in records] == ["ok"]


def test_a_hanging_server_is_given_up(server: LoopbackJudge) -> None:
    server.answer = lambda body: said(body, delay_s=600.0)  # it ends with the server
    value, records = ask(server, timeout_s=0.3, max_retries=1)
    assert isinstance(value, JudgeCallError)
    assert [r.outcome for r in records] == ["timeout", "timeout"]


@pytest.mark.parametrize("model", ["openai/some-model", "hosted_vllm/some-model"])
def test_nobody_listens(model: str) -> None:
    server = LoopbackJudge(said)
    server.server_close()
    value, records = ask(server, model, max_retries=1)
    assert isinstance(value, JudgeCallError)
    place = f"127.0.0.1:{server.server_address[1]}"
    assert str(value) == f"score: {model} failed 2 times: cannot connect to {place}: connection refused"
    assert [r.outcome for r in records] == ["connection"] * 2


@pytest.mark.parametrize("model", ["openai/some-model", "hosted_vllm/some-model"])
def test_https_asked_of_a_server_without(server: LoopbackJudge, model: str) -> None:
    place = f"127.0.0.1:{server.server_address[1]}"
    value, (record,) = ask(server, model, api_base=f"https://{place}/v1", max_retries=0)
    assert record.error == f"{place} does not speak https: should its address begin with http://?"
    assert str(value).endswith(record.error)


@pytest.mark.parametrize("model", ["openai/some-model", "openai/gpt-4o"])
@pytest.mark.parametrize("prices", [None, {"input": 1.0, "output": 10.0}])
def test_tokens_that_a_server_does_not_tell_are_estimated(
    server: LoopbackJudge, caplog: pytest.LogCaptureFixture, model: str, prices: dict[str, float] | None
) -> None:
    server.answer = lambda body: said(body, GOOD if len(server.bodies) > 1 else "no", tells=False)
    value, records = ask(server, model, prices=prices)
    assert [v.score for v in value] == [1]
    assert len(records) == 2
    for r in records:
        assert r.estimated
        assert r.tokens_in == pytest.approx(sum(len(text) for _, text in r.messages) / 4, rel=0.05)
        assert r.tokens_out == -(-len(r.reply) // 4)
        if prices is not None:
            assert r.cost_usd == pytest.approx((r.tokens_in + 10 * r.tokens_out) / 1e6)
        elif model == "openai/gpt-4o":  # in litellm's table
            assert r.cost_usd == pytest.approx((2.5 * r.tokens_in + 10 * r.tokens_out) / 1e6)
        else:
            assert r.cost_usd is None
    assert call_metrics(records)["judge/estimated_calls"] == 2
    assert sum("does not say how many tokens" in line for line in caplog.messages) == 1


def test_tokens_that_a_server_does_not_tell_count_against_the_caps(server: LoopbackJudge) -> None:
    server.answer = lambda body: said(body, "no", tells=False)
    # Room for one call of about 900 tokens and a reply of one, not for the re-ask: only if the first one is counted.
    for cap in ({"max_usd": 900 * 1.5 * 2.5e-6}, {"max_tokens_total": 1500}):
        stopped, records = ask(server, "openai/gpt-4o", max_tokens=1, **cap)
        assert isinstance(stopped, TrainingStopped)
        assert len(records) == 1
        assert "0 judge tokens in 1" not in str(stopped)
    refused, _ = ask(server, max_usd=1.0)  # the price is unknown, as it is with a count
    assert isinstance(refused, JudgeConfigError)


def test_a_count_that_is_told_is_taken(server: LoopbackJudge) -> None:
    _, (record,) = ask(server)
    assert (record.tokens_in, record.tokens_out, record.tokens_cached, record.estimated) == (100, 7, 64, False)
    assert "judge/estimated_calls" not in call_metrics([record])
