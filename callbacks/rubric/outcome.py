"""Outcome reference: the reward is the environment's own success, no judge (DRACO, Section 4).

    R_i = 1 if the end state passes the environment's check, else 0

Why: the reference with a verifier, which the outcome-blind settings do without. The evaluator comes in through the
constructor by name, here and in no judged rubric.

An evaluator that fails says nothing about the agent: its trajectory leaves the group and is counted, never scored 0.
Gives no citations, so that step credit falls back to uniform credit. A restart keeps nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from draco.env.base import Evaluator
from draco.judge.stage import BaseRubric, judged_without_criteria
from draco.types import Failure, Group, Judgement

__all__ = ["OutcomeRubric"]


class OutcomeRubric(BaseRubric):
    """Rewards success."""

    gives_citations = False

    def __init__(self, evaluator: Evaluator) -> None:
        super().__init__()
        self.evaluator = evaluator

    def judge(self, groups: Iterable[Group]) -> Iterator[Judgement]:
        """Yield one judgement with K = 0 a group, in the order of arrival, after all rollouts have ended."""
        for group in list(groups):
            rewards: dict[int, float] = {}
            failures: list[Failure] = []
            for t in group.live().trajectories:
                try:
                    outcome = self.evaluator.evaluate(group.task, t.end_state)
                except Exception as error:  # whatever an environment's evaluator raises is no verdict on the agent
                    failures.append(Failure(t.sample, "evaluate", f"{type(error).__name__}: {error}"))
                    continue
                if outcome.success is None:
                    failures.append(Failure(t.sample, "evaluate", outcome.error or "the evaluator gave no result"))
                else:
                    rewards[t.sample] = float(outcome.success)
            judgement = judged_without_criteria(group, rewards, failures)
            self._metrics.append(dict(judgement.metrics))
            yield judgement
