"""One record an evaluated rollout: the only place where success meets a trajectory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from draco.core.types import Group, Task, Termination, Trajectory
from draco.env.base import CODE, TOOL_CALL, Evaluator, Outcome

__all__ = [
    "EvalRecord",
    "Prices",
    "Usage",
    "evaluate_end_state",
    "evaluate_groups",
    "priced",
    "record_of",
    "token_usage",
]

_REMINDERS = (CODE.reminder, TOOL_CALL.reminder)


@dataclass(frozen=True, slots=True)
class Usage:
    """What the policy's turns took, as a provider would count it."""

    input_tokens: int  #: read for the first time: the prompt, observations, template glue and earlier turns, once each
    cached_tokens: int  #: read again with every later turn
    output_tokens: int
    cost_usd: float | None = None  #: None: nobody knows


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
    interactions: int = 0  #: turns whose actions the environment ran and answered
    input_tokens: int = 0
    cached_tokens: int = 0
    cost_usd: float | None = None

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


def token_usage(trajectory: Trajectory) -> Usage:
    """Usage of a token-exact trajectory: every turn reads all that came before it."""
    starts: dict[int, int] = {}
    for step in trajectory.steps:
        starts.setdefault(step.turn, step.span[0])
    output = sum(trajectory.step_tokens)
    once = starts[max(starts)] if starts else trajectory.prompt_tokens
    return Usage(once, sum(starts.values()) - once if starts else 0, output)


Prices = tuple[float, float, float]  #: USD per million tokens read for the first time, read again, written


def priced(usage: Usage, prices: Prices | None) -> Usage:
    """The same usage at reference prices; None leaves its cost as it is."""
    if prices is None:
        return usage
    tokens = (usage.input_tokens, usage.cached_tokens, usage.output_tokens)
    return replace(usage, cost_usd=sum(p * t for p, t in zip(prices, tokens, strict=True)) / 1e6)


def evaluate_groups(
    groups: Iterable[Group],
    evaluator: Evaluator | None,
    usage: Callable[[Trajectory], Usage] = token_usage,
) -> list[EvalRecord]:
    """Evaluate every rollout, in batch order."""
    ordered = sorted(groups, key=lambda g: g.index)
    return [record_of(t, evaluator, usage(t)) for g in ordered for t in g.trajectories]


def record_of(trajectory: Trajectory, evaluator: Evaluator | None, usage: Usage) -> EvalRecord:
    """Evaluate one rollout."""
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
        input_tokens=usage.input_tokens,
        cached_tokens=usage.cached_tokens,
        cost_usd=usage.cost_usd,
    )
