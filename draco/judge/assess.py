"""The reply of the lean plan's `assess` call: score and attribution of every criterion at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from draco.core.types import Criterion
from draco.judge.replies import (
    Attributed,
    Score,
    Scored,
    StepNumber,
    Text,
    check_attributions,
    check_scores,
    strict_schema,
    validated,
)

__all__ = ["ASSESS_SCHEMA", "Assessed", "check_assessments"]

#: [K] scores and [K] attributions of one trajectory
Assessed = tuple[tuple[Scored, ...], tuple[Attributed, ...]]


class AssessItem(BaseModel):
    """One criterion, scored and attributed."""

    title: Text
    evidence: str
    justification: str
    score: Score
    relevant_steps: list[StepNumber]


class AssessReply(BaseModel):
    """Reply of assess."""

    assessments: list[AssessItem]


#: in the strict dialect
ASSESS_SCHEMA: dict[str, Any] = strict_schema(AssessReply)


def check_assessments(criteria: Sequence[Criterion], n_steps: int, data: Any) -> tuple[Assessed, str | None]:
    """Scores and attributions in the order of `criteria`, held to the rules of both single calls.

    Citations outside 1..`n_steps` are dropped and counted; a pass or fail without a valid one is the soft fault.

    Raises:
        ReplyFault: wrong shape, another set or order of titles, or a score outside {-1, 0, 1}.
    """
    items = [item.model_dump() for item in validated(AssessReply, data).assessments]
    scored, _ = check_scores(criteria, {"verdicts": items})
    renamed = [{**item, "verdict": item["score"], "explanation": item["justification"]} for item in items]
    attributed, soft = check_attributions(criteria, n_steps, {"attributions": renamed})
    return (scored, attributed), soft
