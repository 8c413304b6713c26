"""From the text of an action to a checked call. Nothing is executed: code is parsed with `ast`, literals only."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

from draco.env.base import CODE, TOOL_CALL, ActionFormat, parse_tool_call
from draco.env.desk.apps import APIS, NUMBERS

__all__ = ["MAX_CHARS", "BadCall", "Call", "parse", "write"]

#: longer actions are refused unread, which also bounds the archive
MAX_CHARS = 2000


@dataclass(frozen=True, slots=True)
class Call:
    """A call whose name and argument names and types are right."""

    api: str
    args: dict[str, Any]  #: in the order of the table; str or int


class BadCall(ValueError):
    """The action is no valid call; the message is what the agent is told after `error: `."""


def parse(body: str, style: ActionFormat) -> Call:
    """The call that an action body asks for.

    Raises:
        BadCall: malformed, not literal, unknown, or with wrong arguments.
    """
    if len(body) > MAX_CHARS:
        raise BadCall("too long")
    api, args = _json(body) if style.name == TOOL_CALL.name else _code(body)
    params = APIS.get(api)
    if params is None:
        raise BadCall("no such api")
    if set(args) != set(params):
        raise BadCall("bad arguments")
    return Call(api, {name: _typed(name, args[name]) for name in params})


def _json(body: str) -> tuple[str, dict[str, Any]]:
    try:
        return parse_tool_call(body)
    except (ValueError, RecursionError):
        raise BadCall("write one JSON call") from None


def _code(body: str) -> tuple[str, dict[str, Any]]:
    usage = BadCall("write one call apis.app.name(key=value)")
    try:
        tree = ast.parse(body.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise usage from None
    match tree:
        case ast.Call(
            func=ast.Attribute(value=ast.Attribute(value=ast.Name(id="apis"), attr=app), attr=name),
            args=[],
            keywords=keywords,
        ):
            pass
        case _:
            raise usage
    args: dict[str, Any] = {}
    for keyword in keywords:
        if keyword.arg is None or not isinstance(keyword.value, ast.Constant):
            raise BadCall("literals only")
        args[keyword.arg] = keyword.value.value
    return f"{app}.{name}", args


def _typed(name: str, value: Any) -> str | int:
    if name in NUMBERS:
        if isinstance(value, str) and len(value) <= 9 and value.isascii() and value.isdigit():
            return int(value)
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**9:
            return value
    elif isinstance(value, str):
        return value
    raise BadCall("bad arguments")


def write(call: Call, style: ActionFormat) -> str:
    """The call as an agent writes it, tags included."""
    if style.name == CODE.name:
        args = ", ".join(f'{name}="{v}"' if isinstance(v, str) else f"{name}={v}" for name, v in call.args.items())
        return f"{style.open}apis.{call.api}({args}){style.close}"
    args = ", ".join(f'"{name}": "{v}"' if isinstance(v, str) else f'"{name}": {v}' for name, v in call.args.items())
    return f'{style.open}{{"name": "{call.api}", "arguments": {{{args}}}}}{style.close}'
