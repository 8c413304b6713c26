"""An environment that answers with what it is told, and an engine that types a script."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from draco.core.types import Message, Task
from draco.env.base import CODE, ActionFormat, Environment, Episode, Evaluator, Outcome, Reply
from draco.rollout.engines import Engine
from draco.rollout.rollout import Rollout


class EchoEpisode(Episode):
    """Answers every action with its own text; `done` completes, `fail` completes with failure, `boom` is a fault."""

    def __init__(self, task: Task, action_format: ActionFormat = CODE, closes: bool = True) -> None:
        self.opening = (Message("system", "echo"), Message("user", task.instruction))
        self.format = action_format
        self.closes, self.completed, self.failed = closes, False, False
        self.closed = 0
        self.log: list[str] = []

    def step(self, actions: Sequence[str]) -> Reply:
        for action in actions:
            if action == "boom":
                raise RuntimeError("disk on fire")
            self.log.append(action)
            self.completed |= action in {"done", "fail"}
            self.failed |= action == "fail"
        return Reply(tuple(f"got {a}" for a in actions), self.completed and self.closes, self.completed, self.failed)

    def end_state(self) -> str:
        return "|".join(self.log)

    def close(self) -> None:
        self.closed += 1


class EchoEnvironment(Environment):
    """Two tasks, no world."""

    name = "echo"
    splits = ("train", "test")

    def __init__(self, action_format: ActionFormat = CODE, closes: bool = True) -> None:
        self.format, self.closes = action_format, closes
        self.opened: list[EchoEpisode] = []

    def tasks(self, split: str) -> tuple[Task, ...]:
        return tuple(Task(f"{split}_{i}", f"say {i}", split, f"s{i}") for i in range(2))

    def open(self, task: Task, *, seed: int) -> EchoEpisode:
        episode = EchoEpisode(task, self.format, self.closes)
        self.opened.append(episode)
        return episode


class EchoEvaluator(Evaluator):
    def evaluate(self, task: Task, end_state: str) -> Outcome:
        return Outcome(end_state.endswith("done"))


class TypedEngine(Engine):
    """An engine that types: turn t of a rollout is the t-th text of its script, token by token.

    A text that does not reach a stop string is followed by the end token, unless it ends in `…` (cut off by a budget).
    """

    def __init__(self, script: Callable[[Rollout], Sequence[str]]) -> None:
        self.script = script

    def run(self, policy: object, rollouts: Sequence[Rollout], *, temperature: float) -> Iterator[Rollout]:
        for rollout in rollouts:
            type_out(rollout, self.script(rollout))
            yield rollout


def type_out(rollout: Rollout, turns: Sequence[str]) -> None:
    """Push the tokens of each turn and let the rollout finish it."""
    (end,) = rollout.chat.end_ids
    for text in turns:
        tokens = [*rollout.chat.encode_text(text), end]
        for token in tokens:
            if rollout.push(token, -0.5):
                rollout.finish_turn()
                break
        if rollout.termination is not None:
            return
    raise AssertionError(f"the script of {rollout.task.id} ran out before the episode ended")
