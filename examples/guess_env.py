"""A new environment in one file: guess a number by asking whether it is higher or lower.

An environment opens episodes and knows nothing of success; the evaluator reads the end state afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from draco.core.errors import ConfigError
from draco.core.types import Message, Task
from draco.env.base import CODE, Environment, Episode, Evaluator, Outcome, Reply

__all__ = ["GuessEnvironment", "GuessEvaluator"]


def _number(task_id: str) -> int:
    return random.Random(task_id).randint(1, 20)


class GuessEpisode(Episode):
    """`<code>7</code>` guesses; the right guess ends the episode."""

    format = CODE

    def __init__(self, task: Task) -> None:
        self.opening = (Message("system", "Guess with <code>NUMBER</code>."), Message("user", task.instruction))
        self._number, self._last = _number(task.id), ""

    def step(self, actions: Sequence[str]) -> Reply:
        self._last = actions[-1].strip()
        if not self._last.isdigit():
            return Reply(("not a number",))
        guess, right = int(self._last), int(self._last) == self._number
        return Reply(("right" if right else "higher" if guess < self._number else "lower",), right, right)

    def end_state(self) -> str:
        return self._last


class GuessEnvironment(Environment):
    """Numbers from 1 to 20."""

    name = "guess"
    splits = ("train", "test")

    def tasks(self, split: str) -> tuple[Task, ...]:
        if split not in self.splits:
            raise ConfigError(f"env=guess has no split {split!r}; splits: {', '.join(self.splits)}")
        return tuple(Task(f"{split}_{i}", "guess my number from 1 to 20.", split, f"{split}_{i}") for i in range(8))

    def open(self, task: Task, *, seed: int) -> Episode:
        return GuessEpisode(task)


class GuessEvaluator(Evaluator):
    """Success: the last guess is the number."""

    def evaluate(self, task: Task, end_state: str) -> Outcome:
        return Outcome(end_state == str(_number(task.id)))
