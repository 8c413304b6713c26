"""One record an evaluated rollout: the only place where success meets a trajectory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from draco.env.base import Evaluator, Outcome
from draco.types import Group, Task, Termination, Trajectory

__all__ = ["EvalRecord", "evaluate_end_state", "evaluate_groups"]


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """One rollout, evaluated."""

    task_id: str
    scenario_id: str
    difficulty: int
    sample: int
    success: bool | None  #: None: the evaluator failed (`error`); no score, and counted as such
    termination: str
    turns: int
    step_tokens: int
    faults: tuple[str, ...] = ()
    causal_steps: tuple[int, ...] = ()
    error: str = ""

    def as_dict(self) -> dict[str, Any]:
        """JSON-able fields."""
        return asdict(self)


def evaluate_end_state(evaluator: Evaluator | None, task: Task, end_state: str, termination: Termination) -> Outcome:
    """Outcome of one rollout. A quarantined rollout has failed its task; a failing evaluator gives success None."""
    if evaluator is None:
        return Outcome(None, error="the environment has no evaluator")
    if termination.quarantined:
        return Outcome(False, error=f"quarantined: {termination}")
    try:
        return evaluator.evaluate(task, end_state)
    except Exception as error:  # an evaluator is foreign code; its fault must not end a run, nor become a score
        return Outcome(None, error=f"{type(error).__name__}: {error}")


def evaluate_groups(groups: Iterable[Group], evaluator: Evaluator | None) -> list[EvalRecord]:
    """Evaluate every rollout, in batch order."""
    ordered = sorted(groups, key=lambda g: g.index)
    return [_record(t, evaluator) for g in ordered for t in g.trajectories]


def _record(trajectory: Trajectory, evaluator: Evaluator | None) -> EvalRecord:
    task = trajectory.task
    outcome = evaluate_end_state(evaluator, task, trajectory.end_state, trajectory.termination)
    return EvalRecord(
        task_id=task.id,
        scenario_id=task.scenario_id,
        difficulty=task.difficulty,
        sample=trajectory.sample,
        success=outcome.success,
        termination=str(trajectory.termination),
        turns=trajectory.steps[-1].turn if trajectory.steps else 0,
        step_tokens=sum(trajectory.step_tokens),
        faults=outcome.faults,
        causal_steps=outcome.causal_steps,
        error=outcome.error,
    )
