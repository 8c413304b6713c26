"""From scores and attributions of a group to its verdicts, dropout and rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from draco.core.types import Criterion, Group, Judgement, Verdict
from draco.judge.records import Counters
from draco.judge.replies import Attributed, Scored
from draco.judge.rewards import dropout
from draco.judge.rewards import rewards as reward_of

__all__ = ["count_scores", "judgement_of", "surviving"]

#: [K] scores of each sample
Scores = Mapping[int, Sequence[Scored]]


def _table(group: Group, scored: Scores) -> torch.Tensor:
    """[K, G] scores of the group's members."""
    return torch.tensor([[s.score for s in scored[t.sample]] for t in group.trajectories], dtype=torch.int64).T


def surviving(group: Group, scored: Scores) -> list[bool]:
    """For each criterion, whether dropout keeps it."""
    return [bool(k) for k in dropout(_table(group, scored))]


def count_scores(group: Group, scored: Scores, counters: Counters) -> None:
    """Count passes, fails and n.a. of all members, and criteria that all of them failed."""
    for column in _table(group, scored).tolist():
        counters.count("rubric/passes", column.count(1))
        counters.count("rubric/fails", column.count(-1))
        counters.count("rubric/na", column.count(0))
        counters.count("rubric/all_fail_criteria", set(column) == {-1})


def judgement_of(
    group: Group,
    criteria: Sequence[Criterion],
    scored: Scores,
    attributed: Mapping[int, Mapping[int, Attributed]],
    counters: Counters,
    *,
    apply: bool,
) -> Judgement:
    """The judgement of a group.

    Args:
        group: its members.
        criteria: [K].
        scored: [K] scores of each member.
        attributed: by sample and criterion; those of dropped criteria are not used.
        counters: what to count attributions and dropped criteria in.
        apply: an attribution's own verdict replaces the scored one; else the verdict is marked only.
    """
    kept = surviving(group, scored)
    rows = tuple(
        tuple(
            _verdict(scored[t.sample][k], attributed.get(t.sample, {}).get(k) if keep else None, counters, apply)
            for t in group.trajectories
        )
        for k, keep in enumerate(kept)
    )
    counters.count("rubric/dropped_criteria", kept.count(False))
    scores = [[verdict.score for verdict in row] for row in rows]
    table = torch.tensor(scores, dtype=torch.int64).reshape(len(rows), len(group.trajectories))
    rewards = reward_of(table, torch.tensor(kept, dtype=torch.bool))
    return Judgement(group, tuple(criteria), rows, tuple(not keep for keep in kept), tuple(rewards.tolist()))


def _verdict(given: Scored, found: Attributed | None, counters: Counters, apply: bool) -> Verdict:
    if found is None:
        return Verdict(given.score, (), given.justification, given.evidence)
    override = found.verdict if found.verdict != given.score else None
    for name, by in (
        ("attributed", 1),
        ("attributed_pass_fail", found.verdict != 0),
        ("uncited", found.verdict != 0 and not found.steps),
        ("citations", len(found.steps)),
        ("dropped_citations", found.dropped),
        ("overrides", override is not None),
    ):
        counters.count(f"judge/{name}", by)
    return Verdict(
        score=found.verdict if apply else given.score,
        steps=found.steps,
        justification=given.justification,
        evidence=given.evidence,
        explanation=found.explanation,
        override=None if apply else override,
    )
