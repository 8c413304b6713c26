"""The JSON object in a judge's reply.

A judge quotes text that an attacker may have written. So wherever a reply could be read in two ways, it is refused.

Small errors of syntax are mended. json_repair guesses: it drops a minus sign that is not ASCII, and takes the last of
two values under one name. So every number is replaced by a marker before the repair. After it, every number must be a
marker under its own name, each used once, and no name may occur more often in the text than in the result.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

import json_repair

__all__ = ["ReplyFault", "parse_json"]

#: longest reply, in characters, that is mended: the time that mending takes grows faster than its length
_LONGEST_MENDED = 200_000
#: most levels of brackets in one
_DEEPEST_MENDED = 50


class ReplyFault(ValueError):
    """The reply cannot be used as it is; the message is quoted to the judge in the corrective re-ask."""


def parse_json(text: str) -> tuple[Any, bool]:
    """The JSON object in a reply, and whether it had to be repaired.

    Bare JSON, a fenced block, prose around an object and a leading <think> part are all understood. Small errors of
    syntax (a comma too many, single quotes) are mended, numbers never. An object that breaks off is not completed, and
    of two values under one name, or two objects with the same names, none is chosen.

    Raises:
        ReplyFault: there is no JSON object in it, it breaks off, a name occurs twice in an object, another object has
            the same names, a number is not written as one, or it is too long.
    """
    given = text.strip()
    text, mendable = _answer(given)
    data, repaired = _object(text, mendable)
    if text != given:
        _no_rival(given.removesuffix(text), data)
    return data, repaired


def _object(text: str, mendable: bool) -> tuple[dict[str, Any], bool]:
    if not text:
        raise ReplyFault("the reply was empty")
    start, stop = text.find("{"), text.rfind("}")
    if start < 0:
        raise ReplyFault("the reply holds no JSON object")
    inner = objects(text)
    fenced = re.findall(r"```(?:json)?[^\S\n]*\n(.*?)\n?```", text, flags=re.DOTALL)
    for candidate in [text, *reversed(fenced), text[start : stop + 1], *sorted(inner, key=len, reverse=True)]:
        data = _strict(candidate)
        if data is None or (not data and candidate != text):
            continue
        before, _, after = text.partition(candidate)
        if elsewhere := spelled(f"{before}\n{after}", names(data)):
            raise ReplyFault(f"{min(elsewhere)!r} occurs outside the JSON object too; give one object, nothing else")
        return data, False
    if not mendable:
        raise ReplyFault("the reply is no valid JSON")
    if len(text) - start > _LONGEST_MENDED:
        raise ReplyFault(f"the reply is no valid JSON and too long to mend ({len(text) - start} characters)")
    still_open, deepest = _depths(text[start:])
    if stop < start or still_open > 0:
        raise ReplyFault("the JSON object breaks off before it ends; reply again in full, more briefly if need be")
    if deepest > _DEEPEST_MENDED:
        raise ReplyFault(f"the reply is no valid JSON and too deep to mend ({deepest} levels)")
    try:
        repaired = mended(inner[0] if len(inner) == 1 else text[start : stop + 1], text)
    except (ValueError, RecursionError) as error:
        raise ReplyFault(f"the reply is no valid JSON: {str(error)[:300]}") from None
    if isinstance(repaired, dict):
        return repaired, True
    raise ReplyFault("the reply holds no JSON object")


def _strict(text: str) -> dict[str, Any] | None:
    """The object that a text is; a name that occurs twice in one is a fault."""
    try:
        data = json.loads(text, object_pairs_hook=_once)
    except ReplyFault:
        raise
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _no_rival(cut: str, data: dict[str, Any]) -> None:
    """A judge may quote `</think>` and a verdict after its own verdict; then its own was taken for a thought."""
    if cut.startswith("<think>"):
        cut = cut.partition("</think>")[2]
    for candidate in objects(cut):
        other = _strict(candidate)
        if other is not None and other != data and other.keys() & data.keys():
            raise ReplyFault("another such JSON object precedes </think>; give one object, nothing else")


def _answer(text: str) -> tuple[str, bool]:
    """A reply without the thought before it, and whether its syntax may be mended.

    The evidence that a judge quotes may contain `</think>` and a verdict of the attacker. So a tag inside a JSON string
    ends no thought, and where several tags could end it, nothing is mended.
    """
    thought, tag, answer = text.rpartition("</think>")
    if not tag:
        return text, True
    if not text.startswith("<think>"):
        start, stop = text.find("{"), text.rfind("}")
        if start < text.find("</think>") < stop:
            try:
                json.loads(text[start : stop + 1])
            except (ValueError, RecursionError):
                pass
            else:
                return text, True
    return answer.strip(), thought.startswith("<think>") and "</think>" not in thought


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ReplyFault(f"{next(n for n in names if names.count(n) > 1)!r} occurs twice in one JSON object")
    return found


def _depths(text: str) -> tuple[int, int]:
    """Brackets open at the end, and most open at once, outside double-quoted strings (one may lack its end)."""
    depth = deepest = 0
    for token in TOKEN.finditer(text):
        depth += DEPTH.get(token[0], 0)
        deepest = max(depth, deepest)
    return depth, deepest


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
