"""Arguments of scripts: `key=value` like everywhere in draco, `--key value` and bare words beside it. And their end."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn

from draco.core.errors import ConfigError, DracoError
from draco.core.llm.money import Prices

__all__ = ["number", "parse", "prices_of", "run_main", "share", "split", "whole"]


def run_main(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Call a script's `main` with the command line, and end the process by what it returns: None is 0.

    One of our errors is one line on stderr and exit status 2. --help prints what the script says of itself.
    """
    if {"-h", "--help"} & set(sys.argv[1:]):
        print((sys.modules[main.__module__].__doc__ or "").strip())
        sys.exit(0)
    try:
        sys.exit(main(sys.argv[1:]))
    except DracoError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def parse(
    arguments: Sequence[str], options: Iterable[str], prefixes: Sequence[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """Bare words, and options by name.

    Args:
        arguments: of the command line.
        options: names that are known.
        prefixes: names that may begin so are known too, such as `judge.`.

    Raises:
        ConfigError: an unknown option, or one without a value.
    """
    known = set(options)
    words: list[str] = []
    given: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word.startswith("--"):
            name, has_value, value = word[2:].partition("=")
            if not has_value:
                if not rest:
                    raise ConfigError(f"--{name} needs a value")
                value = rest.pop(0)
        else:
            name, has_value, value = word.partition("=")
            # A path may hold a `=`, as step=000012 does; then its name is no word.
            if not has_value or not name.replace(".", "").replace("_", "").isalnum() or "/" in name:
                words.append(word)
                continue
        name = name.replace("-", "_")
        if name not in known and not any(name.startswith(p) for p in prefixes):
            raise ConfigError(f"unknown option {name}; expected {', '.join(sorted(known))}")
        given[name] = value
    return words, given


def split(arguments: Sequence[str], options: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """A script's own options by name, and the rest, which are options of train.py.

    Args:
        arguments: of the command line.
        options: the script's own.

    Raises:
        ConfigError: something that is no `key=value`.
    """
    known = set(options)
    own: dict[str, str] = {}
    rest: list[str] = []
    for argument in arguments:
        name, has_value, value = argument.partition("=")
        name = name.removeprefix("--")
        if not has_value and not argument.startswith("~"):  # ~key takes an option of train.py away
            raise ConfigError(f"{argument}: expected key=value; own options are {', '.join(sorted(known))}")
        if name in known:
            own[name] = value
        else:
            rest.append(argument)
    return own, rest


def whole(given: Mapping[str, str], name: str, default: int, least: int = 0) -> int:
    """A whole number from `least`, or `default` where the option is not given.

    Raises:
        ConfigError: not that; the option is named.
    """
    text = given.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        raise ConfigError(f"{name}={text}: expected a whole number from {least}")
    return int(text)


def number(given: Mapping[str, str], name: str, default: float) -> float:
    """A finite number above 0, or `default` where the option is not given.

    Raises:
        ConfigError: not that; the option is named.
    """
    return _real(given, name, default, lambda value: math.isfinite(value) and value > 0, "above 0")


def share(given: Mapping[str, str], name: str, default: float) -> float:
    """A number from 0 to 1, or `default` where the option is not given.

    Raises:
        ConfigError: not that; the option is named.
    """
    return _real(given, name, default, lambda value: 0 <= value <= 1, "from 0 to 1")


def _real(given: Mapping[str, str], name: str, default: float, valid: Callable[[float], bool], expected: str) -> float:
    text = given.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not valid(value):
        raise ConfigError(f"{name}={text}: expected a number {expected}")
    return value


def prices_of(text: object, name: str = "prices") -> Prices | None:
    """Prices of tokens read, read again from a cache, and written; None where nothing is given.

    Args:
        text: two or three numbers with commas; of two, reading again costs what reading does.
        name: the option's.

    Raises:
        ConfigError: not that.
    """
    if text is None:
        return None
    try:
        values = [float(v) for v in str(text).split(",")]
        read, *again, written = values
        if len(again) > 1 or not all(0 <= v < math.inf for v in values):
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"{name}={text}: expected READ,WRITTEN or READ,READ_AGAIN,WRITTEN in USD per million, each 0 or more"
        ) from None
    return Prices(read, written, *again)
