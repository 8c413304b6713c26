"""Random rewards: a coin toss, without a judge (Section 4.3).

    R_i = ±1 with probability 1/2 each, keyed by (seed, step, task, sample)

Why: the lower bound. What a setting gains over it comes from its reward and not from the update rule alone.

There are no citations. A checkpoint need not save any state: the same key gives the same toss.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from draco.core.types import Group, Judgement
from draco.judge.stage import BaseRubric, judged_without_criteria

__all__ = ["RandomRubric", "toss"]


def toss(seed: int, step: int, task_id: str, sample: int) -> float:
    """+1.0 or −1.0, the same in every process."""
    digest = hashlib.sha256(f"{seed}\0{step}\0{task_id}\0{sample}".encode()).digest()
    return 1.0 if digest[0] & 1 else -1.0


class RandomRubric(BaseRubric):
    """Rewards at random."""

    gives_citations = False

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed

    def judge(self, groups: Iterable[Group]) -> Iterator[Judgement]:
        """Yield one judgement with K = 0 for each group, in order of arrival, after all rollouts have ended."""
        for group in list(groups):
            live = group.live().trajectories
            rewards = {t.sample: toss(self.seed, group.step, group.task.id, t.sample) for t in live}
            judgement = judged_without_criteria(group, rewards, ())
            self._metrics.append(dict(judgement.metrics))
            yield judgement
