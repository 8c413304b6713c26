"""Requests and tokens a minute, kept exactly: no window of 60 seconds ever holds more than the limit.

Callers are served in the order in which they came. What a request will use is estimated before it is sent and corrected
when its reply is there. After a provider's Retry-After nothing is sent to it. aiolimiter is not used: its leaky bucket
lets twice the limit through within one minute, and its estimates cannot be corrected.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Entry", "Pace", "PerLoop"]

T = TypeVar("T")

_WINDOW_S = 60.0


class PerLoop(Generic[T]):
    """A lock or semaphore of the running event loop; another loop gets another one."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: tuple[asyncio.AbstractEventLoop, T] | None = None

    def __call__(self) -> T:
        loop = asyncio.get_running_loop()
        if self._made is None or self._made[0] is not loop:
            self._made = (loop, self._make())
        return self._made[1]


@dataclass(slots=True)
class Entry:
    """One request in the window."""

    at: float
    tokens: int  #: estimated; set the true number when it is known


class Pace:
    """Holds requests back until the limits allow them. One event loop at a time.

    Args:
        requests_per_min, tokens_per_min: None = unlimited.
    """

    def __init__(
        self,
        requests_per_min: float | None = None,
        tokens_per_min: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.requests_per_min, self.tokens_per_min = requests_per_min, tokens_per_min
        self._clock, self._sleep = clock, sleep
        self._window: deque[Entry] = deque()
        self._not_before = float("-inf")
        self._turn = PerLoop(asyncio.Lock)

    def hold(self, seconds: float) -> None:
        """Send nothing for so long: the provider said Retry-After."""
        self._not_before = max(self._not_before, self._clock() + seconds)

    async def enter(self, tokens: int) -> Entry:
        """Wait until a request of `tokens` may be sent. One larger than the limit goes when the window is empty."""
        if self.requests_per_min is None and self.tokens_per_min is None and self._clock() >= self._not_before:
            return Entry(0.0, tokens)
        async with self._turn():
            while (wait := self._wait(tokens)) > 0:
                await self._sleep(wait)
            entry = Entry(self._clock(), tokens)
            self._window.append(entry)
            return entry

    def _wait(self, tokens: int) -> float:
        """Seconds until the window may have room; 0 = it has."""
        now = self._clock()
        while self._window and self._window[0].at <= now - _WINDOW_S:
            self._window.popleft()
        if now < self._not_before:
            return self._not_before - now
        if not self._window:
            return 0.0
        oldest = self._window[0].at + _WINDOW_S - now
        if self.requests_per_min is not None and len(self._window) + 1 > self.requests_per_min:
            return oldest
        used = sum(entry.tokens for entry in self._window)
        if self.tokens_per_min is not None and used + tokens > self.tokens_per_min:
            return oldest
        return 0.0
