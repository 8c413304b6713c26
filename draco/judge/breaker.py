"""A circuit breaker: which models gave no reply lately, so that a dead one does not cost every call its retries.

closed ── a call gives the model up ──→ open: not asked for `rest_s` ──→ one call tries it, once
   ↑                                      ↑                                   │
   └────────────── it replied ────────────┼───────────────────────────────────┤
                                          └── it did not: twice as long ──────┘
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Literal

__all__ = ["Breaker"]

log = logging.getLogger("draco")

_LONGEST_S = 600.0


@dataclass(slots=True)
class _State:
    failures: int = 0  #: in a row; 0 = closed
    until: float = 0.0  #: when it may be tried again
    trying: bool = False


class Breaker:
    """Knows the models that have a fallback. One event loop at a time.

    Args:
        rest_s: first pause; doubles with every trial that fails, up to ten minutes.
        clock: seconds; replaced in tests.
    """

    def __init__(self, rest_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rest_s, self._clock = rest_s, clock
        self._states: dict[Hashable, _State] = {}

    def open(self, place: Hashable) -> bool:
        """Whether the model is not asked at present."""
        return place in self._states and self._states[place].failures > 0

    def enter(self, place: Hashable) -> Literal["ask", "try", "pass"]:
        """What the next call should do: ask with all its retries, try once, or pass on to the fallback."""
        state = self._states.setdefault(place, _State())
        if not state.failures:
            return "ask"
        if state.trying or self._clock() < state.until:
            return "pass"
        state.trying = True
        return "try"

    def replied(self, place: Hashable) -> None:
        """It gave a reply, or refused one prompt: it is there."""
        state = self._states.setdefault(place, _State())
        if state.failures:
            log.warning("%s answers again", _name(place))
        state.failures, state.trying = 0, False

    def gave_up(self, place: Hashable, tried: bool, why: str) -> None:
        """It gave no reply. Calls that began before another call found this out change nothing.

        Args:
            tried: by a call that `enter` had told to try.
            why: for the log.
        """
        state = self._states.setdefault(place, _State())
        if state.failures and not tried:
            return
        state.failures += 1
        state.trying = False
        pause = min(self.rest_s * 2.0 ** (state.failures - 1), _LONGEST_S)
        state.until = self._clock() + pause
        log.warning("%s gives no reply (%s): its fallback is asked for %.0f s", _name(place), why, pause)

    def left(self, place: Hashable) -> None:
        """A trial ended without saying anything about the model (cancelled, out of time)."""
        if place in self._states:
            self._states[place].trying = False


def _name(place: Hashable) -> str:
    return str(place[0]) if isinstance(place, tuple) else str(place)
