"""Rollouts of the desk's scripted agent, with chosen faults, as trajectories of text alone."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from support.factory import trajectory

from draco.core.types import Step, Task, Trajectory
from draco.env.base import Outcome
from draco.env.desk.agent import Agent
from draco.env.desk.environment import DeskEnvironment
from draco.env.desk.evaluator import DeskEvaluator
from draco.env.desk.scenarios import gold_task


def play(task: Task, sample: int, rates: dict[str, float], by_call: bool = False) -> tuple[Trajectory, Outcome]:
    """One rollout, and what the evaluator says of it; `by_call` makes every call a step of its own."""
    episode = DeskEnvironment().open(task, seed=sample)
    agent = Agent(gold_task(task.id), rates, Random(f"{task.id}/{sample}"))
    steps: list[Step] = []
    observed: list[str] = []
    turn = 0
    while not agent.done:
        text = agent.turn(observed)
        turn += 1
        spans = episode.format.parse(text)
        observed = list(episode.step([s.body for s in spans]).observations)
        if by_call:
            for span, answer in zip(spans, observed, strict=True):
                steps.append(Step(len(steps) + 1, (0, 0), text[span.start : span.stop], answer, turn))
        else:
            steps.append(Step(len(steps) + 1, (0, 0), text, "\n".join(observed), turn))
    outcome = DeskEvaluator("tool_call" if by_call else "turn").evaluate(task, episode.end_state())
    made = trajectory(sample, task=task, opening=episode.opening, seed=sample)
    return replace(made, steps=tuple(steps)), outcome
