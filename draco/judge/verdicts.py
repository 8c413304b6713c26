"""From scores and attributions of a group to its verdicts, dropout and rewards (Eq. 3).

Shapes: K criteria, G trajectories of one group. Verdict scores are +1 pass, −1 fail, 0 not applicable. Rewards are
float64 whatever the dtype of the verdicts: a replay from the archive must match to the bit.

Worked example, K = 2, G = 2::

    scores = [[1, -1],      kept: somebody failed it
              [1,  1]]      dropped: everybody passed it
    rewards     [ 1.0,   -1.0  ]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from draco.core.types import Criterion, Group, Judgement, Verdict
from draco.judge.records import Counters
from draco.judge.replies import Attributed, Scored

__all__ = ["count_scores", "dropout", "judgement_of", "rewards", "surviving", "verdict_unanimous"]

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
    """The judgement of a group by [K] criteria.

    Args:
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
    reward = rewards(table, torch.tensor(kept, dtype=torch.bool))
    return Judgement(group, tuple(criteria), rows, tuple(not keep for keep in kept), tuple(reward.tolist()))


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


def dropout(scores: Tensor) -> Tensor:
    """Discriminative dropout: keep a criterion only if at least one member of the group failed it.

    All-pass and all-n.a. criteria go; an all-fail criterion stays.

    Args:
        scores: [K, G] integer verdicts in {−1, 0, 1}; K may be 0.

    Returns:
        [K] bool, True = kept.

    Raises:
        ValueError: not a [K, G] integer tensor, or a score outside {−1, 0, 1}.
    """
    _check_scores(scores)
    return (scores == -1).any(dim=1)


def rewards(scores: Tensor, kept: Tensor) -> Tensor:
    """Eq. 3: R_i = (p_i − f_i) / (p_i + f_i) over the kept criteria, and 0 when nothing counts.

    Args:
        scores: [K, G] integer verdicts in {−1, 0, 1}.
        kept: [K] bool from `dropout`.

    Returns:
        [G] float64 in [−1, 1].

    Raises:
        ValueError: wrong shapes or dtypes, or a score outside {−1, 0, 1}.
    """
    passes, fails = _counts(scores, kept)
    counted = (passes + fails).clamp(min=1)  # p = f = 0 gives 0 / 1 = 0
    return (passes - fails).double() / counted.double()


def verdict_unanimous(scores: Tensor, kept: Tensor) -> Tensor:
    """Inert as in Appendix B.3: the kept pass/fail verdicts of a trajectory are all +1 or all −1, or none is there.

    Verdicts of 0 count neither way, as in Eq. 3. The mean of the result is the share `inert_verdicts`.

    Args:
        scores: [K, G] integer verdicts in {−1, 0, 1}.
        kept: [K] bool from `dropout`.

    Returns:
        [G] bool, True = inert.

    Raises:
        ValueError: wrong shapes or dtypes, or a score outside {−1, 0, 1}.
    """
    passes, fails = _counts(scores, kept)
    return (passes == 0) | (fails == 0)


def _counts(scores: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """p_i and f_i over the kept criteria, each [G] int64."""
    _check_scores(scores)
    if kept.dtype != torch.bool or kept.shape != scores.shape[:1]:
        raise ValueError(f"expected kept as bool [{scores.shape[0]}], got {kept.dtype} {list(kept.shape)}")
    counted = scores[kept]
    return (counted == 1).sum(dim=0), (counted == -1).sum(dim=0)


def _check_scores(scores: Tensor) -> None:
    if scores.ndim != 2 or scores.is_floating_point() or scores.is_complex() or scores.dtype == torch.bool:
        raise ValueError(f"expected integer scores as [K, G], got {scores.dtype} {list(scores.shape)}")
    if bool(((scores < -1) | (scores > 1)).any()):
        raise ValueError(f"expected scores in -1, 0, 1, got {sorted(set(scores.flatten().tolist()))}")
