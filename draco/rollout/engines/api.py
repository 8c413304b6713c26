"""Any model that litellm reaches as the engine of the same agent loop: same prompt, action format and budgets.

For the frontier rows of a results table. Nothing here trains: the trajectories have no token ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Unpack

import tenacity

from draco.core.background import BackgroundLoop
from draco.core.errors import ConfigError, EngineError, ServerRefused
from draco.core.llm.faults import Fault, retrying
from draco.core.llm.money import Usage
from draco.core.llm.transport import Endpoint, Reply, Transport
from draco.core.types import Message, Step, Termination, Trajectory
from draco.env.base import ActionSpan, Episode
from draco.rollout.engines.base import Engine
from draco.rollout.engines.driver import Flight, drive
from draco.rollout.loop import AgentLoop, Identity, Limits

if TYPE_CHECKING:
    from draco.policy.policy import Policy

__all__ = ["ApiEngine", "TextRollout"]

_REFUSES_ALL = (401, 402, 403)  # key, credit, permission: every other request would be refused, too
_MAY_PASS = (409, 425)  # of the statuses that `Fault` takes for final
_TIMEOUT_S = 300.0  # of one request
_WHAT_TO_CHECK = "check model=, its key, api_base= and temperature= (null sends none)"


class TextRollout(AgentLoop):
    """An episode whose turns come as text; tokens are as the provider counts them.

    `max_prompt_tokens` filters nothing here: nobody can count before the first request.
    """

    def __init__(self, episode: Episode, limits: Limits, **identity: Unpack[Identity]) -> None:
        super().__init__(episode, limits, **identity)
        self.usage = Usage()  #: of all turns
        self.cost_usd: float | None = 0.0  #: None: unknown
        self._prompts: list[int] = []  #: tokens of each request
        self._written: list[int] = []  #: and of each reply
        self._text = ""

    def push(self, reply: Reply) -> None:
        """Take a turn. What a model writes after its first action was not asked for: it has not seen the answer."""
        self._prompts.append(max(reply.usage.tokens_in, *self._prompts[-1:], 0))
        self._written.append(reply.usage.tokens_out)
        read = sum(self._prompts)
        self.usage = Usage(read, sum(self._written), read - self._prompts[-1])
        if reply.cost_usd is None:
            self.cost_usd = None
        elif self.cost_usd is not None:
            self.cost_usd += reply.cost_usd
        self._text = reply.text
        for stop in self.episode.format.stop:
            head, found, _ = self._text.partition(stop)
            self._text = head + found

    def _turn_text(self) -> str:
        return self._text

    def _budget_spent(self) -> bool:
        grown = self._prompts[-1] - self._prompts[0]  # by observations and earlier turns
        return grown + self._written[-1] >= self.limits.max_response_tokens

    def _add_steps(self, text: str, actions: Sequence[ActionSpan], observations: Sequence[str]) -> None:
        span = (self.usage.tokens_out - self._written[-1], self.usage.tokens_out)
        self.steps.append(Step(self._turn, span, text, "\n".join(observations), self._turn))

    def _next_turn(self, observation: str) -> Termination | None:
        if not observation:  # the model's turn comes after a user's, be it empty
            self.messages.append(Message("user", ""))
        return None

    def trajectory(self) -> Trajectory:
        return Trajectory(
            self.task, self.sample, tuple(self.messages), (), (), (), tuple(self.steps), self._finished(),
            sum(self._prompts[:1]), self.policy_version, self.seed,
            end_state=self._end_state, error=self.error, timings=self._timings(),
        )  # fmt: skip


class ApiEngine(Engine[TextRollout]):
    """Plays episodes by chat completions.

    Args:
        model: litellm's name, provider first; the key comes from the provider's environment variable.
        temperature: of `check`; None sends none, for models that refuse it.
        concurrency: episodes at a time.
        max_retries: of one request.
        api_base: address of an OpenAI-compatible server.
        backoff_s: first pause before a retry.
    """

    def __init__(
        self,
        model: str,
        *,
        temperature: float | None = 1.0,
        concurrency: int = 16,
        max_retries: int = 4,
        api_base: str | None = None,
        backoff_s: float = 1.0,
    ) -> None:
        self.model, self.temperature, self.api_base = model, temperature, api_base
        self.concurrency, self.max_retries, self.backoff_s = concurrency, max_retries, backoff_s
        self._transport = Transport()

    def check(self) -> None:
        """One cheap request, before episodes are opened and paid for.

        Raises:
            ConfigError: the model does not answer.
        """
        asked = [Message("user", "Answer with the one word: ready")]
        try:
            BackgroundLoop.shared().submit(self._ask(asked, self._endpoint(self.temperature))).result()
        except Fault as fault:
            error = self._error(fault)
            if isinstance(error, ConfigError):
                raise error from None
            refused = isinstance(error, ServerRefused)
            hint = f"; {_WHAT_TO_CHECK}" if refused else ": the model does not answer; check model= and api_base="
            raise ConfigError(f"{error}{hint}") from None

    def run(
        self, policy: Policy | None, rollouts: Sequence[TextRollout], *, temperature: float | None
    ) -> Iterator[TextRollout]:
        """Yield each rollout as it ends.

        Raises:
            ConfigError: the provider refuses all requests. What had ended has come before.
        """

        async def turn(rollout: TextRollout) -> None:
            cap = rollout.limits.max_turn_tokens
            endpoint = self._endpoint(temperature, **({"max_tokens": cap} if cap else {}))
            try:
                rollout.push(await self._ask(rollout.messages, endpoint))
            except Fault as fault:
                if fault.kind != "too_long":
                    raise self._error(fault) from None
                await asyncio.to_thread(rollout.end, Termination.LENGTH_LIMIT)

        threads = ThreadPoolExecutor(self.concurrency, thread_name_prefix="draco-env")
        try:
            yield from Flight(
                rollouts,
                lambda ended: drive(rollouts, turn, concurrency=self.concurrency, threads=threads, ended=ended),
            ).collect()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Close the connections. The engine may be used again afterwards."""
        BackgroundLoop.shared().submit(self._transport.aclose()).result()

    def _endpoint(self, temperature: float | None, **arguments: Any) -> Endpoint:
        if temperature is not None:
            arguments["temperature"] = temperature
        return Endpoint(self.model, self.api_base, arguments=arguments)

    async def _ask(self, messages: Sequence[Message], endpoint: Endpoint) -> Reply:
        """The model's reply; faults that may pass are tried again, after the pause that the provider asks for."""
        request = [{"role": m.role, "content": m.content} for m in messages]
        stop = tenacity.stop_after_attempt(self.max_retries + 1)
        async for attempt in retrying(stop, self.backoff_s, _passes):
            with attempt:
                return await self._transport.complete(request, endpoint, timeout_s=_TIMEOUT_S)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _error(self, fault: Fault) -> ConfigError | EngineError:
        """What a fault that stayed means: for all requests, for this one, or for now."""
        # The provider's text may hold headers: where nothing else is needed, class and status say enough.
        what = f"{self.model}: {fault.error}" + (f" (status {fault.status})" if fault.status else "")
        if fault.kind == "auth" or fault.status in _REFUSES_ALL:
            return ConfigError(f"{what}: {_WHAT_TO_CHECK}")
        if _passes(fault):
            return EngineError(what)
        return ServerRefused(f"refused: {what}: {str(fault).removeprefix(f'{fault.error}: ')[:300]}")


def _passes(fault: Fault) -> bool:
    """Whether another attempt may succeed. Without a status it may: the request may never have reached the provider."""
    unclear = fault.kind == "unexpected" and fault.status is None
    return fault.kind != "auth" and (fault.passing or unclear or fault.status in _MAY_PASS)
