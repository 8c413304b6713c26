"""A litellm provider with canned replies, and a client that calls it. Only the model call is faked."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

import litellm
from litellm.llms.custom_llm import CustomLLM
from support.factory import CRITERIA, criterion

from draco.judge.client import JudgeClient
from draco.judge.prompts import messages
from draco.judge.records import CallRecord
from draco.judge.replies import check_scores
from draco.judge.requests import JudgeRequest

GOOD = json.dumps({"verdicts": [{"title": "Pays ana", "evidence": "e", "justification": "j", "score": -1}]})
PHASE = re.compile(r"^# Call: (\w+)$", re.MULTILINE)


def titles_in(text: str) -> list[str]:
    """Titles of the criteria that a prompt lists."""
    tail = text[text.rfind("<<<END") :]
    found = re.search(r"```json\n(.*?)\n```", tail, re.DOTALL)
    return [row["title"] for row in json.loads(found[1])] if found else []


def sample_in(text: str) -> int:
    """Sample of the (first) rollout that a prompt shows; -1 for an opening."""
    found = re.search(r"^act 1 of sample (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else -1


class FakeJudge(CustomLLM):
    """Replies by phase. Sample 0 fails the first criterion, all pass the second; sample 1 cites step 2.

    `overrides` maps a phase to a function (text, n-th call of it on this sample) → reply text, an exception or None for
    the default.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []
        self.prompts: list[list[dict[str, str]]] = []
        self.arguments: list[dict[str, Any]] = []
        self.overrides: dict[str, Callable[[str, int], Any]] = {}
        self.delay: Callable[[str], float] = lambda text: 0.0

    async def acompletion(self, *args: Any, **kwargs: Any) -> Any:
        messages = kwargs["messages"]
        text = messages[1]["content"]
        phase = PHASE.findall(text)[-1]
        key = (phase, sample_in(text) if phase != "merge" else -1)
        self.calls.append(key)
        self.prompts.append(messages)
        self.arguments.append(kwargs)
        if delay := self.delay(text):
            await asyncio.sleep(delay)
        reply = None
        if phase in self.overrides:
            reply = self.overrides[phase](text, self.calls.count(key))
        if isinstance(reply, BaseException):
            raise reply
        if reply is None:
            reply = json.dumps(self.default(phase, text, key[1]))
        response = kwargs["model_response"]
        response.choices[0].message.content = reply
        response.usage = litellm.Usage(prompt_tokens=10, completion_tokens=5, total_tokens=15)
        return response

    def default(self, phase: str, text: str, sample: int) -> dict[str, Any]:
        if phase == "propose_task":
            return {"criteria": [criterion("Pays ana")]}
        if phase == "propose_rollout":
            return {"criteria": [criterion(f"Found in sample {sample}", evidence="step 1")]}
        if phase == "merge":
            return {"criteria": [criterion("Pays ana"), criterion("Pays exactly 31")]}
        names = titles_in(text)
        if phase == "score":
            bad = sample == 0
            return {
                "verdicts": [
                    {"title": t, "evidence": "e", "justification": "j", "score": -1 if bad and k == 0 else 1}
                    for k, t in enumerate(names)
                ]
            }
        if phase == "assess":
            return {
                "assessments": [
                    {
                        "title": t,
                        "evidence": "e",
                        "justification": "j",
                        "score": -1 if sample == 0 and k == 0 else 1,
                        "relevant_steps": [2],
                    }
                    for k, t in enumerate(names)
                ]
            }
        return {
            "attributions": [
                {"title": t, "explanation": "x", "verdict": -1 if sample == 0 and k == 0 else 1, "relevant_steps": [2]}
                for k, t in enumerate(names)
            ]
        }

    def phases(self) -> list[str]:
        """Phases in the order of the calls."""
        return [phase for phase, _ in self.calls]


def client(fake: FakeJudge, **options: Any) -> JudgeClient:
    """A client whose model is the fake."""
    others = [e for e in litellm.custom_provider_map if e["provider"] != "fake-judge"]
    litellm.custom_provider_map = [*others, {"provider": "fake-judge", "custom_handler": fake}]
    # Nothing here is slow but the machine.
    defaults: dict[str, Any] = {"max_retries": 2, "timeout_s": 120.0, "backoff_s": 0.0, "response_schema": "off"}
    return JudgeClient("fake-judge/m", **(defaults | options))


def call_once(judge: JudgeClient) -> tuple[Any, list[CallRecord]]:
    """One score call about one criterion: its value or its error, and the records of its attempts."""
    records: list[CallRecord] = []
    request = JudgeRequest(
        phase="score",
        messages=messages("score", ["<<<END"], ()),
        check=lambda data: check_scores(CRITERIA[:1], data),
        sink=records.append,
    )

    async def run() -> Any:
        try:
            return await judge.call(request)
        finally:
            await judge.aclose()

    try:
        value: Any = asyncio.run(run())
    except Exception as error:
        value = error
    return value, records


def ask(fake: FakeJudge, replies: list[Any], **options: Any) -> tuple[Any, list[CallRecord]]:
    """One call whose n-th attempt gets the n-th reply."""
    queue = list(replies)
    fake.overrides["score"] = lambda text, n: queue.pop(0)
    return call_once(client(fake, **options))
