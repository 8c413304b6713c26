"""Outcome rewards: the environment's own success, without a judge (Section 4.3).

    R_i = 1 if the end state passes the environment's check, else 0

Why: the comparison with a verifier, which the other settings do without. Only this rubric gets the evaluator.

If the evaluator fails, the trajectory leaves the group and is counted as failed; it is never scored 0. There are no
citations, so step credit falls back to uniform credit. A checkpoint need not save any state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from draco.config.options import Share, checked
from draco.core.errors import ConfigError, TrainingStopped
from draco.core.types import Failure, Group, Judgement
from draco.env.base import Evaluator
from draco.judge.stage import BaseRubric, judged_without_criteria

__all__ = ["OutcomeRubric"]


@checked("rubric")
class OutcomeRubric(BaseRubric):
    """Rewards success."""

    gives_citations = False

    def __init__(self, evaluator: Evaluator | None, max_failed_share: Share = 0.25) -> None:
        """Set up the stage.

        Args:
            evaluator: of the environment.
            max_failed_share: the run stops if a larger share of a batch's rollouts has no result.

        Raises:
            ConfigError: the environment has no evaluator, or an option is out of range.
        """
        super().__init__()
        if evaluator is None:
            raise ConfigError("rubric=outcome needs the environment's evaluator, and this environment names none")
        self.evaluator, self.max_failed_share = evaluator, max_failed_share

    def judge(self, groups: Iterable[Group]) -> Iterator[Judgement]:
        """Yield one judgement with K = 0 for each group, in order of arrival, after all rollouts have ended.

        Raises:
            TrainingStopped: too many rollouts have no outcome.
        """
        waiting = list(groups)
        members, failed = sum(len(group.live().trajectories) for group in waiting), 0
        for group in waiting:
            rewards: dict[int, float] = {}
            failures: list[Failure] = []
            for t in group.live().trajectories:
                try:
                    outcome = self.evaluator.evaluate(group.task, t.end_state)
                except Exception as error:  # an environment's evaluator may raise anything
                    failures.append(Failure(t.sample, "evaluate", f"{type(error).__name__}: {error}"))
                    continue
                if outcome.success is None:
                    failures.append(Failure(t.sample, "evaluate", outcome.error or "the evaluator gave no result"))
                else:
                    rewards[t.sample] = float(outcome.success)
            failed += len(failures)
            if failed > self.max_failed_share * members:
                raise TrainingStopped(
                    f"{failed} of {members} rollouts of this batch have no outcome, more than max_failed_share="
                    f"{self.max_failed_share:g}; the last: {failures[-1].reason}"
                )
            judgement = judged_without_criteria(group, rewards, failures)
            self._metrics.append(dict(judgement.metrics))
            yield judgement
