"""A new environment in one file: guess a number by asking whether it is higher or lower.

An environment opens episodes and knows nothing of success; the evaluator reads the end state afterwards.
"""

import random
from collections.abc import Sequence

from draco.core.errors import ConfigError
from draco.core.types import Message, Task
from draco.env.base import CODE, Environment, Episode, Evaluator, Outcome, Reply


def number_of(task: Task) -> int:
    return random.Random(task.id).randint(1, 20)


class GuessEpisode(Episode):
    """`<code>7</code>` guesses; the right guess ends the episode."""

    format = CODE

    def __init__(self, task: Task) -> None:
        self.opening = (Message("system", "Guess with <code>NUMBER</code>."), Message("user", task.instruction))
        self.number, self.last = number_of(task), ""

    def step(self, actions: Sequence[str]) -> Reply:
        self.last = actions[-1].strip()
        if not self.last.isdigit():
            return Reply(("not a number",))
        right = int(self.last) == self.number
        hint = "higher" if int(self.last) < self.number else "lower"
        return Reply(("right" if right else hint,), done=right, completed=right)

    def end_state(self) -> str:
        return self.last


class GuessEnvironment(Environment):
    name = "guess"
    splits = ("train", "test")

    def tasks(self, split: str) -> tuple[Task, ...]:
        if split not in self.splits:
            raise ConfigError(f"env=guess has no split {split!r}; splits: {', '.join(self.splits)}")
        return tuple(Task(f"{split}_{i}", "guess my number from 1 to 20.", split, f"{split}_{i}") for i in range(8))

    def open(self, task: Task, *, seed: int) -> Episode:
        return GuessEpisode(task)


class GuessEvaluator(Evaluator):
    def evaluate(self, task: Task, end_state: str) -> Outcome:
        return Outcome(end_state == str(number_of(task)))
