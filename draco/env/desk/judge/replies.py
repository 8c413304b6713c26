"""The replies, in the JSON that the prompts ask for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any

from omegaconf import OmegaConf

from draco.env.desk.judge.findings import Finding
from draco.env.desk.judge.general import GENERAL, Result
from draco.env.desk.judge.reading import Prompt
from draco.env.desk.judge.subgoals import examine

__all__ = ["reply"]

#: criteria that the prompts allow in one reply
LIMITS = {"propose_task": 15, "propose_rollout": 10, "merge": 24}


def reply(prompt: Prompt) -> dict[str, Any]:
    """Answer one call.

    Raises:
        ValueError: an unknown phase.
    """
    match prompt.phase:
        case "propose_task":
            return _propose_task(prompt)
        case "propose_rollout":
            return _propose_rollout(prompt)
        case "merge":
            return _merge(prompt)
        case "reduce":
            return _reduce(prompt)
        case "score":
            return {"verdicts": [_scored(prompt.blocks[0], c["title"]) for c in prompt.criteria]}
        case "assess":
            return {"assessments": [_assessed(prompt.blocks[0], c["title"]) for c in prompt.criteria]}
        case "attribute":
            return {"attributions": [_attributed(prompt.blocks[0], c["title"]) for c in prompt.criteria]}
    raise ValueError(f"unknown call {prompt.phase!r}")


def _criterion(f: Finding) -> dict[str, Any]:
    return {
        "title": f.title,
        "description": f.description,
        "evaluator_instruction": f.instruction,
        "grounding_references": [f.grounding],
    }


def _outcomes_first(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda f: f.rank)


def _propose_task(prompt: Prompt) -> dict[str, Any]:
    findings, _ = examine(prompt.blocks[0])
    chosen = _outcomes_first(f for f in findings if f.obvious)
    return {"criteria": [_criterion(f) for f in chosen[: LIMITS["propose_task"]]]}


def _propose_rollout(prompt: Prompt) -> dict[str, Any]:
    findings, _ = examine(prompt.blocks[0])
    known = {c["title"] for c in prompt.criteria}
    chosen = _outcomes_first(f for f in findings if f.score < 0 and f.title not in known)
    return {"criteria": [_criterion(f) | {"evidence": f.evidence} for f in chosen[: LIMITS["propose_rollout"]]]}


def _merge(prompt: Prompt) -> dict[str, Any]:
    """Criteria with the same title are the same. Those that every attempt passes are dropped."""
    attempts = [{f.title: f.score for f in examine(block)[0]} for block in prompt.blocks]
    unique = {c["title"]: c for c in reversed(prompt.criteria)}
    order = list(dict.fromkeys(c["title"] for c in prompt.criteria))
    failed = [t for t in order if any(scores.get(t, 0) < 0 for scores in attempts)]
    return {"criteria": [{k: v for k, v in unique[t].items() if k != "evidence"} for t in failed[: LIMITS["merge"]]]}


#: title of a specific criterion → the general one that it is a case of; the first that fits
_KINDS = [
    (re.compile(pattern), title)
    for pattern, title in (
        (r"^Confirms ", "Verifies action outcome"),
        (r" once$| twice$", "Stops after completion"),
        (r"^Reads all pages", "Fetches complete data"),
        (r" exactly |^Pays what|^Notes the code", "Uses exact action content"),
        (r"^(Approves|Deletes|Refunds) all", "Processes items completely"),
        (r"^Books the free|^Shares the final", "Applies correct selection logic"),
        (r"^(Pays|Mails|Shares|Changes nothing)|^(Approves|Deletes|Refunds) only", "Targets exact items"),
        (r"^Keeps vault keys", "Protects secret values"),
        (r"^Completes ", "Completes task properly"),
        (r"^(Opens|Unlocks) ", "Authenticates correctly"),
    )
]


@cache
def _general_set() -> dict[str, dict[str, Any]]:
    text = (files("draco.env.desk") / "rubric.yaml").read_text(encoding="utf-8")
    return {c["title"]: dict(c) | {"grounding_references": []} for c in OmegaConf.create(text).criteria}


def _reduce(prompt: Prompt) -> dict[str, Any]:
    """The general criteria that the given ones are cases of (or are themselves), in the order of the packaged set."""
    general = _general_set()
    found = set()
    for criterion in prompt.criteria:
        kinds = (title for pattern, title in _KINDS if pattern.search(criterion["title"]))
        found.add(criterion["title"] if criterion["title"] in general else next(kinds, "Performs required actions"))
    return {"criteria": [general[title] for title in general if title in found]}


def _decide(block: str, title: str) -> Result:
    findings, events = examine(block)
    if rule := GENERAL.get(title):
        return rule(findings, events)
    for f in findings:
        if f.title == title:
            return f.score, f.steps, f.evidence
    return 0, (), "this rule-based judge has no rule for the criterion"


def _scored(block: str, title: str) -> dict[str, Any]:
    score, _, evidence = _decide(block, title)
    why = {1: "The calls show it.", -1: "The calls show that it does not hold.", 0: "It does not apply here."}[score]
    return {"title": title, "evidence": evidence, "justification": why, "score": score}


def _assessed(block: str, title: str) -> dict[str, Any]:
    return _scored(block, title) | {"relevant_steps": _attributed(block, title)["relevant_steps"]}


def _attributed(block: str, title: str) -> dict[str, Any]:
    score, steps, evidence = _decide(block, title)
    return {"title": title, "explanation": evidence, "verdict": score, "relevant_steps": list(steps)}
