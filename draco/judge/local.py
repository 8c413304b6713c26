"""The policy as its own judge, in process: a litellm provider whose calls wait for the trainer's thread.

To the pipeline, on the background loop, the policy is a model of the litellm provider `draco-policy`. A call puts its
messages into a queue and waits. The rubric stage, on the trainer's thread, takes what is in the queue and lets the
engine answer it as a batch of one-turn episodes (`serve`): after the rollouts have ended, before the update.
"""

from __future__ import annotations

import asyncio
import hashlib
import queue
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from draco.core.errors import EngineError
from draco.core.types import Message, Task, Termination
from draco.env.base import ActionSpan, Episode, Reply
from draco.policy.chat import ChatFormat
from draco.rollout.loop import Limits
from draco.rollout.rollout import Rollout, sampling_seed

if TYPE_CHECKING:
    from draco.policy.policy import Policy
    from draco.rollout.engines.base import Engine

__all__ = ["PROVIDER", "Answer", "Answering", "Ask", "adapter_hash", "asks", "register", "serve"]

PROVIDER = "draco-policy"
_SETTLE_S = 0.02  #: no new call for so long: those in the queue are a batch
_ALIKE = 1.25  #: longest over shortest prompt of one batch: the engine reads the rest of longer ones token by token


class _TooLong(EngineError):
    """A prompt that does not fit the policy's context."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One reply of the policy."""

    text: str
    truncated: bool  #: it ran into the token limit
    tokens_in: int
    tokens_out: int


@dataclass(frozen=True, slots=True)
class Ask:
    """A call that waits for its answer."""

    messages: tuple[Message, ...]
    asker: tuple[str, int, int] = ("", -1, 0)  #: task, attempt, repeat: tells calls apart whose prompts are equal
    answer: Future[Answer] = field(default_factory=Future)

    @property
    def words(self) -> str:
        """What its answer depends on; calls that arrive in any order are sorted by it."""
        return repr((self.messages, self.asker))


#: calls of this process that wait for the trainer's thread
asks: queue.SimpleQueue[Ask] = queue.SimpleQueue()


def register() -> None:
    """Make `draco-policy/…` known to litellm. Safe to call twice."""
    import litellm
    from litellm.llms.custom_llm import CustomLLM
    from litellm.types.utils import Usage

    from draco.judge.requests import ASKER

    class PolicyJudge(CustomLLM):
        async def acompletion(self, *args: Any, **kwargs: Any) -> Any:
            ask = Ask(tuple(Message(m["role"], m["content"]) for m in kwargs["messages"]), ASKER.get())
            asks.put(ask)
            try:
                answer = await asyncio.wrap_future(ask.answer)
            except _TooLong as error:
                raise litellm.exceptions.ContextWindowExceededError(str(error), kwargs["model"], PROVIDER) from None
            response = kwargs["model_response"]
            response.choices[0].message.content = answer.text
            response.choices[0].finish_reason = "length" if answer.truncated else "stop"
            total = answer.tokens_in + answer.tokens_out
            response.usage = Usage(
                prompt_tokens=answer.tokens_in, completion_tokens=answer.tokens_out, total_tokens=total
            )
            response._hidden_params["response_cost"] = 0.0  # our own machine
            return response

    others = [entry for entry in litellm.custom_provider_map if entry["provider"] != PROVIDER]
    litellm.custom_provider_map = [*others, {"provider": PROVIDER, "custom_handler": PolicyJudge()}]


class _OneAction:
    """An action format in which a turn is one action."""

    name, stop, reminder = "reply", (), ""

    def parse(self, text: str) -> tuple[ActionSpan, ...]:
        return (ActionSpan(0, len(text), text),)

    def attempted(self, text: str) -> bool:
        return False


class _Exchange(Episode):
    """One question, one answer."""

    format: Any = _OneAction()

    def __init__(self, messages: tuple[Message, ...]) -> None:
        self.opening = messages

    def step(self, actions: Sequence[str]) -> Reply:
        return Reply((), done=True, completed=True)

    def end_state(self) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class Answering:
    """How the policy answers."""

    engine: Engine
    policy: Policy
    chat: ChatFormat  #: with the template's thinking switched as the judge wants it
    temperature: float
    max_reply_tokens: int
    context: int  #: tokens of prompt and reply together
    seed: int
    step: int

    def answer(self, batch: Sequence[Ask], seen: Counter[str]) -> None:
        """Answer calls, each from its own random stream.

        Args:
            batch: calls; every one gets its answer or an error.
            seen: how often each call was asked before: a repeated one gets another stream.
        """
        rollouts: dict[int, Rollout] = {}
        for at, ask in enumerate(batch):
            key = hashlib.sha256(ask.words.encode(errors="surrogatepass")).hexdigest()
            rollout = Rollout(
                _Exchange(ask.messages),
                self.chat,
                Limits(max_turns=1, max_response_tokens=self.max_reply_tokens),
                task=Task(key, "", "judge", key),
                sample=at,
                seed=sampling_seed(self.seed, "judge", self.step, key, seen[key]),
                policy_version=self.policy.version,
            )
            seen[key] += 1
            if rollout.prompt_tokens + self.max_reply_tokens > self.context:
                # A prompt that does not fit fails its call alone, as a provider would refuse it.
                ask.answer.set_exception(
                    _TooLong(
                        f"a judge prompt of {rollout.prompt_tokens} tokens and a reply of {self.max_reply_tokens} "
                        f"exceed the context of {self.context}"
                    )
                )
            else:
                rollouts[at] = rollout
        for bucket in _buckets(rollouts.values()):
            for ended in self.engine.run(self.policy, bucket, temperature=self.temperature):
                ask = batch[ended.sample]
                if ended.termination not in (Termination.SUBMITTED, Termination.LENGTH_LIMIT):
                    ask.answer.set_exception(EngineError(f"{ended.termination}: {ended.error}"))
                    continue
                ask.answer.set_result(
                    Answer(
                        self.chat.opened + ended.messages[-1].content,  # a thought that the template began
                        ended.termination is Termination.LENGTH_LIMIT,
                        ended.prompt_tokens,
                        len(ended.token_ids) - ended.prompt_tokens,
                    )
                )


def _buckets(rollouts: Iterable[Rollout]) -> list[list[Rollout]]:
    out: list[list[Rollout]] = []
    for rollout in sorted(rollouts, key=lambda r: r.prompt_tokens):
        if not out or rollout.prompt_tokens > _ALIKE * out[-1][0].prompt_tokens:
            out.append([])
        out[-1].append(rollout)
    return out


def serve(answering: Answering, done: Callable[[], bool]) -> None:
    """Answer calls on this thread until `done`, but for cancelled ones. A fault of the engine fails its batch of calls,
    and is raised."""
    seen: Counter[str] = Counter()
    while not done():
        batch: list[Ask] = []
        quiet_at = time.monotonic() + _SETTLE_S
        while time.monotonic() < quiet_at:
            try:
                ask = asks.get(timeout=_SETTLE_S / 4)
            except queue.Empty:
                continue
            batch.append(ask)
            quiet_at = time.monotonic() + _SETTLE_S
        batch = [ask for ask in batch if ask.answer.set_running_or_notify_cancel()]
        try:
            if batch:
                # The order of arrival is the loop's; the order of the batch must not be.
                answering.answer(sorted(batch, key=lambda ask: ask.words), seen)
        except BaseException as error:
            for ask in batch:
                if not ask.answer.done():
                    ask.answer.set_exception(EngineError(f"{type(error).__name__}: {error}"))
            raise


def adapter_hash(policy: Policy) -> str:
    """16 hex digits over the adapter's weights: what a self-judge's cache keys hold."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(policy.adapter_state().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
