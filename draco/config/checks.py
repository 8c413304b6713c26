"""Checks of single options, so that a bad value is one line before any rollout. Imports nothing heavy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from draco.core.errors import ConfigError

__all__ = ["listed", "number", "one_of", "switch", "whole"]


def whole(name: str, value: Any, minimum: int, maximum: int | None = None, *, optional: bool = False) -> None:
    """Check for an integer in [minimum, maximum]; with `optional`, null too.

    Raises:
        ConfigError: anything else; 2.5, "3" and true are no integers.
    """
    if value is None and optional:
        return
    right = isinstance(value, int) and not isinstance(value, bool)
    if not right or value < minimum or (maximum is not None and value > maximum):
        wanted = f"an integer ≥ {minimum}" if maximum is None else f"an integer from {minimum} to {maximum}"
        raise ConfigError(f"{name} is {_shown(value)}; expected {wanted}{_or_null(optional)}")


def number(
    name: str,
    value: Any,
    minimum: float,
    maximum: float = math.inf,
    *,
    above: bool = False,
    infinite: bool = False,
    optional: bool = False,
) -> None:
    """Check for a number in [minimum, maximum]; `above` leaves the minimum out; with `optional`, null too.

    Raises:
        ConfigError: anything else; nan never is right, inf only where `infinite` allows it.
    """
    if value is None and optional:
        return
    right = isinstance(value, int | float) and not isinstance(value, bool)
    if right:
        right = value > minimum if above else value >= minimum
        right = right and value <= maximum and (infinite or math.isfinite(value))
    if not right:
        wanted = f"a number {'>' if above else '≥'} {minimum:g}"
        wanted += f" and ≤ {maximum:g}" if math.isfinite(maximum) else ""
        raise ConfigError(f"{name} is {_shown(value)}; expected {wanted}{_or_null(optional)}")


def switch(name: str, value: Any) -> None:
    """Check for true or false: the text "no" would count as true.

    Raises:
        ConfigError: anything else.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {_shown(value)}; expected true or false")


def one_of(name: str, value: Any, choices: Sequence[str]) -> None:
    """Check for one of some names.

    Raises:
        ConfigError: anything else.
    """
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}; expected {', '.join(choices[:-1])} or {choices[-1]}")


def listed(name: str, value: Any) -> None:
    """Check for a list: a text would count as the list of its letters.

    Raises:
        ConfigError: anything else.
    """
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"{name} is {_shown(value)}; expected a list, as in '{name}=[A, B]'; [] is none")


def _shown(value: Any) -> str:
    return "null" if value is None else repr(value) if isinstance(value, str) else str(value)


def _or_null(optional: bool) -> str:
    return ", or null" if optional else ""
