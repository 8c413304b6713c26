"""A judge behind HTTP on this machine: replies of the right shape whose verdicts depend on the transcript's hash."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PHASE = re.compile(r"^# Call: (\w+)$", re.MULTILINE)
FENCE = re.compile(r"<<<BEGIN TRANSCRIPT (\w+)>>>")
STEP = re.compile(r"^\[step (\d+)\] action:", re.MULTILINE)


def reply_to(text: str) -> dict[str, Any]:
    """One of the five replies, or which criteria are the same."""
    phase = PHASE.findall(text)[-1]
    code = FENCE.search(text)
    digest = hashlib.sha256((code[1] if code else "").encode()).digest()

    def criterion(title: str, **more: str) -> dict[str, Any]:
        return {"title": title, "description": "d", "evaluator_instruction": "i", "grounding_references": [], **more}

    if phase == "propose_task":
        return {"criteria": [criterion("Answers the question")]}
    if phase == "propose_rollout":
        return {"criteria": [criterion("Searches before answering", evidence="step 1")]}
    if phase == "merge":
        return {"criteria": [criterion("Answers the question"), criterion("Searches before answering")]}
    if phase == "match":  # the first of A and the first of B
        return {"pairs": [{"a": 1, "b": 1}]}
    listed = re.search(r"```json\n(.*?)\n```", text[text.rfind("<<<END") :], re.DOTALL)
    assert listed is not None
    rows = json.loads(listed[1])
    if phase == "score":
        verdicts = [
            {"title": r["title"], "evidence": "e", "justification": "j", "score": 1 if digest[k] & 1 else -1}
            for k, r in enumerate(rows)
        ]
        return {"verdicts": verdicts}
    last = max(map(int, STEP.findall(text)))
    attributions = [
        {"title": r["title"], "explanation": "x", "verdict": r["score"], "relevant_steps": [1 + digest[k] % last]}
        for k, r in enumerate(rows)
    ]
    return {"attributions": attributions}


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        message = {"role": "assistant", "content": json.dumps(reply_to(body["messages"][1]["content"]))}
        usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
        content = {"id": "x", "object": "chat.completion", "created": 1, "model": body["model"], "usage": usage,
                   "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}  # fmt: skip
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        """Keep quiet."""


@contextmanager
def judge_server() -> Iterator[str]:
    """Address for judge.api_base."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
