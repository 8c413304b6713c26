"""The packaged prompt texts, and how the messages of a call are made of them.

A prompt begins with what calls have in common: the system text with the environment's caveats, then the quoted
transcript, then the criteria; the instructions of the call come last. So `propose_rollout`, `score` and `attribute` on
one trajectory have a common prefix, which a provider's prefix cache can hold. In the lean view the instructions of all
calls are in the system text, one prefix for the whole run, and a prompt ends with the name of its call.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from draco.core.types import Criterion
from draco.judge.transcript import CONTROL

__all__ = ["CALLS", "PHASES", "criteria_block", "messages", "prompt_text", "prompt_version"]

#: the paper's five kinds of call, in the order in which a group makes them
PHASES = ("propose_task", "propose_rollout", "merge", "score", "attribute")
#: every kind that a rubric makes, in the order in which they are made
CALLS = ("propose_task", "propose_rollout", "merge", "reduce", "score", "assess", "attribute")
#: line breaks that json.dumps leaves as they are
_UNSAFE = {"\x7f": "\\u007f", "\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}


@cache
def prompt_text(name: str) -> str:
    """Text of a packaged prompt: `system`, `lean` or the name of a call."""
    return (files("draco.judge") / "prompts" / f"{name}.md").read_text(encoding="utf-8")


@cache
def prompt_version(phase: str, *, lean: bool = False) -> str:
    """16 hex digits over the packaged texts that a call of this phase is made of; a lean one has those of all calls."""
    texts = f"{prompt_text('system')}\0{prompt_text('lean' if lean else phase)}"
    return hashlib.sha256(texts.encode()).hexdigest()[:16]


@cache
def _system(caveats: tuple[str, ...], more: str = "") -> str:
    text = prompt_text("system") + more
    if caveats:
        text += "\nWhat to know about this environment\n\n" + "".join(f"- {caveat}\n" for caveat in caveats)
    return text


def _hidden(token: re.Match[str]) -> str:
    """A control token with its second character as a JSON escape: the same string, another spelling."""
    rest = token[2]
    return token[0] if rest[0] == "\\" else f"{token[1]}\\u{ord(rest[0]):04x}{rest[1:]}"


def criteria_block(
    criteria: Sequence[Criterion],
    heading: str,
    extra: Sequence[Mapping[str, Any]] = (),
    without: Collection[str] = (),
) -> str:
    """Criteria as one JSON object a line inside a fence.

    JSON keeps line breaks inside strings escaped, so that no criterion text can close the fence. Criteria are written
    by a judge that read untrusted text: control tokens are escaped in them as well.

    Args:
        extra: further fields for each criterion; empty for none.
        without: names of fields to leave out.
    """
    rows = []
    for k, criterion in enumerate(criteria):
        row: dict[str, Any] = {
            "title": criterion.title,
            "description": criterion.description,
            "evaluator_instruction": criterion.evaluator_instruction,
        }
        if criterion.grounding_references:
            row["grounding_references"] = list(criterion.grounding_references)
        if criterion.evidence:
            row["evidence"] = criterion.evidence
        if extra:
            row.update(extra[k])
        text = json.dumps({name: value for name, value in row.items() if name not in without}, ensure_ascii=False)
        for found, written in _UNSAFE.items():
            if found in text:
                text = text.replace(found, written)
        rows.append(CONTROL.sub(_hidden, text))
    return f"## {heading}\n```json\n[{(','.join(chr(10) + row for row in rows))}\n]\n```\n"


def messages(
    phase: str, material: Sequence[str], caveats: tuple[str, ...], *, lean: bool = False
) -> list[dict[str, str]]:
    """System and user message of one call: `material` in order, then the call's instructions.

    Args:
        material: blocks of the transcript and of criteria.
        lean: the instructions of all calls are in the system message, and the user message ends with the call's name.
    """
    last = f"# Call: {phase}\nAnswer as {phase} in your instructions says: one JSON object and nothing else.\n"
    system = _system(caveats, prompt_text("lean") if lean else "")
    user = "\n".join((*material, last if lean else prompt_text(phase)))
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]
