"""The client against an OpenAI-compatible server on this machine: what really goes over the wire and comes back."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from judge_fakes import CRITERIA

from draco.errors import JudgeCallError, JudgeConfigError, TrainingStopped
from draco.judge.client import JudgeClient, JudgeRequest
from draco.judge.prompts import messages
from draco.judge.records import CallRecord, call_metrics
from draco.judge.schema import check_scores

CANARY = "sk-canary-9876543210fedcba"
GOOD = json.dumps({"verdicts": [{"title": "Pays ana", "evidence": "e", "justification": "j", "score": 1}]})

Answer = Callable[[int, dict[str, Any]], tuple[int, Any]]


class Server(ThreadingHTTPServer):
    """Answers every request by `answer(n, body)` → status, reply text or raw body.

    `prompt_tokens` of a body are what it reports as read; `headers` go with what is not 200.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer: Answer = lambda n, body: (200, GOOD)
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.prompt_tokens: Callable[[dict[str, Any]], int] = lambda body: 100
        self.headers: dict[str, str] = {}
        self.counts = True  #: tokens are told


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        self.server.keys.append(self.headers.get("Authorization", ""))
        status, reply = self.server.answer(len(self.server.bodies), body)
        if status == 200:
            read = self.server.prompt_tokens(body)
            reply = {
                "id": "x",
                "object": "chat.completion",
                "created": 1,
                "model": body["model"] + "-2026",
                "system_fingerprint": "fp_1",
                "choices": [{"index": 0, "message": {"role": "assistant", "content": reply}, "finish_reason": "stop"}],
                "usage": {
                    "prompt_tokens": read,
                    "completion_tokens": 7,
                    "total_tokens": read + 7,
                    "prompt_tokens_details": {"cached_tokens": 64},
                },
            }
            if not self.server.counts:
                del reply["usage"]
        data = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in (self.server.headers if status != 200 else {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        """Keep quiet."""


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def ask(server: Server, model: str = "openai/some-model", **options: Any) -> tuple[Any, list[CallRecord]]:
    port = server.server_address[1]
    defaults: dict[str, Any] = {"max_retries": 2, "timeout_s": 20.0, "backoff_s": 0.0, "api_key": CANARY}
    judge = JudgeClient(model, **({"api_base": f"http://127.0.0.1:{port}/v1"} | defaults | options))
    records: list[CallRecord] = []
    request = JudgeRequest(
        phase="score",
        messages=messages("score", ["<<<END"], ()),
        check=lambda data: check_scores(CRITERIA[:1], data),
        sink=records.append,
    )

    async def run() -> Any:
        try:
            return await judge.call(request)
        finally:
            await judge.aclose()

    try:
        value: Any = asyncio.run(run())
    except Exception as error:
        value = error
    return value, records


def test_a_call_as_sent_and_as_recorded(server: Server) -> None:
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


def test_a_known_model_has_a_price(server: Server) -> None:
    _, records = ask(server, "openai/gpt-4o-mini")
    assert records[0].cost_usd is not None
    assert records[0].cost_usd > 0


def test_server_errors_and_rate_limits_are_retried_once_each_and_no_more_by_litellm(server: Server) -> None:
    error = {"error": {"message": "later", "type": "x", "code": "x"}}
    server.answer = lambda n, body: (500, error) if n == 1 else (429, error) if n == 2 else (200, GOOD)
    value, records = ask(server)
    assert [v.score for v in value] == [1]
    assert [r.outcome for r in records] == ["server_error", "rate_limit", "ok"]
    assert len(server.bodies) == 3


def test_a_refused_key_is_final_and_stays_secret(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    message = {"error": {"message": f"Incorrect API key provided: {CANARY}", "type": "x", "code": "invalid_api_key"}}
    server.answer = lambda n, body: (401, message)
    value, records = ask(server)
    assert isinstance(value, JudgeConfigError)
    assert len(server.bodies) == 1
    assert "OPENAI_API_KEY" in str(value)
    assert CANARY not in str(value) + repr(records) + "".join(capfd.readouterr())


@pytest.mark.parametrize(("model", "variable"), [("openai/x", "OPENAI_API_KEY"), ("gemini/x", "GEMINI_API_KEY")])
def test_a_missing_key_is_named_at_once(
    server: Server, model: str, variable: str, monkeypatch: pytest.MonkeyPatch
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


def test_a_server_of_ones_own_needs_no_key(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    _, records = ask(server, api_key=None)
    assert [r.outcome for r in records] == ["ok"]


def test_a_hanging_server_is_given_up(server: Server) -> None:
    def hang(n: int, body: dict[str, Any]) -> tuple[int, Any]:
        time.sleep(1.0)
        return 200, GOOD

    server.answer = hang
    value, records = ask(server, timeout_s=0.3, max_retries=1)
    assert isinstance(value, JudgeCallError)
    assert [r.outcome for r in records] == ["timeout", "timeout"]


def test_nobody_listens() -> None:
    server = Server()
    server.server_close()
    value, records = ask(server, max_retries=1)
    assert isinstance(value, JudgeCallError)
    assert {r.outcome for r in records} <= {"connection", "server_error"}
    assert len(records) == 2


@pytest.mark.parametrize("model", ["openai/some-model", "openai/gpt-4o"])
@pytest.mark.parametrize("prices", [None, {"input": 1.0, "output": 10.0}])
def test_tokens_that_a_server_does_not_tell_are_estimated(
    server: Server, caplog: pytest.LogCaptureFixture, model: str, prices: dict[str, float] | None
) -> None:
    server.counts = False
    server.answer = lambda n, body: (200, GOOD if n > 1 else "no")
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


def test_tokens_that_a_server_does_not_tell_count_against_the_caps(server: Server) -> None:
    server.counts = False
    server.answer = lambda n, body: (200, "no")
    # Room for one call of about 900 tokens and a reply of one, not for the re-ask: only if the first one is counted.
    for cap in ({"max_usd": 900 * 1.5 * 2.5e-6}, {"max_tokens_total": 1500}):
        stopped, records = ask(server, "openai/gpt-4o", max_tokens=1, **cap)
        assert isinstance(stopped, TrainingStopped)
        assert len(records) == 1
        assert "0 judge tokens in 1" not in str(stopped)
    refused, _ = ask(server, max_usd=1.0)  # the price is unknown, as it is with a count
    assert isinstance(refused, JudgeConfigError)


def test_a_count_that_is_told_is_taken(server: Server) -> None:
    _, (record,) = ask(server)
    assert (record.tokens_in, record.tokens_out, record.tokens_cached, record.estimated) == (100, 7, 64, False)
    assert "judge/estimated_calls" not in call_metrics([record])
