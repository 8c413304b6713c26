"""Rewards and credits of an archived step, recomputed and compared bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from draco.core.types import Credit, Judgement
from draco.judge.verdicts import dropout, rewards
from draco.stages import CreditStage
from draco.study.judgements import read_credits

__all__ = ["Mismatch", "StepReplay", "replay_step"]

#: R_i of a member of a group without criteria: (judgement, member) → reward
RewardOf = Callable[[Judgement, int], float]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One value that is not equal when it is recomputed."""

    step: int
    group: int
    sample: int  #: −1: the value belongs to the group
    what: str
    archived: object
    recomputed: object


@dataclass(frozen=True, slots=True)
class StepReplay:
    """One step, replayed."""

    step: int
    groups: int
    trajectories: int
    given: int  #: rewards that cannot be recomputed (an environment's success) and are taken as archived
    mismatches: tuple[Mismatch, ...]


def replay_step(
    run: Path, step: int, rule: CreditStage, *, reward_of: RewardOf | None = None, overridden: bool = False
) -> StepReplay:
    """Recompute one step.

    Args:
        run: run folder.
        step: archived step.
        rule: the run's credit stage.
        reward_of: makes the rewards of groups without criteria; None takes them as archived.
        overridden: the run applied overrides (`attribution_overrides: apply`). The archive does not hold the scores
            that dropout was computed from, so dropout is taken as archived.
    """
    credits = read_credits(run, step)
    again = [_judgement(c.judgement, reward_of, overridden) for c in credits]
    found = [m for old, judged in zip(credits, again, strict=True) for m in _compare(old, *rule.assign([judged]))]
    given = 0 if reward_of else sum(len(c.judgement.rewards) for c in credits if not c.judgement.criteria)
    return StepReplay(step, len(credits), sum(len(c.advantages) for c in credits), given, tuple(found))


def _judgement(judged: Judgement, reward_of: RewardOf | None, overridden: bool) -> Judgement:
    if not judged.criteria:
        if reward_of is None:
            return judged
        return replace(judged, rewards=tuple(reward_of(judged, i) for i in range(len(judged.rewards))))
    scores = torch.tensor([[v.score for v in row] for row in judged.verdicts], dtype=torch.int64)
    kept = ~torch.tensor(judged.dropped) if overridden else dropout(scores)
    return replace(judged, dropped=tuple((~kept).tolist()), rewards=tuple(rewards(scores, kept).tolist()))


def _compare(old: Credit, new: Credit) -> Iterator[Mismatch]:
    group = old.judgement.group
    columns: list[tuple[str, Sequence[object], Sequence[object]]] = [
        ("reward", old.judgement.rewards, new.judgement.rewards),
        ("advantage", old.advantages, new.advantages),
        ("step_advantages", old.step_advantages, new.step_advantages),
        ("qualities", old.qualities, new.qualities),
        ("reason", old.reasons, new.reasons),
    ]
    values: list[tuple[int, str, object, object]] = [
        (-1, "dropped criteria", old.judgement.dropped, new.judgement.dropped),
        (-1, "zero_std", old.zero_std, new.zero_std),
    ]
    values += [(t.sample, name, a[i], b[i]) for i, t in enumerate(group.trajectories) for name, a, b in columns]
    for sample, what, a, b in values:
        if _bits(a) != _bits(b):
            yield Mismatch(group.step, group.index, sample, what, a, b)


def _bits(value: object) -> object:
    """Floats by their bits: 0.0 is not −0.0, and NaN equals itself."""
    if isinstance(value, float):
        return value.hex()
    return tuple(_bits(v) for v in value) if isinstance(value, Sequence) and not isinstance(value, str) else value
