"""From the text of a prompt to blocks, criteria and calls.

The content of a quoted block is read as a transcript and as nothing else. The kind of call and the criteria are read
after the last block alone, and a block ends at its own code, which its content cannot contain.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

__all__ = ["Call", "Prompt", "Reading", "read_prompt", "read_transcript"]

_BEGIN = re.compile(r"^<<<BEGIN (OPENING|TRANSCRIPT|STEPS|DIGEST) ([0-9a-f]+)>>>\n", re.MULTILINE)
_PHASE = re.compile(r"^# Call: (\w+)$", re.MULTILINE)
_CRITERIA = re.compile(r"^## [^\n]*\n```json\n(.*?)\n```$", re.MULTILINE | re.DOTALL)
_HEAD = re.compile(r"^\[(?:(system|user)|step (\d+)\] (action|observation):|transcript ends\])\]?$", re.MULTILINE)
_ACTION = re.compile(r"<code>(.*?)</code>|<tool_call>(.*?)</tool_call>", re.DOTALL)
_THINK = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_CODE = re.compile(r"\s*apis\.(\w+\.\w+)\((.*)\)\s*", re.DOTALL)
_ARGUMENT = re.compile(r'\s*(\w+)\s*=\s*(?:"([^"\\]*)"|\'([^\'\\]*)\'|(-?\d+))\s*(?:,|$)')


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a prompt holds."""

    phase: str
    blocks: tuple[str, ...]  #: transcripts (or the opening alone), in order, wherever their parts stood
    criteria: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One call that the agent made."""

    step: int
    name: str  #: `app.function`; empty when the action could not be parsed
    args: dict[str, Any]
    answer: str

    @property
    def ok(self) -> bool:
        """True if the call was carried out."""
        return bool(self.name) and not self.answer.startswith("error:") and self.answer != ""


@dataclass(frozen=True, slots=True)
class Reading:
    """A transcript, read."""

    request: str  #: the user's message
    steps: int  #: M
    calls: tuple[Call, ...]


def read_prompt(text: str) -> Prompt:
    """Take a user message of the judge's prompt apart.

    Raises:
        ValueError: it is not one of a judge's calls.
    """
    blocks: list[tuple[str, str]] = []
    at = 0
    while found := _BEGIN.search(text, at):
        end = text.find(f"<<<END {found[1]} {found[2]}>>>", found.end())
        if end < 0:
            raise ValueError("a quoted block is not closed")
        blocks.append((found[1], text[found.end() : end]))
        at = end
    phases = _PHASE.findall(text, at)
    if len(phases) != 1 or not (blocks or phases == ["reduce"]):
        raise ValueError("not one of the calls of a judge")
    listed = _CRITERIA.search(text, at)
    return Prompt(phases[0], _transcripts(blocks), tuple(json.loads(listed[1])) if listed else ())


def _transcripts(blocks: list[tuple[str, str]]) -> tuple[str, ...]:
    """Complete transcripts: an opening belongs to the steps and digests that follow it."""
    opening = "".join(content for kind, content in blocks if kind == "OPENING")
    rest = [content if kind == "TRANSCRIPT" else opening + content for kind, content in blocks if kind != "OPENING"]
    return tuple(rest) if rest else (opening,)


@lru_cache(maxsize=1024)
def read_transcript(text: str) -> Reading:
    """Read the text of one block."""
    heads = list(_HEAD.finditer(text))
    request, calls, action, steps = "", [], "", 0
    for head, after in zip(heads, [*heads[1:], None], strict=True):
        body = text[head.end() + 1 : after.start() if after else len(text)].rstrip("\n")
        if head[1] == "user" and not steps:
            request = body
        elif head[3] == "action":
            steps, action = int(head[2]), body
            follows = after is not None and after[3] == "observation"
            if not follows:
                calls += _calls(steps, action, "")
        elif head[3] == "observation":
            calls += _calls(int(head[2]), action, body)
    return Reading(request, steps, tuple(calls))


def _calls(step: int, action: str, observation: str) -> list[Call]:
    found = _ACTION.findall(_THINK.sub("", action))
    if not found:
        # A turn without an action that was answered: its call was malformed, or one was due and is missing.
        return [Call(step, "", {}, observation)] if observation else []
    # Several calls a step: every answer is one line.
    answers = observation.split("\n") if len(found) > 1 else [observation]
    answers += [""] * (len(found) - len(answers))
    return [Call(step, *_parse(code, tool), answer) for (code, tool), answer in zip(found, answers, strict=False)]


def _parse(code: str, tool: str) -> tuple[str, dict[str, Any]]:
    """Name and arguments; an empty name for what cannot be parsed."""
    try:
        if tool:
            call = json.loads(tool)
            name, args = call["name"], call.get("arguments", {})
            return (name, _plain(args)) if isinstance(name, str) and isinstance(args, dict) else ("", {})
        match = _CODE.fullmatch(code)
        if match is None:
            return "", {}
        return match[1], _arguments(match[2])
    except (ValueError, KeyError, TypeError, SyntaxError, AttributeError, RecursionError, AssertionError):
        return "", {}


def _plain(args: dict[str, Any]) -> dict[str, Any]:
    """Arguments that can be compared and hashed, whatever the agent wrote."""
    return {name: value if isinstance(value, (str, int, float)) else str(value) for name, value in args.items()}


def _arguments(text: str) -> dict[str, Any]:
    args: dict[str, Any] = {}
    at = 0
    while at < len(text.rstrip()):
        match = _ARGUMENT.match(text, at)
        if match is None:  # unusual but legal literals
            call = ast.parse(f"f({text})", mode="eval").body
            assert isinstance(call, ast.Call)
            return _plain({str(k.arg): ast.literal_eval(k.value) for k in call.keywords})
        args[match[1]] = int(match[4]) if match[4] is not None else (match[2] if match[2] is not None else match[3])
        at = match.end()
    return args
