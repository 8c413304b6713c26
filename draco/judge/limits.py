"""Requests and tokens a minute, kept exactly: no window of 60 seconds ever holds more than the limit.

Callers are served in the order in which they came. What a call will use is estimated before it is sent and corrected
when its reply is there. A provider's Retry-After holds back everybody, not only the call that was told so.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable

__all__ = ["Pace", "Use"]

_WINDOW_S = 60.0


class Use:
    """One request in the window."""

    __slots__ = ("at", "tokens")

    def __init__(self, at: float, tokens: int) -> None:
        self.at, self.tokens = at, tokens


class Pace:
    """Holds calls back until the limits allow them. One event loop at a time.

    Args:
        requests_per_min, tokens_per_min: None = unlimited.
        clock: seconds; replaced in tests.
        sleep: waits so many seconds; replaced in tests.
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
        self._window: deque[Use] = deque()
        self._not_before = float("-inf")
        self._turn: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None

    def hold(self, seconds: float) -> None:
        """Send nothing for so long: the provider said Retry-After."""
        self._not_before = max(self._not_before, self._clock() + seconds)

    async def enter(self, tokens: int) -> Use:
        """Wait for one's turn and take it.

        Args:
            tokens: expected use. A call larger than the whole limit goes when nothing else is in the window.

        Returns:
            the entry; set its `tokens` when the true use is known.
        """
        if self.requests_per_min is None and self.tokens_per_min is None and self._clock() >= self._not_before:
            return Use(0.0, tokens)  # nothing to keep
        async with self._lock():
            while (wait := self._wait(tokens)) > 0:
                await self._sleep(wait)
            use = Use(self._clock(), tokens)
            self._window.append(use)
            return use

    def _lock(self) -> asyncio.Lock:
        loop = asyncio.get_running_loop()
        if self._turn is None or self._turn[0] is not loop:
            self._turn = (loop, asyncio.Lock())
        return self._turn[1]

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
        used = sum(use.tokens for use in self._window)
        if self.tokens_per_min is not None and used + tokens > self.tokens_per_min:
            return oldest
        return 0.0
