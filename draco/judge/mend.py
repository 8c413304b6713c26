"""Mends small errors in the syntax of a reply's JSON, and makes sure that the mending decided nothing.

json_repair guesses: it drops a minus sign that is not ASCII, and takes the last of two values under one name. So every
number is replaced by a marker before the repair. After it, every number must be a marker under its own name, each used
once, and no name may occur more often in the text than in the result.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

import json_repair

__all__ = ["DEPTH", "TOKEN", "mended", "names", "objects", "spelled"]

_NUMBER = r"-?+(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?+(?:[eE][+-]?[0-9]++)?+"
_SPACE = r"[ \t\r\n]*+"
_LIST = rf"\[{_SPACE}{_NUMBER}(?:{_SPACE},{_SPACE}{_NUMBER})*+{_SPACE},?+{_SPACE}\]"
#: a name and the complete number, or list of numbers, under it
_NAMED = re.compile(
    rf"""(?<![\w"'])(["']?+)(\w{{1,60}}+)\1{_SPACE}:{_SPACE}({_NUMBER}|{_LIST})(?={_SPACE}[,}}\]])""", re.ASCII
)
#: a string, to the end of the text if it has none of its own, or a bracket: one pass, whatever the text
TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|[{}\[\]]', re.DOTALL)
DEPTH = {"{": 1, "[": 1, "}": -1, "]": -1}


def objects(text: str) -> list[str]:
    """The outermost objects in a text, valid or not, without empty ones and one that breaks off."""
    found, at = [], text.find("{")
    while at >= 0:
        depth, end = 0, -1
        for token in TOKEN.finditer(text, at):
            depth += DEPTH.get(token[0], 0)
            if depth <= 0:
                end = token.end()
                break
        if end < 0:
            break
        if text[at + 1 : end - 1].strip():
            found.append(text[at:end])
        at = text.find("{", end)
    return found


def names(data: Any) -> Iterator[str]:
    """Names of all objects in JSON data, as often as they occur."""
    todo = [data]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            yield from value
            todo.extend(value.values())
        elif isinstance(value, list):
            todo.extend(value)


def spelled(text: str, wanted: Iterable[str]) -> Counter[str]:
    """How often a text writes names as JSON keys, in quotes of any kind or in none."""
    either = "|".join(re.escape(name) for name in sorted(set(wanted), key=len, reverse=True))
    if not either:
        return Counter()
    pattern = rf"""(?:["'“”‘’]|(?<=[{{,]){_SPACE})({either})\\*+["'“”‘’]?+{_SPACE}:"""
    return Counter(re.findall(pattern, text))


def mended(text: str, reply: str) -> Any:
    """The value that a text with errors in its syntax stands for.

    Args:
        text: the object.
        reply: the text that the object is part of.

    Raises:
        ValueError: it could stand for several values; the message says why.
    """
    prefix = next(p for n in count() if (p := f"7{n:09d}") not in text)
    numbers: list[tuple[str, str]] = []  #: (name, as written)

    def mark(match: re.Match[str]) -> str:
        numbers.append((match[2], match[3]))
        head = match[0][: match.start(3) - match.start()]
        return f"{head}{prefix}{len(numbers) - 1:06d}"

    data = json_repair.loads(_NAMED.sub(mark, text), strict=True)
    used: Counter[int] = Counter()

    def written(match: re.Match[str]) -> str:
        used[int(match[1])] += 1
        return numbers[int(match[1])][1]

    def restored(value: Any, name: str | None) -> Any:
        if isinstance(value, dict):
            return {key: restored(item, key) for key, item in value.items()}
        if isinstance(value, list):
            return [restored(item, None) for item in value]
        if isinstance(value, str):
            return re.sub(prefix + "([0-9]{6})", written, value)
        if isinstance(value, bool) or value is None:
            return value
        at = int(str(value)[len(prefix) :]) if re.fullmatch(prefix + "[0-9]{6}", str(value)) else -1
        if at < 0 or numbers[at][0] != name:
            raise ValueError(f"the value of {name or 'an entry'!r} is not written as a JSON number")
        used[at] += 1
        return json.loads(re.sub(r",\s*\]", "]", numbers[at][1]))

    data = restored(data, None)
    for at, (name, number) in enumerate(numbers):
        if used[at] != 1:
            raise ValueError(f"{name!r}: {number} has no place of its own in the reply's JSON")
    there = Counter(names(data))
    for name, times in spelled(reply, there).items():
        if times != there[name]:
            raise ValueError(f"{name!r} occurs {times} times where the JSON has room for {there[name]}")
    if missing := set(there) - set(spelled(reply, there)):
        raise ValueError(f"{min(missing)!r} is not plainly a name")
    return data
