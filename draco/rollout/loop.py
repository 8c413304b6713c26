"""The agent loop: what a turn, a step and an end of an episode are, whoever writes the turns.

`Rollout` (tokens) and `TextRollout` (a model behind an API) are agent loops; tables show both side by side.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict, Unpack

from draco.config.options import Count, Index, NonNegative, checked
from draco.core.types import Message, Step, Task, Termination, Trajectory
from draco.env.base import ActionSpan, Episode

__all__ = ["AgentLoop", "Identity", "Limits"]


@checked("limits")
@dataclass(frozen=True, slots=True)
class Limits:
    """Budgets of one rollout. Reaching one ends the episode; nothing is ever truncated out of a training row."""

    max_turns: Count = 50
    max_prompt_tokens: Count = 4096  #: tasks with longer prompts are filtered before training
    max_response_tokens: Count = 24576  #: over all turns of a trajectory, observations included
    max_turn_tokens: Index = 0  #: sampled tokens a turn; 0 = no cap
    deadline_s: NonNegative = 0.0  #: wall clock of a trajectory from its start; waiting for a place is free; 0 = none


class Identity(TypedDict):
    """Which trajectory this is; see `Trajectory`."""

    task: Task
    sample: int
    seed: int
    policy_version: NotRequired[int]
    group_index: NotRequired[int]  #: position of the task in its batch


class AgentLoop(ABC):
    """One episode being played.

    An engine calls `start` when it has a place for the episode, gets the text of a turn from a model, and calls
    `finish_turn`, which runs the actions of the turn. `termination` is set once the episode has ended.

    Args:
        episode: the environment's side; closed exactly once when the episode ends.
        limits: budgets.
        identity: task, sample, seed, policy_version (0), group_index (0).
    """

    def __init__(self, episode: Episode, limits: Limits, **identity: Unpack[Identity]) -> None:
        self.episode, self.limits = episode, limits
        self.task, self.sample, self.seed = identity["task"], identity["sample"], identity["seed"]
        self.policy_version, self.group_index = identity.get("policy_version", 0), identity.get("group_index", 0)
        self.messages: list[Message] = list(episode.opening)
        self.steps: list[Step] = []
        self.termination: Termination | None = None
        self.error = ""
        self.ended: float | None = None  #: monotonic clock; an engine may hand the rollout over later
        self._turn = 0
        self._reminded = self._completed = self._failed = False
        self._end_state = ""
        self._started: float | None = None
        self._deadline = math.inf
        self._env_s = 0.0

    def start(self) -> None:
        """Start the clock of deadline and timings: the rollout has a place now. Later calls change nothing."""
        if self._started is None:
            self._started = time.monotonic()
            if self.limits.deadline_s:
                self._deadline = self._started + self.limits.deadline_s

    @property
    def time_left(self) -> float:
        """Seconds to the deadline; infinite without one, and before `start`."""
        return self._deadline - time.monotonic()

    def overdue(self) -> bool:
        """True past the wall-clock deadline."""
        return self._deadline < math.inf and time.monotonic() > self._deadline

    def finish_turn(self) -> None:
        """Close the turn: parse it, run its actions, add its steps, and prepare the next turn or end the episode."""
        text = self._turn_text()
        self._turn += 1
        actions = self._actions(text)
        self.messages.append(Message("assistant", text))
        observations, termination = self._run(text, actions)
        self._add_steps(text, actions, observations)
        observation = "\n".join(observations)
        if observation:
            self.messages.append(Message("user", observation))
        if termination is None and self._turn >= self.limits.max_turns:
            termination = Termination.TURN_LIMIT
        if termination is None:
            termination = self._next_turn(observation)
        if termination is not None:
            self.end(termination)

    @abstractmethod
    def _turn_text(self) -> str:
        """What the model wrote in this turn."""

    @abstractmethod
    def _budget_spent(self) -> bool:
        """Whether the response budget is used up, this turn included."""

    @abstractmethod
    def _add_steps(self, text: str, actions: Sequence[ActionSpan], observations: Sequence[str]) -> None:
        """Append the steps of this turn."""

    @abstractmethod
    def _next_turn(self, observation: str) -> Termination | None:
        """Prepare the next turn; a termination if there is no room for one."""

    def _actions(self, text: str) -> tuple[ActionSpan, ...]:
        return self.episode.format.parse(text)

    def _run(self, text: str, actions: Sequence[ActionSpan]) -> tuple[tuple[str, ...], Termination | None]:
        """Observations of the turn, and the termination if it ends the episode."""
        if self.overdue():
            return (), Termination.DEADLINE
        if self._budget_spent():  # perhaps in the middle of an action: nothing is run
            return (), Termination.LENGTH_LIMIT
        if not actions:
            return self._no_action(text)
        self._reminded = False
        started = time.monotonic()
        try:
            reply = self.episode.step([a.body for a in actions])
        except Exception as error:  # an environment's fault must end one episode, not the run
            self.error = f"{type(error).__name__}: {error}"
            return (), Termination.ENVIRONMENT_ERROR
        finally:
            self._env_s += time.monotonic() - started
        self._completed, self._failed = reply.completed, reply.failed
        if self.overdue():
            return reply.observations, Termination.DEADLINE
        return reply.observations, self._closing() if reply.done else None

    def _closing(self) -> Termination:
        return Termination.SUBMITTED if self._completed and not self._failed else Termination.GAVE_UP

    def _no_action(self, text: str) -> tuple[tuple[str, ...], Termination | None]:
        """A closing turn after completion ends well; otherwise one reminder, then the end."""
        self.episode.idle()
        malformed = not text.strip() or self.episode.format.attempted(text)
        if self._completed and not malformed:
            return (), self._closing()
        if not self._reminded:
            self._reminded = True
            return (self.episode.format.reminder,), None
        return (), Termination.NO_ACTION if malformed else Termination.GAVE_UP

    def end(self, termination: Termination, error: str = "") -> None:
        """Set the termination, keep the end state and close the episode. Further calls change nothing."""
        if self.termination is not None:
            return
        self.termination, self.error = termination, error or self.error
        if not termination.quarantined:
            try:
                self._end_state = self.episode.end_state()
            except Exception as fault:
                self.termination, self.error = Termination.ENVIRONMENT_ERROR, f"{type(fault).__name__}: {fault}"
        try:
            self.episode.close()
        except Exception as fault:
            self.error = self.error or f"close: {type(fault).__name__}: {fault}"
        self.ended = time.monotonic()

    def abandon(self) -> bool:
        """End by deadline while a thread is still inside `finish_turn`.

        Returns:
            True if that thread's owner must close the episode once the thread is out; False if the rollout had ended
            by itself.
        """
        if self.termination is not None:
            return False
        self.termination, self.error = Termination.DEADLINE, "the environment had not answered by the deadline"
        self.ended = time.monotonic()
        return True

    @abstractmethod
    def trajectory(self) -> Trajectory:
        """The finished trajectory.

        Raises:
            RuntimeError: the rollout has not ended.
        """

    def _finished(self) -> Termination:
        if self.termination is None:
            raise RuntimeError("the rollout has not ended")
        return self.termination

    def _timings(self) -> dict[str, float]:
        """Seconds by phase."""
        ended = time.monotonic() if self.ended is None else self.ended
        return {"total_s": 0.0 if self._started is None else ended - self._started, "env_s": self._env_s}
