"""One record for each evaluated rollout: the only place where success meets a trajectory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from draco.core.llm.money import Prices, Usage
from draco.core.types import Group, Task, Termination, Trajectory
from draco.env.base import CODE, TOOL_CALL, Evaluator, Outcome

__all__ = ["EvalRecord", "evaluate_end_state", "evaluate_groups", "record_of", "token_usage"]

_REMINDERS = (CODE.reminder, TOOL_CALL.reminder)


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """One rollout, evaluated."""

    task_id: str
    scenario_id: str
    difficulty: int
    sample: int
    success: bool | None  #: None: the evaluator failed (`error`); there is no score, and it is counted as such
    termination: str
    turns: int
    step_tokens: int  #: tokens that the policy wrote
    faults: tuple[str, ...] = ()
    causal_steps: tuple[int, ...] = ()
    error: str = ""
    interactions: int = 0  #: turns whose actions the environment ran and answered
    input_tokens: int = 0  #: read for the first time: prompt, observations, template and earlier turns, once each
    cached_tokens: int = 0  #: read again in a later turn
    cost_usd: float | None = None  #: None: unknown

    def as_dict(self) -> dict[str, Any]:
        """JSON-able fields."""
        return asdict(self)

    def priced(self, prices: Prices | None) -> EvalRecord:
        """The same record with its cost at `prices`; None leaves the cost as it is."""
        if prices is None:
            return self
        usage = Usage(self.input_tokens + self.cached_tokens, self.step_tokens, self.cached_tokens)
        return replace(self, cost_usd=prices.cost(usage))


def evaluate_end_state(evaluator: Evaluator | None, task: Task, end_state: str, termination: Termination) -> Outcome:
    """Outcome of one rollout. A quarantined rollout has failed its task; a failing evaluator gives success None."""
    if evaluator is None:
        return Outcome(None, error="the environment has no evaluator")
    if termination.quarantined:
        return Outcome(False, error=f"quarantined: {termination}")
    try:
        return evaluator.evaluate(task, end_state)
    except Exception as error:  # an evaluator is foreign code: its fault neither ends a run nor becomes a score
        return Outcome(None, error=f"{type(error).__name__}: {error}")


def token_usage(trajectory: Trajectory) -> Usage:
    """What a provider would count for a trajectory with token ids: every turn reads all that came before it."""
    starts: dict[int, int] = {}
    for step in trajectory.steps:
        starts.setdefault(step.turn, step.span[0])
    once = starts[max(starts)] if starts else trajectory.prompt_tokens
    read = sum(starts.values()) if starts else once
    return Usage(read, sum(trajectory.step_tokens), read - once)


def evaluate_groups(
    groups: Iterable[Group], evaluator: Evaluator | None, prices: Prices | None = None
) -> list[EvalRecord]:
    """Evaluate every rollout, in batch order; `prices` are of the policy's tokens."""
    ordered = sorted(groups, key=lambda g: g.index)
    return [record_of(t, evaluator, token_usage(t)).priced(prices) for g in ordered for t in g.trajectories]


def record_of(
    trajectory: Trajectory, evaluator: Evaluator | None, usage: Usage, cost_usd: float | None = None
) -> EvalRecord:
    """Evaluate one rollout whose turns took `usage`."""
    task = trajectory.task
    outcome = evaluate_end_state(evaluator, task, trajectory.end_state, trajectory.termination)
    fault = f": {trajectory.error}" if trajectory.termination.quarantined and trajectory.error else ""
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
        error=outcome.error + fault,
        interactions=len({s.turn for s in trajectory.steps if s.observation and s.observation not in _REMINDERS}),
        input_tokens=usage.tokens_in - usage.tokens_cached,
        cached_tokens=usage.tokens_cached,
        cost_usd=cost_usd,
    )
