"""An agent and a user simulator behind HTTP on this machine, for tau2: scripted, with token counts.

The agent looks something up once, then says that it is done; the user asks, and stops at the agent's last word. Tasks
whose gold end state is the first one thus succeed, all others fail. The model `broken` writes arguments that are no
JSON.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DONE = "That is all that I can do for you."
AGENT_TOKENS, USER_TOKENS = (200, 20), (100, 10)


def agent(messages: list[dict[str, Any]], broken: bool) -> dict[str, Any]:
    """The agent's next message."""
    if any(m["role"] == "tool" for m in messages):
        return {"role": "assistant", "content": DONE}
    call = {"name": "list_all_airports", "arguments": '{"a": ' if broken else "{}"}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": f"call_{len(messages)}", "type": "function", "function": call}],
    }


def user(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The user simulator's; to it the agent is the user."""
    heard = str(messages[-1].get("content"))
    return {"role": "assistant", "content": "###STOP###" if DONE in heard else "Which airports are there?"}


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        acting = bool(body.get("tools"))
        read, written = AGENT_TOKENS if acting else USER_TOKENS
        message = agent(body["messages"], body["model"] == "broken") if acting else user(body["messages"])
        usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if "tool_calls" in message else "stop"}
        content = {"id": "x", "object": "chat.completion", "created": 1, "model": body["model"], "usage": usage,
                   "choices": [choice]}  # fmt: skip
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        """Keep quiet."""


@contextmanager
def tau_server() -> Iterator[str]:
    """Address of both."""
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
