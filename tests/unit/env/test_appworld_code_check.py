"""The check of an agent's code, and what counts as code: words for the agent, before anything runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draco.env.appworld.inside import code_check
from draco.env.base import CODE

REFUSED = r"""
import os
import appworld
import pathlib
from pathlib import Path
import socket
import subprocess
import sys
import json.codecs
from json import codecs
from random import _os
import builtins
__import__("os")
open("data/tasks")
eval("1")
exec("1")
print(globals())
().__class__.__base__.__subclasses__()
apis.venmo.login.__closure__
json.codecs.open("x")
random._os.listdir(".")
uuid.os.listdir(".")
getattr(json, "cod" + "ecs")
g = getattr; g(json, "codecs")
list(map(getattr, [json], ["codecs"]))
getattr(json, "__dict__")
requester.request("admin", "x")
ApiCollection.load()
get_ipython().system("ls")
(lambda: 0).__code__
match json:\n  case object(__class__=c): pass
f"{json.__loader__}"
def apis(): pass
operator.attrgetter("__class__")(json)
global __builtins__
try:\n  1/0\nexcept Exception as e:\n  e.__traceback__.tb_frame.f_globals
""".strip().splitlines()


ALLOWED = r"""
print(apis.supervisor.show_profile())
import json, re, datetime
from collections import Counter, defaultdict
from datetime import datetime, timedelta
class A:\n  def __init__(self): self.x = 1
print(type(3).__name__)
getattr(json, "dumps")({})
x = {"open": 1}; x["open"]
def f(:
from collections.abc import Iterator
re.compile("x").findall("xx")
pendulum.now().add(days=1)
""".strip().splitlines()


@pytest.mark.parametrize("code", REFUSED)
def test_refused(code: str) -> None:
    assert code_check.refusal(code.replace("\\n", "\n")), code


@pytest.mark.parametrize("code", ALLOWED)
def test_allowed(code: str) -> None:
    assert code_check.refusal(code.replace("\\n", "\n")) == ""


@given(st.text())
def test_the_check_answers_whatever_it_is_given(code: str) -> None:
    assert isinstance(code_check.refusal(code), str)


def test_the_check_survives_monsters() -> None:
    for code in ("(" * 100_000, "-" * 100_000 + "1", "x" + ".a" * 50_000, "[" * 5000 + "]" * 5000):
        assert isinstance(code_check.refusal(code), str)


@pytest.mark.parametrize(
    ("text", "bodies"),
    [
        ("<think>maybe <code>a</code></think><code>b</code>", ["b"]),
        ("maybe <code>a</code></think>\n\n<code>b</code>", ["b"]),  # the template had opened <think> already
        ("no thought <code>a</code>", ["a"]),
        ("<code>a</code> <think>then</think>", ["a"]),
        ("<code>print('</think>')</code>", ["print('</think>')"]),
    ],
)
def test_what_is_thought_is_not_run(text: str, bodies: list[str]) -> None:
    spans = CODE.parse(text)
    assert [s.body for s in spans] == bodies
    assert all(text[s.start : s.stop] == f"<code>{s.body}</code>" for s in spans)
