"""The packaged prompt texts and how a call's messages are put together.

What calls share stands first: the system text with the environment's caveats, then the quoted transcript, then the
criteria, then the instructions of the call. So `propose_rollout`, `score` and `attribute` on one trajectory have a
common prefix that a provider's prefix cache can hit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from draco.types import Criterion

__all__ = ["PHASES", "criteria_block", "messages", "prompt_text", "prompt_version"]

#: the five kinds of call, in the order in which a group makes them
PHASES = ("propose_task", "propose_rollout", "merge", "score", "attribute")


@cache
def prompt_text(name: str) -> str:
    """Text of a packaged prompt: `system` or one of `PHASES`."""
    return (files("draco.judge") / "prompts" / f"{name}.md").read_text(encoding="utf-8")


@cache
def prompt_version(phase: str) -> str:
    """16 hex digits over the two packaged texts that a call of this phase is made of."""
    return hashlib.sha256(f"{prompt_text('system')}\0{prompt_text(phase)}".encode()).hexdigest()[:16]


@cache
def _system(caveats: tuple[str, ...]) -> str:
    text = prompt_text("system")
    if caveats:
        text += "\nWhat to know about this environment\n\n" + "".join(f"- {caveat}\n" for caveat in caveats)
    return text


def criteria_block(criteria: Sequence[Criterion], heading: str, extra: Sequence[Mapping[str, Any]] = ()) -> str:
    """Criteria as one JSON object a line inside a fence.

    JSON keeps line breaks inside strings escaped, so that no criterion text can close the fence.

    Args:
        criteria: what to list, in this order.
        heading: the line above the fence.
        extra: further fields for each criterion; empty for none.
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
        rows.append(json.dumps(row, ensure_ascii=False))
    return f"## {heading}\n```json\n[{(','.join(chr(10) + row for row in rows))}\n]\n```\n"


def messages(phase: str, material: Sequence[str], caveats: tuple[str, ...]) -> list[dict[str, str]]:
    """System and user message of one call: shared text, then `material` in order, then the call's instructions."""
    user = "\n".join((*material, prompt_text(phase)))
    return [{"role": "system", "content": _system(caveats)}, {"role": "user", "content": user}]
