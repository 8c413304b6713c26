"""A judge behind HTTP on this machine: replies of the right shape whose verdicts depend on the transcript's hash."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from support.loopback_judge import Answer, LoopbackJudge

PHASE = re.compile(r"^# Call: (\w+)$", re.MULTILINE)
FENCE = re.compile(r"<<<BEGIN TRANSCRIPT (\w+)>>>")
STEP = re.compile(r"^\[step (\d+)\] action:", re.MULTILINE)


def reply_to(text: str) -> dict[str, Any]:
    """One of the five replies, or which criteria are the same."""
    phase = PHASE.findall(text)[-1]
    code = FENCE.search(text)
    digest = hashlib.sha256((code[1] if code else "").encode()).digest()

    def criterion(title: str, **more: str) -> dict[str, Any]:
        return {"title": title, "description": "d", "evaluator_instruction": "i", "grounding_references": [], **more}

    if phase == "propose_task":
        return {"criteria": [criterion("Answers the question")]}
    if phase == "propose_rollout":
        return {"criteria": [criterion("Searches before answering", evidence="step 1")]}
    if phase == "merge":
        return {"criteria": [criterion("Answers the question"), criterion("Searches before answering")]}
    if phase == "match":  # the first of A and the first of B
        return {"pairs": [{"a": 1, "b": 1}]}
    listed = re.search(r"```json\n(.*?)\n```", text[text.rfind("<<<END") :], re.DOTALL)
    assert listed is not None
    rows = json.loads(listed[1])
    if phase == "score":
        verdicts = [
            {"title": r["title"], "evidence": "e", "justification": "j", "score": 1 if digest[k] & 1 else -1}
            for k, r in enumerate(rows)
        ]
        return {"verdicts": verdicts}
    last = max(map(int, STEP.findall(text)))
    attributions = [
        {"title": r["title"], "explanation": "x", "verdict": r["score"], "relevant_steps": [1 + digest[k] % last]}
        for k, r in enumerate(rows)
    ]
    return {"attributions": attributions}


@contextmanager
def judge_server() -> Iterator[str]:
    """Address for judge.api_base."""

    def answer(body: dict[str, Any]) -> Answer:
        return Answer(json.dumps(reply_to(body["messages"][1]["content"])), tokens=(100, 10, 0))

    with LoopbackJudge(answer) as judge:
        yield judge.base
