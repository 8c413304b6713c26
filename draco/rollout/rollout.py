"""One rollout as a state machine over token ids, independent of the engine that samples.

An engine calls `start` when it has a place for the rollout, then looks at `token_ids`: while it has fewer model inputs
than tokens, it feeds them; when it has fed them all it samples one and calls `push`. When `push` returns True the turn
is over and `finish_turn` runs the environment and appends the gap tokens. `termination` is set once the episode has
ended.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from draco.config.checks import number, whole
from draco.core.types import Message, Step, Task, Termination, Trajectory
from draco.env.base import ActionSpan, Episode
from draco.policy.chat import ChatFormat

__all__ = ["STEP_KINDS", "Limits", "Rollout", "sampling_seed"]

STEP_KINDS = ("turn", "code_block", "tool_call")
_WINDOW = 24  # tokens decoded to look for a stop string: longer than any stop string in tokens


@dataclass(frozen=True, slots=True)
class Limits:
    """Budgets of one rollout. Reaching one ends the episode; nothing is ever truncated out of a training row."""

    max_turns: int = 50
    max_prompt_tokens: int = 4096  #: tasks with longer prompts are filtered before training
    max_response_tokens: int = 24576  #: over all turns of a trajectory, observations included
    max_turn_tokens: int = 0  #: sampled tokens a turn; 0 = no cap
    deadline_s: float = 0.0  #: wall clock a trajectory from its start on, waiting for a place left out; 0 = none

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_prompt_tokens", "max_response_tokens"):
            whole(f"limits.{name}", getattr(self, name), 1)
        whole("limits.max_turn_tokens", self.max_turn_tokens, 0)
        number("limits.deadline_s", self.deadline_s, 0)


def sampling_seed(seed: int, purpose: str, step: int, task_id: str, sample: int) -> int:
    """A 63-bit key of one trajectory's private generator, stable across processes and batch layouts."""
    text = f"{seed}|{purpose}|{step}|{task_id}|{sample}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class Rollout:
    """A running trajectory.

    Args:
        episode: the environment's side; closed exactly once when the episode ends.
        chat: encodes prompt, observations and turn glue.
        limits: budgets.
        task, sample, seed, policy_version: see `Trajectory`.
        step_kind: what a step is: `turn`, `code_block` or `tool_call`.
    """

    def __init__(
        self,
        episode: Episode,
        chat: ChatFormat,
        limits: Limits,
        *,
        task: Task,
        sample: int,
        seed: int,
        policy_version: int,
        step_kind: str = "turn",
        group_index: int = 0,
    ) -> None:
        self.episode, self.chat, self.limits = episode, chat, limits
        self.task, self.sample, self.seed, self.policy_version = task, sample, seed, policy_version
        self.step_kind, self.group_index = step_kind, group_index
        self.messages: list[Message] = list(episode.opening)
        self.token_ids: list[int] = list(chat.prompt_ids(episode.opening))
        self.prompt_tokens = len(self.token_ids)
        self.step_of: list[int] = [-1] * self.prompt_tokens
        self.logprobs: list[float] = [0.0] * self.prompt_tokens
        self.steps: list[Step] = []
        self.termination: Termination | None = None
        self.error = ""
        self._turn, self._turn_start = 0, self.prompt_tokens
        self._reminded = False
        self._end_state = ""
        self._started: float | None = None
        self.ended: float | None = None  #: on the monotonic clock, its episode closed; an engine may hand it over later
        self._deadline = math.inf
        self._env_s = 0.0
        stop = episode.format.stop
        self.stop, self._may_finish = stop, chat.may_finish(stop) if stop else frozenset()
        self._uniforms = _Uniforms(seed)

    def start(self) -> None:
        """Start the clock of deadline and timings: the rollout has a place now. Later calls change nothing."""
        if self._started is None:
            self._started = time.monotonic()
            if self.limits.deadline_s:
                self._deadline = self._started + self.limits.deadline_s

    def uniform(self) -> float:
        """Next number in [0, 1) of the trajectory's own generator: one a sampled token."""
        return self._uniforms.next()

    def push(self, token: int, logprob: float) -> bool:
        """Append one sampled token; True if it ends the turn, after which `finish_turn` must be called."""
        self.start()  # at the latest
        self.token_ids.append(token)
        self.step_of.append(len(self.steps))
        self.logprobs.append(logprob)
        sampled = len(self.token_ids) - self._turn_start
        return (
            token in self.chat.end_ids
            or (token in self._may_finish and self._at_stop())
            or len(self.token_ids) - self.prompt_tokens >= self.limits.max_response_tokens
            or sampled == self.limits.max_turn_tokens
            or self.overdue()
        )

    def budget(self) -> int:
        """Tokens that may still be sampled in this turn, by the budgets of the trajectory and of the turn."""
        length = len(self.token_ids)
        room = self.limits.max_response_tokens - (length - self.prompt_tokens)
        cap = self.limits.max_turn_tokens
        return min(room, cap - (length - self._turn_start)) if cap else room

    @property
    def time_left(self) -> float:
        """Seconds to the deadline; infinite without one, and before `start`."""
        return self._deadline - time.monotonic()

    def overdue(self) -> bool:
        """True past the wall-clock deadline."""
        return self._deadline < math.inf and time.monotonic() > self._deadline

    def _at_stop(self) -> bool:
        start = max(self._turn_start, len(self.token_ids) - _WINDOW)
        window = self.chat.decode(self.token_ids[start:])
        if not any(s in window for s in self.stop):
            return False
        # Code that is only thought of ends nothing, neither in the thoughts nor when they close.
        turn = window if start == self._turn_start else self.chat.decode(self.token_ids[self._turn_start :])
        said = self.chat.said(turn)
        return any(s in said for s in self.stop)

    def finish_turn(self) -> None:
        """Close the sampled turn: parse it, run its actions, append steps and gap tokens, or end the episode."""
        sampled = self.token_ids[self._turn_start :]
        ended = sampled[-1] in self.chat.end_ids
        text = self.chat.decode(sampled[:-1] if ended else sampled)
        self._turn += 1
        actions = self._actions(text)
        self.messages.append(Message("assistant", text))
        observations, termination = self._run(text, actions)
        self._add_steps(text, sampled, actions, observations)
        observation = "\n".join(observations)
        if observation:
            self.messages.append(Message("user", observation))
        if termination is None:
            glue = self.chat.glue(observation, sampled[-1])
            if self._turn >= self.limits.max_turns:
                termination = Termination.TURN_LIMIT
            elif len(self.token_ids) + len(glue) - self.prompt_tokens >= self.limits.max_response_tokens:
                # Gap tokens that nothing follows are left out: they would train nothing.
                termination = Termination.LENGTH_LIMIT
            else:
                self.token_ids += glue
                self.step_of += [-1] * len(glue)
                self.logprobs += [0.0] * len(glue)
                self._turn_start = len(self.token_ids)
        if termination is not None:
            self.end(termination)

    def _actions(self, text: str) -> tuple[ActionSpan, ...]:
        """Actions of a turn; where the template opened its thinking, so did the turn."""
        opened = len(self.chat.opened)
        found = self.episode.format.parse(self.chat.opened + text)
        return tuple(replace(a, start=a.start - opened, stop=a.stop - opened) for a in found) if opened else found

    def _run(self, text: str, actions: Sequence[ActionSpan]) -> tuple[tuple[str, ...], Termination | None]:
        """Observations of the turn, and the termination if it ends the episode."""
        if self.overdue():
            return (), Termination.DEADLINE
        if len(self.token_ids) - self.prompt_tokens >= self.limits.max_response_tokens:
            # The budget ended the turn, perhaps in the middle of an action: nothing is run.
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
        if reply.done:
            return reply.observations, self._closing()
        return reply.observations, None

    _completed = False
    _failed = False

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

    def _add_steps(
        self, text: str, sampled: list[int], actions: Sequence[ActionSpan], observations: Sequence[str]
    ) -> None:
        start = self._turn_start
        if self.step_kind == "turn" or len(actions) < 2:
            pieces = [(len(sampled), text, "\n".join(observations))]
        else:
            # Reasoning before an action belongs to it; what follows the last action, end token included, to the last.
            bounds = [*(a.stop for a in actions[:-1]), len(text)]
            cuts = [*(self._tokens_until(sampled, b) for b in bounds[:-1]), len(sampled)]
            texts = [text[a:b] for a, b in zip([0, *bounds[:-1]], bounds, strict=True)]
            shown = [*observations, *[""] * (len(actions) - len(observations))]
            pieces = list(zip(cuts, texts, shown, strict=True))
        last = 0
        for cut, action, observation in pieces:
            if cut == last:  # two actions inside one token: they cannot be told apart, the later text joins the next
                continue
            index = len(self.steps)
            self.steps.append(Step(index + 1, (start + last, start + cut), action, observation, self._turn))
            self.step_of[start + last : start + cut] = [index] * (cut - last)
            last = cut

    def _tokens_until(self, sampled: list[int], characters: int) -> int:
        """Smallest number of tokens whose text covers the first `characters` of the turn."""
        low, high = 1, len(sampled)
        while low < high:
            middle = (low + high) // 2
            if len(self.chat.decode(sampled[:middle])) >= characters:
                high = middle
            else:
                low = middle + 1
        return low

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
        """End by deadline while a thread is still inside `finish_turn`; True if that thread's owner must close the
        episode once it is out, False if the rollout had ended by itself."""
        if self.termination is not None:
            return False
        self.termination, self.error = Termination.DEADLINE, "the environment had not answered by the deadline"
        self.ended = time.monotonic()
        return True

    def trajectory(self) -> Trajectory:
        """The finished trajectory."""
        if self.termination is None:
            raise RuntimeError("the rollout has not ended")
        dangling = self._turn_start if not self.steps else max(self.steps[-1].span[1], self.prompt_tokens)
        # A fault in the middle of a turn leaves sampled tokens without a step; such a trajectory is quarantined anyway.
        stop = len(self.token_ids) if not self.termination.quarantined else dangling
        ended = time.monotonic() if self.ended is None else self.ended
        return Trajectory(
            task=self.task,
            sample=self.sample,
            messages=tuple(self.messages),
            token_ids=tuple(self.token_ids[:stop]),
            step_of=tuple(self.step_of[:stop]),
            logprobs=tuple(self.logprobs[:stop]),
            steps=tuple(self.steps),
            termination=self.termination,
            prompt_tokens=self.prompt_tokens,
            policy_version=self.policy_version,
            seed=self.seed,
            end_state=self._end_state,
            error=self.error,
            timings={
                "total_s": 0.0 if self._started is None else ended - self._started,
                "env_s": self._env_s,
            },
        )


class _Uniforms:
    """Uniform numbers drawn in blocks from a counter-based generator keyed by the trajectory's seed."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.Philox(key=seed))
        self._block: list[float] = []

    def next(self) -> float:
        if not self._block:
            self._block = self._generator.random(128).tolist()[::-1]
        return self._block.pop()
