"""Ctrl-C, SIGTERM and a scheduler's warning end a job between whole steps, never in the middle of a state change.

    with listening():          the job: signals raise `Interrupted`
        hold()                 from the first change of the weights …
        release()              … to the end of the step, when its archive and metrics are written: raises what came

A second Ctrl-C ends the process at once, whatever it is doing: everything on disk is complete or not there.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["EXIT_INTERRUPTED", "EXIT_REQUEUE", "Interrupted", "hold", "listening", "release", "uninterrupted"]

EXIT_INTERRUPTED = 130  #: Ctrl-C
EXIT_REQUEUE = 75  #: EX_TEMPFAIL of sysexits.h: stopped from outside with its state saved; start it again to go on

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
        self.came: int | None = None  #: first signal

    def handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.came is not None:
            os._exit(EXIT_INTERRUPTED)
        if self.came is None:  # launchers send more than one; the first is being answered
            self.came = number
            if not self.held:
                raise Interrupted(number)


_state = _State()


@contextmanager
def listening() -> Iterator[None]:
    """Turn signals into `Interrupted` while the body runs. Off the main thread this does nothing.

    A signal that the caller ignores (nohup, a background job) stays ignored.
    """
    global _state
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _state = _State()
    taken = [s for s in (signal.SIGINT, *_REQUEUE) if signal.getsignal(s) is not signal.SIG_IGN]
    previous = {s: signal.signal(s, _state.handle) for s in taken}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        _state = _State()


def hold() -> None:
    """Hold signals back until `release`; the step under way will be completed and recorded."""
    _state.held = True


def release() -> None:
    """Deliver what came since `hold`.

    Raises:
        Interrupted: a signal came.
    """
    _state.held = False
    if _state.came is not None:  # raised already, if some destructor or callback swallowed it
        raise Interrupted(_state.came)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back while the body runs; the last one is delivered right after it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []

    def keep(number: int, frame: FrameType | None) -> None:
        held.append(number)

    previous = {s: signal.signal(s, keep) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if held:
            signal.raise_signal(held[-1])
