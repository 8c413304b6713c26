"""What the five kinds of reply must look like, and the checks that JSON Schema cannot express.

A `ReplyFault` is something that one corrective re-ask may mend. A reply that is still faulty after it is a
`JudgeReplyError`; no faulty reply ever becomes a score.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, Strict, StringConstraints, ValidationError

from draco.core.types import Criterion
from draco.judge.mend import DEPTH, TOKEN, mended, names, objects, spelled

__all__ = [
    "LIMITS",
    "Attributed",
    "ReplyFault",
    "Scored",
    "check_attributions",
    "check_criteria",
    "check_scores",
    "json_schema",
    "parse_json",
    "strict_schema",
    "validated",
]

#: longest reply, in characters, that is mended: the time that mending takes grows faster than its length
MOST_REPAIRED = 200_000
#: most criteria that a reply of this phase may hold (DRACO, Section 3)
LIMITS = {"propose_task": 15, "propose_rollout": 10, "merge": 24}

Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
# Strict: True, 1.0 and "1" are not scores.
Score = Annotated[int, Strict(), Field(json_schema_extra={"enum": [-1, 0, 1]})]
StepNumber = Annotated[int, Strict()]


class ReplyFault(ValueError):
    """The reply breaks the schema; the message is quoted to the judge in the corrective re-ask."""


class ProposedCriterion(BaseModel):
    """A criterion from the request alone, or a merged one."""

    title: Text
    description: Text
    evaluator_instruction: Text
    grounding_references: list[str]


class RevealedCriterion(ProposedCriterion):
    """A criterion that one execution revealed."""

    evidence: Text


class TaskReply(BaseModel):
    """Reply of propose_task and of merge."""

    criteria: list[ProposedCriterion]


class RolloutReply(BaseModel):
    """Reply of propose_rollout."""

    criteria: list[RevealedCriterion]


class ScoreItem(BaseModel):
    """One criterion, scored."""

    title: Text
    evidence: str
    justification: str
    score: Score


class ScoreReply(BaseModel):
    """Reply of score."""

    verdicts: list[ScoreItem]


class AttributeItem(BaseModel):
    """One verdict, attributed to steps."""

    title: Text
    explanation: str
    verdict: Score
    relevant_steps: list[StepNumber]


class AttributeReply(BaseModel):
    """Reply of attribute."""

    attributions: list[AttributeItem]


_REPLIES: dict[str, type[BaseModel]] = {
    "propose_task": TaskReply,
    "propose_rollout": RolloutReply,
    "merge": TaskReply,
    "score": ScoreReply,
    "attribute": AttributeReply,
}
M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Scored:
    """One usable score."""

    score: int
    evidence: str
    justification: str


@dataclass(frozen=True, slots=True)
class Attributed:
    """One usable attribution."""

    verdict: int
    steps: tuple[int, ...]  #: valid 1-based steps, ascending, each once
    explanation: str
    dropped: int  #: citations outside 1..M that were removed


@cache
def json_schema(phase: str) -> dict[str, Any]:
    """JSON Schema of the reply of a phase, see `strict_schema`."""
    return strict_schema(_REPLIES[phase])


def strict_schema(model: type[BaseModel]) -> dict[str, Any]:
    """JSON Schema of a reply in the strict dialect: every property required, no others allowed, no titles."""

    def strict(node: Any) -> Any:
        if isinstance(node, list):
            return [strict(item) for item in node]
        if not isinstance(node, dict):
            return node
        # A property may itself be called "title"; only the string-valued annotation goes.
        out = {k: strict(v) for k, v in node.items() if not (k in {"title", "description"} and isinstance(v, str))}
        # Not every strict dialect knows string and array limits; the checks below hold them anyway.
        out.pop("minLength", None)
        if out.get("type") == "object" and "properties" in out:
            out["required"] = list(out["properties"])
            out["additionalProperties"] = False
        return out

    schema: dict[str, Any] = strict(model.model_json_schema())
    return schema


def parse_json(text: str) -> tuple[Any, bool]:
    """The JSON object in a reply, and whether it had to be repaired.

    Bare JSON, a fenced block, prose around an object and a leading <think> part are all understood. What is mended are
    slips of the pen (a comma too many, single quotes); an object that breaks off is not completed by guessing, and one
    that says two things under one name is not settled by taking the last. Nor is a reply that holds two objects with
    the same names: what a judge quotes may be a verdict of the attacker's. No number is mended.

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
    if len(text) - start > MOST_REPAIRED:
        raise ReplyFault(f"the reply is no valid JSON and too long to mend ({len(text) - start} characters)")
    still_open, deepest = _depths(text[start:])
    if stop < start or still_open > 0:
        raise ReplyFault("the JSON object breaks off before it ends; reply again in full, more briefly if need be")
    if deepest > 50:
        raise ReplyFault(f"the reply is no valid JSON and too deep to mend ({deepest} levels)")
    try:
        repaired = mended(inner[0] if len(inner) == 1 else text[start : stop + 1], text)
    except (ValueError, RecursionError) as error:
        raise ReplyFault(f"the reply is no valid JSON: {str(error)[:300]}") from None
    if isinstance(repaired, dict):
        return repaired, True
    raise ReplyFault("the reply holds no JSON object")


def _strict(text: str) -> dict[str, Any] | None:
    """The object that a text is.

    Raises:
        ReplyFault: a name occurs twice in an object.
    """
    try:
        data = json.loads(text, object_pairs_hook=_once)
    except ReplyFault:
        raise
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _no_rival(cut: str, data: dict[str, Any]) -> None:
    """A judge may quote `</think>` and a verdict after its own, and then its own was taken for a thought.

    Raises:
        ReplyFault: what was cut off before the last `</think>`, other than a plain thought, holds another such object.
    """
    if cut.startswith("<think>"):
        cut = cut.partition("</think>")[2]
    for candidate in objects(cut):
        other = _strict(candidate)
        if other is not None and other != data and other.keys() & data.keys():
            raise ReplyFault("another such JSON object precedes </think>; give one object, nothing else")


def _answer(text: str) -> tuple[str, bool]:
    """A reply without the thought before it, and whether slips in it may be mended.

    A judge is asked to quote evidence, and what it quotes may spell `</think>` and a verdict of the attacker's after
    it. So a tag inside a JSON string ends no thought, and where it is not plain which one does, nothing is mended.
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
    """Brackets open at the end and the most open at once, outside double-quoted strings; one that never ends hides the
    rest."""
    depth = deepest = 0
    for token in TOKEN.finditer(text):
        depth += DEPTH.get(token[0], 0)
        deepest = max(depth, deepest)
    return depth, deepest


def validated(model: type[M], data: Any) -> M:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        faults = [
            f"{'.'.join(map(str, e['loc'])) or 'reply'}: {e['msg']}" for e in error.errors(include_input=False)[:5]
        ]
        raise ReplyFault("; ".join(faults)) from None


def check_criteria(phase: str, data: Any) -> tuple[tuple[Criterion, ...], None]:
    """Criteria of a propose or merge reply.

    Raises:
        ReplyFault: wrong shape, more criteria than `LIMITS` allows, two with the same title, or none at all where
            the phase is propose_task (a task without a way to fail does not exist).
    """
    reply = validated(_REPLIES[phase], data)
    assert isinstance(reply, (TaskReply, RolloutReply))
    items = reply.criteria
    if len(items) > LIMITS[phase]:
        raise ReplyFault(f"{len(items)} criteria, at most {LIMITS[phase]} are allowed")
    if phase == "propose_task" and not items:
        raise ReplyFault("no criterion; write at least one")
    seen: set[str] = set()
    for item in items:
        key = " ".join(item.title.split()).casefold()
        if key in seen:
            raise ReplyFault(f"the title {item.title!r} occurs twice; titles must be unique")
        seen.add(key)
    source = {"propose_task": "task", "propose_rollout": "rollout", "merge": "merge"}[phase]
    return tuple(
        Criterion(
            title=item.title,
            description=item.description,
            evaluator_instruction=item.evaluator_instruction,
            source=source,
            grounding_references=tuple(item.grounding_references),
            evidence=item.evidence if isinstance(item, RevealedCriterion) else "",
        )
        for item in items
    ), None


def _check_titles(got: Sequence[str], want: Sequence[str]) -> None:
    if list(got) == list(want):
        return
    if len(got) != len(want):
        missing = [t for t in want if t not in got]
        extra = [t for t in got if t not in want]
        raise ReplyFault(f"{len(got)} entries for {len(want)} criteria; missing: {missing}; unknown: {extra}")
    at = next(k for k, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
    raise ReplyFault(f"entry {at + 1} is {got[at]!r}, expected {want[at]!r}: exact titles in the given order")


def _check_score(score: int, title: str) -> None:
    if score not in (-1, 0, 1):
        raise ReplyFault(f"{title!r}: {score} is not one of -1, 0, 1")


def check_scores(criteria: Sequence[Criterion], data: Any) -> tuple[tuple[Scored, ...], None]:
    """[K] scores in the order of `criteria`.

    Raises:
        ReplyFault: wrong shape, another set or order of titles, or a score outside {-1, 0, 1}.
    """
    items = validated(ScoreReply, data).verdicts
    _check_titles([i.title for i in items], [c.title for c in criteria])
    for item in items:
        _check_score(item.score, item.title)
    return tuple(Scored(i.score, i.evidence, i.justification) for i in items), None


def check_attributions(
    criteria: Sequence[Criterion], n_steps: int, data: Any
) -> tuple[tuple[Attributed, ...], str | None]:
    """[K] attributions in the order of `criteria`, and a fault worth one re-ask but no more.

    Citations outside 1..`n_steps` are dropped and counted, repeated ones count once. A pass or fail without a valid
    citation is the soft fault: if the re-ask does not mend it, the verdict counts in R and in no Q.

    Raises:
        ReplyFault: wrong shape, another set or order of titles, or a verdict outside {-1, 0, 1}.
    """
    items = validated(AttributeReply, data).attributions
    _check_titles([i.title for i in items], [c.title for c in criteria])
    out, uncited = [], []
    for item in items:
        _check_score(item.verdict, item.title)
        steps = tuple(sorted({j for j in item.relevant_steps if 1 <= j <= n_steps}))
        dropped = sum(not 1 <= j <= n_steps for j in item.relevant_steps)
        if item.verdict and not steps:
            uncited.append(item.title)
        out.append(Attributed(item.verdict, steps, item.explanation, dropped))
    soft = f"no step between 1 and {n_steps} is cited for {uncited}; cite at least one each" if uncited else None
    return tuple(out), soft
