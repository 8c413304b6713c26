"""How long judging was under way, where groups are judged at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["Busy"]


class Busy:
    """Seconds in which at least one of several jobs is under way. A job is a `with` block. Thread-safe.

    Args:
        clock: seconds; replaced in tests.

    >>> hands = iter([0.0, 4.0, 10.0, 11.0, 12.0])
    >>> busy = Busy(lambda: next(hands))
    >>> with busy:  # 0 to 4; the inner job adds nothing
    ...     with busy:
    ...         pass
    >>> with busy:  # 10 to 11
    ...     pass
    >>> busy.take()
    5.0
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._jobs, self._since, self._seconds = 0, 0.0, 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._jobs:
                self._since = self._clock()
            self._jobs += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._jobs -= 1
            if not self._jobs:
                self._seconds += self._clock() - self._since

    def restart(self) -> None:
        """Forget the time so far: until now the jobs under way only waited."""
        with self._lock:
            self._since, self._seconds = self._clock(), 0.0

    def take(self) -> float:
        """Seconds since the last `take`; those of jobs still under way come with a later one."""
        with self._lock:
            seconds, self._seconds = self._seconds, 0.0
            return seconds
