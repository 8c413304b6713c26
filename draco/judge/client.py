"""Transport of judge calls: litellm, retries by error class, JSON repair, one corrective re-ask, a record of every try.

litellm takes three seconds to import and is imported at the first call.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import tenacity

from draco.checks import number, whole
from draco.errors import JudgeCallError, JudgeConfigError, JudgeReplyError
from draco.judge.prompts import prompt_version
from draco.judge.records import CallRecord
from draco.judge.schema import ReplyFault, json_schema, parse_json

__all__ = ["JudgeClient", "JudgeRequest"]

T = TypeVar("T")

_KEY_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS?)$", re.IGNORECASE)
_KEY_SHAPE = re.compile(r"\b(?:sk|pk|rk|xai|gsk|hf|AIza)[-_][\w\-]{8,}|(?<=Bearer )[\w\-.~+/=]{8,}")
_WHAT_TO_DO = {
    "auth": "set the provider's key (for example OPENAI_API_KEY) or judge.api_base",
    "not_found": "check judge.model and judge.api_base",
    "bad_request": "check judge.model and its parameters; judge.temperature=null sends no temperature, "
    "judge.response_schema=off sends no schema",
}


@dataclass(frozen=True, slots=True)
class JudgeRequest(Generic[T]):
    """One call to make."""

    phase: str
    messages: Sequence[Mapping[str, str]]
    #: the reply's JSON → usable value and a fault that is worth one re-ask but no failure; raises `ReplyFault`
    check: Callable[[Any], tuple[T, str | None]]
    sink: Callable[[CallRecord], None]  #: gets a record of every attempt
    task_id: str = ""
    sample: int = -1
    step: int = 0


@dataclass(frozen=True, slots=True)
class _Answer:
    text: str
    truncated: bool
    record: Callable[[str, str], None]  #: (outcome, error) → writes the record of this attempt


class _Retryable(Exception):
    """A transport fault that may pass; carries its kind."""


class JudgeClient:
    """Calls one frozen judge model through litellm."""

    def __init__(
        self,
        model: str,
        temperature: float | None = 0.1,
        timeout_s: float = 120.0,
        max_retries: int = 4,
        concurrency: int = 32,
        api_base: str | None = None,
        api_key: str | None = None,
        max_tokens: int | None = None,
        response_schema: str = "auto",
        backoff_s: float = 1.0,
        provider: str | None = None,
    ) -> None:
        """Set up a client; nothing is sent and nothing heavy is imported yet.

        Args:
            model: litellm's name of the judge, provider first.
            temperature: None sends none, for models that refuse it.
            timeout_s: seconds for one attempt.
            max_retries: further attempts after rate limits, server errors, timeouts and lost connections.
            concurrency: calls in flight at once.
            api_base: address of an OpenAI-compatible server.
            api_key: only where no environment variable can hold it; never recorded.
            max_tokens: limit of a reply; None leaves it to the provider.
            response_schema: auto | on | off: whether the provider gets the reply's JSON schema.
            backoff_s: first pause before a retry, seconds; doubles, with jitter.
            provider: import path `module:function` of a function that registers a custom litellm provider.
        """
        if not isinstance(model, str) or not model:
            raise JudgeConfigError(f"judge.model is {model!r}; expected PROVIDER/MODEL, for example openai/gpt-5.4")
        number("judge.temperature", temperature, 0, optional=True)
        number("judge.timeout_s", timeout_s, 0, above=True)
        number("judge.backoff_s", backoff_s, 0)
        whole("judge.max_retries", max_retries, 0)
        whole("judge.concurrency", concurrency, 1)
        whole("judge.max_tokens", max_tokens, 1, optional=True)
        if response_schema not in {"auto", "on", "off"}:
            raise JudgeConfigError(f"judge.response_schema is {response_schema!r}, expected auto, on or off")
        self.model = model
        self.temperature = temperature
        self.timeout_s = timeout_s
        self.max_retries = max_retries
        self.concurrency = concurrency
        self.response_schema = response_schema
        self.provider = provider
        grows = tenacity.wait_exponential(multiplier=backoff_s, max=60.0)
        self._wait = grows + tenacity.wait_random(0.0, backoff_s)
        self._arguments: dict[str, Any] = {"model": model, "timeout": timeout_s, "max_retries": 0}
        for name, value in (
            ("temperature", temperature),
            ("api_base", api_base),
            ("api_key", api_key),
            ("max_tokens", max_tokens),
        ):
            if value is not None:
                self._arguments[name] = value
        secrets = {v for k, v in os.environ.items() if _KEY_NAME.search(k) and len(v) >= 8}
        self._secrets = sorted(secrets | ({api_key} if api_key else set()), key=len, reverse=True)
        self._litellm: Any = None
        self._sends_schema = False
        self._semaphore: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    def redact(self, text: str) -> str:
        """`text` without any key that the environment or the configuration holds."""
        for secret in self._secrets:
            if secret in text:
                text = text.replace(secret, "[redacted]")
        return text

    def load(self) -> Any:
        """Import and set up litellm, once. Called by the first call; call it earlier to take the wait elsewhere."""
        if self._litellm is None:
            # Without this litellm fetches a price table from the network on import.
            os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
            # It imports more of itself during its first call, and pydantic then warns about types that are not ours.
            warnings.filterwarnings("ignore", message=".*using the `ReadOnly` qualifier", category=UserWarning)
            # It makes a custom provider's coroutine on a worker thread; a cancellation just then abandons it unstarted.
            warnings.filterwarnings("ignore", message=".*acompletion' was never awaited", category=RuntimeWarning)
            import litellm

            litellm.suppress_debug_info = True  # no help text on stdout for every error
            litellm.disable_token_counter = True  # we take the provider's usage; its own count costs time
            if self.provider is not None:
                from pydoc import locate

                register = locate(self.provider.replace(":", "."))
                if not callable(register):
                    raise JudgeConfigError(f"judge.provider {self.provider!r} is no function; expected module:function")
                register()
            elif self._arguments.get("api_base") is None:
                try:
                    litellm.get_llm_provider(self.model)
                except litellm.exceptions.BadRequestError:
                    raise JudgeConfigError(
                        f"judge.model is {self.model!r}, of no provider that litellm knows; expected PROVIDER/MODEL, "
                        "for example openai/gpt-5.4, or hosted_vllm/NAME with judge.api_base"
                    ) from None
            self._sends_schema = self.response_schema == "on" or (
                self.response_schema == "auto" and bool(litellm.supports_response_schema(model=self.model))
            )
            self._litellm = litellm
        return self._litellm

    async def aclose(self) -> None:
        """Close open connections, on the loop that opened them."""
        if self._litellm is not None:
            await self._litellm.close_litellm_async_clients()

    async def call(self, request: JudgeRequest[T]) -> T:
        """Make one call and return its checked reply.

        Raises:
            JudgeReplyError: the reply was unusable twice.
            JudgeCallError: the provider failed and retries are exhausted, or it refused this one prompt.
            JudgeConfigError: the provider refused for good.
        """
        attempts = 0
        messages = [dict(m) for m in request.messages]
        soft_value: tuple[T] | None = None
        fault = ""
        for asked in (1, 2):
            answer, attempts = await self._ask(request, messages, attempts)
            try:
                if answer.truncated:
                    raise ReplyFault("the reply was cut off at the length limit; answer more briefly")
                data, repaired = parse_json(answer.text)
                value, soft = request.check(data)
            except ReplyFault as error:
                fault = str(error)
                answer.record("reask" if asked == 1 else "reply_error", fault)
            else:
                if soft is None or asked == 2:
                    answer.record("repaired" if repaired else "ok", soft or "")
                    return value
                answer.record("reask", soft)
                soft_value, fault = (value,), soft
            messages = [
                *messages,
                {"role": "assistant", "content": answer.text or "(empty)"},
                {
                    "role": "user",
                    "content": f"That reply cannot be used: {fault}\nReply again in full with one JSON object as "
                    "described above, and nothing else.",
                },
            ]
        if soft_value is not None:  # the first reply lacked citations only; it is better than the broken second
            return soft_value[0]
        raise JudgeReplyError(f"{request.phase}: unusable reply of {self.model}: {self.redact(fault)[:500]}")

    async def _ask(
        self, request: JudgeRequest[T], messages: list[dict[str, str]], attempts: int
    ) -> tuple[_Answer, int]:
        retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self.max_retries + 1),
            wait=self._wait,
            retry=tenacity.retry_if_exception_type(_Retryable),
            reraise=True,
        )
        try:
            async for attempt in retrying:
                with attempt:
                    attempts += 1
                    # The slot is given back while a failed attempt waits for its next one.
                    async with self._slot():
                        return await self._attempt(request, messages, attempts), attempts
        except _Retryable as error:
            raise JudgeCallError(
                f"{request.phase}: {self.model} failed {self.max_retries + 1} times: {error}"
            ) from None
        raise AssertionError("unreachable")

    def _slot(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._semaphore is None or self._semaphore[0] is not loop:
            self._semaphore = (loop, asyncio.Semaphore(self.concurrency))
        return self._semaphore[1]

    async def _attempt(self, request: JudgeRequest[T], messages: list[dict[str, str]], number: int) -> _Answer:
        litellm = self.load()
        arguments = self._arguments
        if self._sends_schema:
            schema = {"name": request.phase, "schema": json_schema(request.phase), "strict": True}
            arguments = {**arguments, "response_format": {"type": "json_schema", "json_schema": schema}}
        started = time.perf_counter()

        def record(outcome: str, error: str, response: Any = None, text: str = "") -> None:
            usage = getattr(response, "usage", None)
            details = getattr(usage, "prompt_tokens_details", None)
            hidden = getattr(response, "_hidden_params", None) or {}
            sent = tuple((m["role"], self.redact(m["content"])) for m in messages)
            request.sink(
                CallRecord(
                    phase=request.phase,
                    task_id=request.task_id,
                    sample=request.sample,
                    step=request.step,
                    model=self.model,
                    served_model=getattr(response, "model", None) or "",
                    fingerprint=getattr(response, "system_fingerprint", None) or "",
                    prompt_version=prompt_version(request.phase),
                    prompt_hash=hashlib.sha256(repr(sent).encode(errors="surrogatepass")).hexdigest()[:32],
                    temperature=self.temperature,
                    attempt=number,
                    outcome=outcome,
                    error=self.redact(error)[:2000],
                    tokens_in=getattr(usage, "prompt_tokens", None) or 0,
                    tokens_out=getattr(usage, "completion_tokens", None) or 0,
                    tokens_cached=getattr(details, "cached_tokens", None) or 0,
                    # A failed attempt is not billed as far as anybody can know.
                    cost_usd=hidden.get("response_cost") if response is not None else 0.0,
                    latency_s=latency,
                    messages=sent,
                    reply=self.redact(text),
                )
            )

        try:
            # Not every provider honours litellm's timeout, and a stalled call must not hold its group for ever.
            async with asyncio.timeout(self.timeout_s):
                response = await litellm.acompletion(messages=messages, **arguments)
        except Exception as error:
            latency = time.perf_counter() - started
            kind, raised = self._classify(litellm, error)
            record(kind, str(raised))
            raise raised from None  # the provider's exception may carry request headers
        latency = time.perf_counter() - started
        choice = response.choices[0] if response.choices else None
        text = (choice.message.content or "") if choice is not None else ""
        truncated = choice is not None and choice.finish_reason == "length"
        return _Answer(text, truncated, lambda outcome, error: record(outcome, error, response, text))

    def _classify(self, litellm: Any, error: Exception) -> tuple[str, Exception]:
        """Kind of a transport error and what to raise for it: `_Retryable`, or an error that is final."""
        text = _KEY_SHAPE.sub("[redacted]", self.redact(f"{type(error).__name__}: {error}"))[:2000]
        exceptions = litellm.exceptions
        if isinstance(error, (TimeoutError, exceptions.Timeout)):
            return "timeout", _Retryable(text)
        if isinstance(error, (exceptions.ContextWindowExceededError, exceptions.ContentPolicyViolationError)):
            kind = "too_long" if isinstance(error, exceptions.ContextWindowExceededError) else "refused"
            return kind, JudgeCallError(f"{self.model} refused this prompt ({kind}): {text}")
        status = getattr(error, "status_code", None)
        if isinstance(error, exceptions.RateLimitError) or status == 429:
            return "rate_limit", _Retryable(text)
        if isinstance(error, exceptions.APIConnectionError):
            return "connection", _Retryable(text)
        if status in (401, 403):
            return "auth", JudgeConfigError(f"{self.model}: {text}; {_WHAT_TO_DO['auth']}")
        if status == 404:
            return "not_found", JudgeConfigError(f"{self.model}: {text}; {_WHAT_TO_DO['not_found']}")
        if isinstance(status, int) and 400 <= status < 500 and status != 408:
            return "bad_request", JudgeConfigError(f"{self.model}: {text}; {_WHAT_TO_DO['bad_request']}")
        if isinstance(status, int):
            return "server_error", _Retryable(text)
        if isinstance(error, (ConnectionError, OSError)):
            return "connection", _Retryable(text)
        return "unexpected", JudgeCallError(f"{self.model}: {text}")
