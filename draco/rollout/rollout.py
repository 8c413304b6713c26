"""A token-exact rollout: the agent loop over token ids, independent of the engine that samples.

While `token_ids` has more tokens than the engine has fed to the model, the engine feeds them; then it samples a token
and calls `push`. When `push` returns True the turn is over and `finish_turn` runs the environment and appends the gap
tokens.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

import numpy as np

from draco.core.types import Step, Termination, Trajectory
from draco.env.base import ActionSpan, Episode
from draco.policy.chat import ChatFormat
from draco.rollout.loop import AgentLoop, Identity, Limits

__all__ = ["STEP_KINDS", "Rollout", "sampling_seed"]

STEP_KINDS = ("turn", "code_block", "tool_call")
_WINDOW = 24  # tokens decoded to look for a stop string: longer than any stop string in tokens


def sampling_seed(seed: int, purpose: str, step: int, task_id: str, sample: int) -> int:
    """A 63-bit key of one trajectory's private generator, stable across processes and batch layouts."""
    text = f"{seed}|{purpose}|{step}|{task_id}|{sample}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class Rollout(AgentLoop):
    """A trajectory whose turns are sampled token by token.

    Args:
        chat: encodes prompt, observations and turn glue.
        step_kind: what a step is: `turn`, `code_block` or `tool_call`.
    """

    def __init__(
        self,
        episode: Episode,
        chat: ChatFormat,
        limits: Limits,
        *,
        step_kind: str = "turn",
        **identity: Unpack[Identity],
    ) -> None:
        super().__init__(episode, limits, **identity)
        self.chat, self.step_kind = chat, step_kind
        self.token_ids: list[int] = list(chat.prompt_ids(episode.opening))
        self.prompt_tokens = self._turn_start = len(self.token_ids)
        self.step_of: list[int] = [-1] * self.prompt_tokens
        self.logprobs: list[float] = [0.0] * self.prompt_tokens
        self.stop = episode.format.stop
        self._may_finish = chat.may_finish(self.stop) if self.stop else frozenset()
        self._uniforms = _Uniforms(self.seed)

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
            or self._budget_spent()
            or sampled == self.limits.max_turn_tokens
            or self.overdue()
        )

    def budget(self) -> int:
        """Tokens that may still be sampled in this turn, by the budgets of the trajectory and of the turn."""
        length = len(self.token_ids)
        room = self.limits.max_response_tokens - (length - self.prompt_tokens)
        cap = self.limits.max_turn_tokens
        return min(room, cap - (length - self._turn_start)) if cap else room

    def _at_stop(self) -> bool:
        start = max(self._turn_start, len(self.token_ids) - _WINDOW)
        window = self.chat.decode(self.token_ids[start:])
        if not any(s in window for s in self.stop):
            return False
        # Code that is only thought of ends nothing, neither in the thoughts nor when they close.
        turn = window if start == self._turn_start else self.chat.decode(self.token_ids[self._turn_start :])
        said = self.chat.said(turn)
        return any(s in said for s in self.stop)

    def _turn_text(self) -> str:
        sampled = self.token_ids[self._turn_start :]
        return self.chat.decode(sampled[:-1] if sampled[-1] in self.chat.end_ids else sampled)

    def _budget_spent(self) -> bool:
        return len(self.token_ids) - self.prompt_tokens >= self.limits.max_response_tokens

    def _next_turn(self, observation: str) -> Termination | None:
        glue = self.chat.glue(observation, self.token_ids[-1])
        if len(self.token_ids) + len(glue) - self.prompt_tokens >= self.limits.max_response_tokens:
            # Gap tokens that nothing follows are left out: they would train nothing.
            return Termination.LENGTH_LIMIT
        self.token_ids += glue
        self.step_of += [-1] * len(glue)
        self.logprobs += [0.0] * len(glue)
        self._turn_start = len(self.token_ids)
        return None

    def _actions(self, text: str) -> tuple[ActionSpan, ...]:
        """Actions of a turn; where the template opened its thinking, so did the turn."""
        opened = len(self.chat.opened)
        found = self.episode.format.parse(self.chat.opened + text)
        return tuple(replace(a, start=a.start - opened, stop=a.stop - opened) for a in found) if opened else found

    def _add_steps(self, text: str, actions: Sequence[ActionSpan], observations: Sequence[str]) -> None:
        start, sampled = self._turn_start, self.token_ids[self._turn_start :]
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
        return 1 + bisect_left(range(1, len(sampled)), characters, key=lambda n: len(self.chat.decode(sampled[:n])))

    def trajectory(self) -> Trajectory:
        termination = self._finished()
        stop = len(self.token_ids)
        if termination.quarantined:  # a fault in the middle of a turn leaves sampled tokens without a step
            stop = self._turn_start if not self.steps else max(self.steps[-1].span[1], self.prompt_tokens)
        return Trajectory(
            task=self.task,
            sample=self.sample,
            messages=tuple(self.messages),
            token_ids=tuple(self.token_ids[:stop]),
            step_of=tuple(self.step_of[:stop]),
            logprobs=tuple(self.logprobs[:stop]),
            steps=tuple(self.steps),
            termination=termination,
            prompt_tokens=self.prompt_tokens,
            policy_version=self.policy_version,
            seed=self.seed,
            end_state=self._end_state,
            error=self.error,
            timings=self._timings(),
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
