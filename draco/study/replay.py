"""Rewards and credits of an archived step, computed again and compared bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from draco.core.types import Credit, Judgement
from draco.judge.rewards import dropout, rewards
from draco.stages import CreditStage
from draco.study.judgements import read_credits

__all__ = ["Mismatch", "StepReplay", "replay_step"]

#: R_i of a member of a group without criteria: (judgement, member) → reward
RewardOf = Callable[[Judgement, int], float]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One value that did not come out again."""

    step: int
    group: int
    sample: int  #: −1: of the whole group
    what: str
    archived: object
    recomputed: object


@dataclass(frozen=True, slots=True)
class StepReplay:
    """One step, replayed."""

    step: int
    groups: int
    trajectories: int
    given: int  #: rewards that nothing archived makes (an environment's success): taken as they are
    mismatches: tuple[Mismatch, ...]


def replay_step(
    run: Path, step: int, rule: CreditStage, *, reward_of: RewardOf | None = None, overridden: bool = False
) -> StepReplay:
    """Recompute one step.

    Args:
        run: run folder.
        step: archived step.
        rule: the run's credit stage.
        reward_of: makes the rewards of groups without criteria; None takes them as given.
        overridden: the run applied overrides (`attribution_overrides: apply`): the scores that dropout was computed
            from are replaced in the archive, so that dropout is taken as archived.
    """
    credits = read_credits(run, step)
    found: list[Mismatch] = []
    given = 0
    for credit in credits:
        judged = credit.judgement
        if not judged.criteria and reward_of is None:
            given += len(judged.rewards)
        again = _judgement(judged, reward_of, overridden)
        (new,) = rule.assign([again])
        found.extend(_compare(credit, new))
    members = sum(len(c.advantages) for c in credits)
    return StepReplay(step, len(credits), members, given, tuple(found))


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

    def differ(sample: int, what: str, a: object, b: object) -> Iterator[Mismatch]:
        if _bits(a) != _bits(b):
            yield Mismatch(group.step, group.index, sample, what, a, b)

    yield from differ(-1, "dropped criteria", old.judgement.dropped, new.judgement.dropped)
    yield from differ(-1, "zero_std", old.zero_std, new.zero_std)
    for i, trajectory in enumerate(group.trajectories):
        for what, a, b in (
            ("reward", old.judgement.rewards, new.judgement.rewards),
            ("advantage", old.advantages, new.advantages),
            ("step_advantages", old.step_advantages, new.step_advantages),
            ("qualities", old.qualities, new.qualities),
            ("reason", old.reasons, new.reasons),
        ):
            yield from differ(trajectory.sample, what, a[i], b[i])


def _bits(value: object) -> object:
    """Floats by their bits: 0.0 is not −0.0, and NaN equals itself."""
    if isinstance(value, float):
        return value.hex()
    return tuple(_bits(v) for v in value) if isinstance(value, Sequence) and not isinstance(value, str) else value
