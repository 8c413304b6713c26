"""Ctrl-C and SIGTERM must never fall into the middle of a state change."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["uninterrupted"]


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back while the body runs; the last one is delivered right after it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        held.append(number)

    previous = {s: signal.signal(s, hold) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if held:
            signal.raise_signal(held[-1])
