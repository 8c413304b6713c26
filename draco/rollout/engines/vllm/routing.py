"""Which server a request goes to: that of its group, which has the shared prompt in its cache; else the least loaded.

>>> router = Router(2, cooldown_s=5)
>>> [router.enter(group) for group in ("a", "a", "b")]
[0, 0, 1]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable

__all__ = ["Router"]


class Router:
    """Counts requests under way; never waits, never calls anything.

    Args:
        count: servers.
        cooldown_s: a lost server is not asked again for so long, unless there is no other.
        first: the server that is taken first among equals; ranks differ, so that they do not all start on server 0.
    """

    def __init__(
        self, count: int, *, cooldown_s: float, first: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.loads = [0] * count
        self._down_until = [0.0] * count
        self._home: dict[Hashable, int] = {}
        self._cooldown, self._first, self._clock = cooldown_s, first, clock

    def enter(self, group: Hashable, avoid: Collection[int] = ()) -> int:
        """A server for one more request of the group; `leave` it afterwards.

        Args:
            group: requests with the same key share the beginning of their prompts.
            avoid: servers that this request has just failed on.
        """
        home = self._home.get(group)
        if home is None or not self.up(home) or home in avoid:
            home = self._least_loaded(avoid)
            self._home[group] = home
        self.loads[home] += 1
        return home

    def leave(self, server: int) -> None:
        """The request was answered, or has failed there."""
        self.loads[server] -= 1

    def lost(self, server: int) -> None:
        """It did not answer: its groups find another home."""
        self._down_until[server] = self._clock() + self._cooldown

    def up(self, server: int) -> bool:
        """False while it rests after a loss."""
        return self._clock() >= self._down_until[server]

    def _least_loaded(self, avoid: Collection[int]) -> int:
        count = len(self.loads)
        order = [(self._first + i) % count for i in range(count)]
        usable = [s for s in order if self.up(s) and s not in avoid] or [s for s in order if self.up(s)]
        if not usable:
            return min(order, key=lambda s: self._down_until[s])
        return min(usable, key=lambda s: self.loads[s])
