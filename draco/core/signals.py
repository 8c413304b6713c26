"""Ctrl-C, SIGTERM and a scheduler's warning end a job between steps, never in the middle of a state change.

    with listening():          within: signals raise `Interrupted`
        hold()                 before the weights change: signals wait
        release()              the step's archive and metrics are written: raise `Interrupted` for a signal that waited

A second Ctrl-C ends the process at once. That is safe: everything on disk is complete or absent (`draco.core.files`).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["EXIT_INTERRUPTED", "EXIT_REQUEUE", "Interrupted", "hold", "listening", "release", "uninterrupted"]

EXIT_INTERRUPTED = 130  #: Ctrl-C
EXIT_REQUEUE = 75  #: EX_TEMPFAIL of sysexits.h: a scheduler stopped the run, its state is saved; start it again

#: What a scheduler sends before it takes the machine away. SLURM's --signal uses the last two.
_REQUEUE = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Interrupted(BaseException):
    """A signal ended the job. Not a KeyboardInterrupt: Lightning would answer that with exit status 1.

    Attributes:
        number: of the signal.
        status: exit status that tells a launcher what to do.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number
        self.status = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_REQUEUE


class _State:
    def __init__(self) -> None:
        self.held = False
        self.received: int | None = None  #: the first signal

    def handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received is not None:
            os._exit(EXIT_INTERRUPTED)
        if self.received is None:  # launchers send several signals; only the first one counts
            self.received = number
            if not self.held:
                raise Interrupted(number)


_state = _State()


@contextmanager
def listening() -> Iterator[None]:
    """Signals raise `Interrupted` within. Outside the main thread this does nothing.

    A signal that the process ignores (nohup, a background job) stays ignored.
    """
    global _state
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _state = _State()
    numbers = [s for s in (signal.SIGINT, *_REQUEUE) if signal.getsignal(s) is not signal.SIG_IGN]
    try:
        with _handled(numbers, _state.handle):
            yield
    finally:
        _state = _State()


def hold() -> None:
    """Let signals wait until `release`, so that the current step is completed and recorded."""
    _state.held = True


def release() -> None:
    """Stop holding signals.

    Raises:
        Interrupted: a signal arrived since `listening` began.
    """
    _state.held = False
    if _state.received is not None:  # perhaps raised before, and swallowed by a destructor or a callback
        raise Interrupted(_state.received)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """SIGINT and SIGTERM wait within; the last one is delivered at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []
    try:
        with _handled((signal.SIGINT, signal.SIGTERM), lambda number, frame: waiting.append(number)):
            yield
    finally:
        if waiting:
            signal.raise_signal(waiting[-1])


@contextmanager
def _handled(numbers: Any, handler: Any) -> Iterator[None]:
    """Signals go to `handler` within."""
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
