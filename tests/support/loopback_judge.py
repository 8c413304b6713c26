"""An OpenAI-compatible judge on this machine, for benchmarks and tests: right or wrong, quick or slow, as told.

    python tests/support/loopback_judge.py latency=2    # serves until its input closes; the first line is its port

Its verdicts are made up: it knows the formats of the calls and nothing else.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["Answer", "LoopbackJudge", "made_up_reply"]

_PHASE = re.compile(r"^# Call: (\w+)$", re.MULTILINE)
_LIST = re.compile(r"```json\n(\[.*?\])\n```", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request gets."""

    text: str | None = ""  #: the model's reply; None as in a refusal
    status: int = 200
    error: str = "made up"  #: message where the status is no 200
    headers: Mapping[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    drop: float | None = None  #: share of the response that is sent before the connection is cut
    finish_reason: str = "stop"
    model: str = ""  #: empty: the one that was asked for
    tokens: tuple[int, int, int] | None = None  #: prompt, reply and cached ones that it tells; None: by length
    tells: bool = True  #: whether it tells tokens at all


class LoopbackJudge(ThreadingHTTPServer):
    """Answers every request by `answer(body)`. Loopback only."""

    daemon_threads = True
    request_queue_size = 512

    def __init__(self, answer: Callable[[dict[str, Any]], Answer], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.busy = self.most_busy = 0  #: requests under way
        self.lock = threading.Lock()
        self.released = threading.Event()  #: ends every delay

    @property
    def base(self) -> str:
        """What judge.api_base must be."""
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def __enter__(self) -> LoopbackJudge:
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self.shutdown()
        self.server_close()
        self._thread.join()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: LoopbackJudge

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.bodies.append(body)
            server.keys.append(self.headers.get("Authorization", ""))
            server.busy += 1
            server.most_busy = max(server.most_busy, server.busy)
            answer = server.answer(body)
        try:
            if answer.delay_s:
                server.released.wait(answer.delay_s)
            self._send(body, answer)
        finally:
            with server.lock:
                server.busy -= 1

    def _send(self, body: dict[str, Any], answer: Answer) -> None:
        data = json.dumps(_completion(body, answer) if answer.status == 200 else _error(answer)).encode()
        if answer.drop == 0.0:
            return
        self.send_response(answer.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data if answer.drop is None else data[: int(len(data) * answer.drop)])

    def log_message(self, *args: Any) -> None:
        """Keep quiet."""


def _error(answer: Answer) -> dict[str, Any]:
    return {"error": {"message": answer.error, "type": "made_up", "code": str(answer.status)}}


def _completion(body: dict[str, Any], answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.text is None:
        message["refusal"] = "I cannot help with that."
    by_length = sum(len(m["content"]) for m in body["messages"]) // 4, len(answer.text or "") // 4
    tokens_in, tokens_out, cached = answer.tokens or (*by_length, by_length[0] // 2)
    completion = {
        "id": "x",
        "object": "chat.completion",
        "created": 1,
        "model": answer.model or body["model"],
        "system_fingerprint": "fp_1",
        "choices": [{"index": 0, "message": message, "finish_reason": answer.finish_reason}],
        "usage": {
            "prompt_tokens": tokens_in,
            "completion_tokens": tokens_out,
            "total_tokens": tokens_in + tokens_out,
            "prompt_tokens_details": {"cached_tokens": cached},
        },
    }
    if not answer.tells:
        del completion["usage"]
    return completion


def made_up_reply(body: dict[str, Any]) -> str:
    """A well-formed reply to any call of both plans; every second criterion fails, step 1 is to blame."""
    text = body["messages"][1]["content"]
    phase = _PHASE.findall(text)[-1]
    if phase in ("propose_task", "propose_rollout", "merge", "reduce"):
        common = {"description": "d", "evaluator_instruction": "i", "grounding_references": []}
        more = {"evidence": "e"} if phase == "propose_rollout" else {}
        return json.dumps({"criteria": [{"title": f"Does {phase} thing {i}", **common, **more} for i in range(4)]})
    titles = [row["title"] for row in json.loads(_LIST.findall(text)[-1])]
    verdicts = [(title, -1 if (k + len(text)) % 2 else 1) for k, title in enumerate(titles)]
    if phase == "score":
        return json.dumps(
            {"verdicts": [{"title": t, "evidence": "e", "justification": "j", "score": v} for t, v in verdicts]}
        )
    if phase == "assess":
        reasons = {"evidence": "e", "justification": "j", "relevant_steps": [1]}
        return json.dumps({"assessments": [{"title": t, "score": v, **reasons} for t, v in verdicts]})
    return json.dumps(
        {"attributions": [{"title": t, "explanation": "x", "verdict": v, "relevant_steps": [1]} for t, v in verdicts]}
    )


def main() -> None:
    usage = "expected latency=SECONDS port=NUMBER"
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(f"{(__doc__ or '').strip()}\n\n{usage}")
        return
    options = {name: value for name, _, value in (argument.partition("=") for argument in sys.argv[1:])}
    try:
        latency, port = float(options.pop("latency", "0")), int(options.pop("port", "0"))
    except ValueError as error:
        sys.exit(f"error: {error}; {usage}")
    if options:
        sys.exit(f"error: unknown option {', '.join(options)}; {usage}")
    with LoopbackJudge(lambda body: Answer(made_up_reply(body), delay_s=latency), port) as judge:
        print(judge.server_address[1], flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
