"""What each kind of reply must look like, and the checks that JSON Schema cannot express.

One corrective re-ask may mend a `ReplyFault`. A reply that is still faulty after it is a `JudgeReplyError`; no faulty
reply ever becomes a score.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, Strict, StringConstraints, ValidationError

from draco.core.types import Criterion
from draco.judge.parsing import ReplyFault

__all__ = [
    "LIMITS", "Assessed", "Attributed", "Scored", "check_assessments", "check_attributions", "check_criteria",
    "check_scores", "json_schema", "strict_schema",
]  # fmt: skip

#: most criteria that a reply of this phase may hold (Appendix F)
LIMITS = {"propose_task": 15, "propose_rollout": 10, "merge": 24}
_SOURCES = {"propose_task": "task", "propose_rollout": "rollout", "merge": "merge"}

Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
# Strict: True, 1.0 and "1" are not scores.
Score = Annotated[int, Strict(), Field(json_schema_extra={"enum": [-1, 0, 1]})]
StepNumber = Annotated[int, Strict()]


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
    """Reply of propose_task, merge and reduce."""

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


class AssessItem(ScoreItem):
    """One criterion, scored and attributed."""

    relevant_steps: list[StepNumber]


class AssessReply(BaseModel):
    """Reply of assess, which the lean view makes of score and attribute."""

    assessments: list[AssessItem]


_REPLIES: dict[str, type[BaseModel]] = {
    "propose_task": TaskReply,
    "propose_rollout": RolloutReply,
    "merge": TaskReply,
    "reduce": TaskReply,
    "score": ScoreReply,
    "attribute": AttributeReply,
    "assess": AssessReply,
}
M = TypeVar("M", bound=BaseModel)


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


#: [K] scores and [K] attributions of one trajectory
Assessed = tuple[tuple[Scored, ...], tuple[Attributed, ...]]


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


def _validated(model: type[M], data: Any) -> M:
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
    reply = _validated(_REPLIES[phase], data)
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
    return tuple(
        Criterion(
            title=item.title,
            description=item.description,
            evaluator_instruction=item.evaluator_instruction,
            source=_SOURCES[phase],
            grounding_references=tuple(item.grounding_references),
            evidence=item.evidence if isinstance(item, RevealedCriterion) else "",
        )
        for item in items
    ), None


def check_scores(criteria: Sequence[Criterion], data: Any) -> tuple[tuple[Scored, ...], None]:
    """[K] scores in the order of `criteria`.

    Raises:
        ReplyFault: wrong shape, another set or order of titles, or a score outside {-1, 0, 1}.
    """
    return _scored(criteria, _validated(ScoreReply, data).verdicts), None


def check_attributions(
    criteria: Sequence[Criterion], n_steps: int, data: Any
) -> tuple[tuple[Attributed, ...], str | None]:
    """[K] attributions in the order of `criteria`, and a fault that is worth one re-ask but no failure.

    Citations outside 1..`n_steps` are dropped and counted, repeated ones count once. A pass or fail without a valid
    citation is that fault: if the re-ask does not mend it, the verdict counts in R and in no Q.

    Raises:
        ReplyFault: wrong shape, another set or order of titles, or a verdict outside {-1, 0, 1}.
    """
    items = _validated(AttributeReply, data).attributions
    _check(criteria, [(item.title, item.verdict) for item in items])
    return _attributed(((i.title, i.verdict, i.relevant_steps, i.explanation) for i in items), n_steps)


def check_assessments(criteria: Sequence[Criterion], n_steps: int, data: Any) -> tuple[Assessed, str | None]:
    """Scores and attributions in the order of `criteria`, by the rules of both single calls.

    Raises:
        ReplyFault: wrong shape, another set or order of titles, or a score outside {-1, 0, 1}.
    """
    items = _validated(AssessReply, data).assessments
    scored = _scored(criteria, items)
    attributed, soft = _attributed(((i.title, i.score, i.relevant_steps, i.justification) for i in items), n_steps)
    return (scored, attributed), soft


def _check(criteria: Sequence[Criterion], given: Sequence[tuple[str, int]]) -> None:
    """See that (title, score) pairs are those of `criteria`, in order."""
    got, want = [title for title, _ in given], [c.title for c in criteria]
    if len(got) != len(want):
        missing = [t for t in want if t not in got]
        extra = [t for t in got if t not in want]
        raise ReplyFault(f"{len(got)} entries for {len(want)} criteria; missing: {missing}; unknown: {extra}")
    if got != want:
        at = next(k for k, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
        raise ReplyFault(f"entry {at + 1} is {got[at]!r}, expected {want[at]!r}: exact titles in the given order")
    for title, score in given:
        if score not in (-1, 0, 1):
            raise ReplyFault(f"{title!r}: {score} is not one of -1, 0, 1")


def _scored(criteria: Sequence[Criterion], items: Sequence[ScoreItem]) -> tuple[Scored, ...]:
    _check(criteria, [(item.title, item.score) for item in items])
    return tuple(Scored(i.score, i.evidence, i.justification) for i in items)


def _attributed(
    rows: Iterable[tuple[str, int, Sequence[int], str]], n_steps: int
) -> tuple[tuple[Attributed, ...], str | None]:
    """Attributions of (title, verdict, cited steps, explanation), and what is wrong with their citations."""
    out, uncited = [], []
    for title, verdict, cited, explanation in rows:
        valid = [j for j in cited if 1 <= j <= n_steps]
        if verdict and not valid:
            uncited.append(title)
        out.append(Attributed(verdict, tuple(sorted(set(valid))), explanation, len(cited) - len(valid)))
    soft = f"no step between 1 and {n_steps} is cited for {uncited}; cite at least one each" if uncited else None
    return tuple(out), soft
