"""Any model that litellm reaches, as the agent on the same harness: same prompt, same action format, same budgets.

For the frontier rows of a results table. Nothing here trains: the trajectories have no token ids.
"""

from __future__ import annotations

import asyncio
import math
import os
import queue
import time
import warnings
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tenacity

from draco.core.background import BackgroundLoop
from draco.core.errors import ConfigError, EngineError, ServerRefused
from draco.core.llm.faults import retry_after
from draco.core.llm.money import Usage
from draco.core.llm.redact import Redactor
from draco.core.types import Message, Step, Task, Termination, Trajectory
from draco.env.base import Environment, Episode, Reply
from draco.rollout.loop import Limits

__all__ = ["ApiAgent"]

_FOR_ALL = (401, 402, 403)  # key, credit, permission: every other request would be refused, too
_MAY_PASS = (408, 409, 425, 429)  # of the 4xx
_TIMEOUT_S = 300.0  # of one call


class _Passing(EngineError):
    """A fault that another attempt may not meet; `wait_s` is the pause that the provider asked for."""

    def __init__(self, text: str, wait_s: float) -> None:
        super().__init__(text)
        self.wait_s = wait_s


_WHAT_TO_CHECK = "check model=, its key, api_base= and temperature= (null sends none)"


class _Full(Exception):
    """The conversation no longer fits into the model's context."""


@dataclass(slots=True)
class _Talk:
    """One episode in progress."""

    messages: list[Message]
    deadline: float = math.inf  #: time.monotonic() after which it ends
    steps: list[Step] = field(default_factory=list)
    prompt: int = 0  #: tokens of the last request
    first_prompt: int = 0
    cached: int = 0
    output: int = 0
    cost: float | None = 0.0


class ApiAgent:
    """Plays tasks by chat completions.

    Args:
        model: litellm's name, provider first; the key comes from the provider's environment variable.
        limits: the same budgets as for a policy; tokens as the provider counts them. `deadline_s` ends a call that is
            on its way; an action that is, is waited for. `max_prompt_tokens` filters nothing: nobody can count before.
        temperature: None sends none, for models that refuse it.
        concurrency: episodes at a time.
        max_retries: of one call.
        api_base: address of an OpenAI-compatible server.
        backoff_s: first pause before a retry.
    """

    def __init__(
        self,
        model: str,
        limits: Limits,
        *,
        temperature: float | None = 1.0,
        concurrency: int = 16,
        max_retries: int = 4,
        api_base: str | None = None,
        backoff_s: float = 1.0,
    ) -> None:
        self.model, self.limits, self.temperature = model, limits, temperature
        self.concurrency, self.max_retries = concurrency, max_retries
        self.usage: dict[tuple[str, int], tuple[Usage, float | None]] = {}
        self._more = {k: v for k, v in (("temperature", temperature), ("api_base", api_base)) if v is not None}
        if limits.max_turn_tokens:
            self._more["max_tokens"] = limits.max_turn_tokens
        self._redact = Redactor()
        self._grows = tenacity.wait_exponential(multiplier=backoff_s, max=60.0)
        self._litellm: Any = None

    def check(self) -> None:
        """One cheap call, before episodes are opened and paid for.

        Raises:
            ConfigError: the model does not answer.
        """
        BackgroundLoop.shared().submit(self._check()).result()

    async def _check(self) -> None:
        self._load()
        try:
            await self._answer(_Talk([Message("user", "Answer with the one word: ready")]))
        except ServerRefused as error:
            raise ConfigError(f"{error}; {_WHAT_TO_CHECK}") from None
        except EngineError as error:
            raise ConfigError(f"{error}: the model does not answer; check model= and api_base=") from None

    def play(self, environment: Environment, episodes: Sequence[tuple[Task, int]]) -> Generator[Trajectory, None, None]:
        """Play episodes, (task, sample) each; they come as they end.

        Raises:
            ConfigError: the provider refuses all requests. What had ended has come before.
        """
        ended: queue.SimpleQueue[Trajectory | None] = queue.SimpleQueue()
        playing = BackgroundLoop.shared().submit(self._play(environment, episodes, ended))
        playing.add_done_callback(lambda _: ended.put(None))
        try:
            while (trajectory := ended.get()) is not None:
                yield trajectory
            playing.result()
        finally:
            playing.cancel()

    def close(self) -> None:
        """Close the connections. It may be used again afterwards."""
        if self._litellm is not None:
            BackgroundLoop.shared().submit(self._close()).result()

    async def _close(self) -> None:
        await self._litellm.close_litellm_async_clients()
        self._litellm.in_memory_llm_clients_cache.flush_cache()  # else the closed ones would be used again

    def usage_of(self, trajectory: Trajectory) -> tuple[Usage, float | None]:
        """What an episode took: tokens, and USD if the price is known."""
        return self.usage.get((trajectory.task.id, trajectory.sample), (Usage(), None))

    async def _play(
        self,
        environment: Environment,
        episodes: Sequence[tuple[Task, int]],
        ended: queue.SimpleQueue[Trajectory | None],
    ) -> None:
        self._load()
        slots = asyncio.Semaphore(self.concurrency)
        stopped = False

        async def one(task: Task, sample: int) -> None:
            nonlocal stopped
            async with slots:
                if stopped:  # the group's cancellation comes a moment after the next slot is free
                    return
                try:
                    ended.put(await self._episode(environment, task, sample))
                except ConfigError:
                    stopped = True
                    raise

        try:
            async with asyncio.TaskGroup() as group:
                for task, sample in episodes:
                    group.create_task(one(task, sample))
        except* ConfigError as errors:
            raise errors.exceptions[0] from None

    def _load(self) -> None:
        if self._litellm is None:
            os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no price table from the network
            # It imports more of itself during its first call, and pydantic then warns about types that are not ours.
            warnings.filterwarnings("ignore", message=".*using the `ReadOnly` qualifier", category=UserWarning)
            # It makes the request's coroutine on a worker thread; a cancellation just then abandons it unstarted.
            warnings.filterwarnings("ignore", message=".*completion' was never awaited", category=RuntimeWarning)
            import litellm

            litellm.suppress_debug_info = True
            self._litellm = litellm

    async def _episode(self, environment: Environment, task: Task, sample: int) -> Trajectory:
        episode = environment.open(task, seed=sample)
        seconds = self.limits.deadline_s
        talk = _Talk(list(episode.opening), time.monotonic() + seconds if seconds else math.inf)
        error = end_state = ""
        try:
            termination = await self._turns(episode, talk)
            end_state = await _on(episode, "finish", episode.end_state)
        except EngineError as fault:
            termination, error = Termination.ENGINE_ERROR, str(fault)
        except ConfigError:
            raise
        except Exception as fault:  # an environment's fault ends one episode
            termination, error = Termination.ENVIRONMENT_ERROR, f"{type(fault).__name__}: {fault}"
        finally:
            await _on(episode, "release", episode.close)
        self.usage[task.id, sample] = (
            Usage(talk.prompt + talk.cached, talk.output, talk.cached),
            talk.cost,
        )
        return Trajectory(
            task, sample, tuple(talk.messages), (), (), (), tuple(talk.steps), termination, talk.first_prompt, 0,
            sample, end_state=end_state, error=error,
        )  # fmt: skip

    async def _turns(self, episode: Episode, talk: _Talk) -> Termination:
        """Play to the end. What is a turn, a step and an end is as in `Rollout`: tables show both."""
        completed = failed = reminded = False
        for turn in range(1, self.limits.max_turns + 1):
            try:
                text = await self._ask(talk, episode)
            except _Full:
                return Termination.LENGTH_LIMIT
            except TimeoutError:
                return Termination.DEADLINE
            start = talk.steps[-1].span[1] if talk.steps else 0
            talk.messages.append(Message("assistant", text))
            observation, end = "", None
            try:
                # The provider's count of the last request, and of what was added to it since.
                if talk.prompt - talk.first_prompt + talk.output - start >= self.limits.max_response_tokens:
                    end = Termination.LENGTH_LIMIT  # the budget is used up: nothing is run
                elif actions := episode.format.parse(text):
                    reminded = False
                    reply: Reply = await _on(episode, "act", episode.step, [a.body for a in actions])
                    observation = "\n".join(reply.observations)
                    completed, failed = reply.completed, reply.failed
                    end = _closing(completed, failed) if reply.done else None
                else:
                    episode.idle()
                    malformed = not text.strip() or episode.format.attempted(text)
                    if completed and not malformed:
                        end = _closing(completed, failed)
                    elif reminded:
                        end = Termination.NO_ACTION if malformed else Termination.GAVE_UP
                    else:
                        reminded, observation = True, episode.format.reminder
            finally:  # a turn whose action the environment fails on was taken, too
                talk.steps.append(Step(turn, (start, talk.output), text, observation, turn))
            if observation or end is None:  # the model's turn comes after a user's, be it empty
                talk.messages.append(Message("user", observation))
            if time.monotonic() > talk.deadline:
                return Termination.DEADLINE
            if end is not None:
                return end
        return Termination.TURN_LIMIT

    async def _ask(self, talk: _Talk, episode: Episode) -> str:
        """The next turn. What a model writes after its first action was not asked for: it has not seen the answer.

        Raises:
            TimeoutError: the deadline passed.
            EngineError, ConfigError: see `_call`.
        """
        async with asyncio.timeout(None if talk.deadline == math.inf else talk.deadline - time.monotonic()):
            response = await self._answer(talk)
        usage = getattr(response, "usage", None)
        prompt = getattr(usage, "prompt_tokens", None) or 0
        written = getattr(usage, "completion_tokens", None) or 0
        talk.cached += talk.prompt
        talk.prompt, talk.output = max(prompt, talk.prompt), talk.output + written
        talk.first_prompt = talk.first_prompt or prompt
        cost = (getattr(response, "_hidden_params", None) or {}).get("response_cost")
        talk.cost = None if cost is None or talk.cost is None else talk.cost + cost
        text = (response.choices[0].message.content or "") if response.choices else ""
        for stop in episode.format.stop:
            head, found, _ = text.partition(stop)
            text = head + found
        return text

    async def _answer(self, talk: _Talk) -> Any:
        """The provider's response; faults that may pass are tried again, after the pause that the provider asks for."""

        def pause(state: tenacity.RetryCallState) -> float:
            error = state.outcome.exception() if state.outcome else None
            return max(self._grows(state), error.wait_s if isinstance(error, _Passing) else 0.0)

        retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self.max_retries + 1),
            wait=pause,
            retry=tenacity.retry_if_exception_type(_Passing),
            reraise=True,
        )
        async for attempt in retrying:
            with attempt:
                return await self._call(talk)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _call(self, talk: _Talk) -> Any:
        """One request.

        Raises:
            ConfigError: refused, and so would be every other.
            ServerRefused: this one is refused.
            _Passing: another attempt may succeed.
            _Full: the conversation is too long for the model.
        """
        messages = [{"role": m.role, "content": m.content} for m in talk.messages]
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await self._litellm.acompletion(
                    model=self.model, messages=messages, timeout=_TIMEOUT_S, max_retries=0, **self._more
                )
        except Exception as error:
            if isinstance(error, self._litellm.exceptions.ContextWindowExceededError):
                raise _Full from None
            # The provider's text may hold headers and keys: where nothing else is needed, class and status say enough.
            status = getattr(error, "status_code", None)
            what = f"{self.model}: {type(error).__name__}" + (f" (status {status})" if status else "")
            if status in _FOR_ALL:
                raise ConfigError(f"{what}: {_WHAT_TO_CHECK}") from None
            if isinstance(status, int) and 400 <= status < 500 and status not in _MAY_PASS:
                said = " ".join(self._redact.error(str(error)).split())[:300]
                raise ServerRefused(f"refused: {what}: {said}") from None
            raise _Passing(what, retry_after(error)) from None


def _closing(completed: bool, failed: bool) -> Termination:
    return Termination.SUBMITTED if completed and not failed else Termination.GAVE_UP


async def _on(episode: Episode, name: str, otherwise: Any, *arguments: Any) -> Any:
    """The episode's coroutine where it has one, else its blocking method on a thread."""
    coroutine = getattr(episode, name, None)
    if coroutine is not None:
        return await coroutine(*arguments)
    return await asyncio.to_thread(otherwise, *arguments)
