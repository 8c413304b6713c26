"""JSON lines between the trainer, the fork server and its children."""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Any

__all__ = ["Channel", "Failed", "Real"]

_MAX_LINE = 64 << 20


class Real:
    """Functions that freezegun and an agent's code replace in modules. In a class they stay what they are."""

    monotonic = staticmethod(time.monotonic)
    dumps, loads, rename = staticmethod(json.dumps), staticmethod(json.loads), staticmethod(os.rename)


class Failed(Exception):
    """An error with a kind of the protocol."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind

    @property
    def answer(self) -> dict[str, Any]:
        """The message that reports it."""
        return {"error": {"kind": self.kind, "message": str(self)}}


class Channel:
    """JSON lines over a socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self._buffer = sock, bytearray()

    def send(self, message: dict[str, Any]) -> None:
        self.sock.sendall(Real.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """Messages that have come in completely; None at the end of the stream, or where it is no JSON line."""
        try:
            data = self.sock.recv(1 << 16)
        except (ConnectionError, OSError):
            return None
        if not data:
            return None
        self._buffer += data
        if len(self._buffer) > _MAX_LINE:
            return None
        *lines, rest = bytes(self._buffer).split(b"\n")
        self._buffer = bytearray(rest)
        try:
            messages = [Real.loads(line) for line in lines if line]
        except ValueError:
            return None
        return messages if all(isinstance(m, dict) for m in messages) else None
