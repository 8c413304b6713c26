"""One request to one model through litellm, and what its failure means.

litellm takes three seconds to import and is imported at the first call.
"""

from __future__ import annotations

import asyncio
import email.utils
import logging
import os
import re
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from draco.core.errors import JudgeCallError, JudgeConfigError
from draco.core.llm.money import Prices, Usage
from draco.core.llm.redact import Redactor

__all__ = ["Endpoint", "Fault", "Reply", "Transport", "retry_after"]

log = logging.getLogger("draco")

_WHAT_TO_DO = {
    "auth": "set the provider's key (for example OPENAI_API_KEY) or {base}",
    "not_found": "check {model} and {base}",
    "bad_request": "check {model} and its parameters; judge.temperature=null sends no temperature, "
    "judge.response_schema=off sends no schema",
}

#: options that list endpoints
_LISTS = ("judge.members", "judge.fallbacks")
#: providers' clients say so before they send anything, and litellm calls it a server error
_NO_KEY = re.compile(r"missing (\w+ )?(credentials|api[ _-]?key)|api_key client option must be set", re.IGNORECASE)
#: what litellm puts before the provider's own words
_WRAPPING = re.compile(r"^(?:litellm\.\w+:(?: |$)|\w*(?:Error|Exception)(?:(?::| -)(?: |$)|$))+")
#: and after them
_ADVICE = re.compile(r"\.? Handle with `litellm\.\w+`\.$")
#: what aiohttp, which litellm's clients go through, says where no connection is made; an object's address is in it
_NO_CONNECTION = re.compile(r"Cannot connect to host (\S+) ssl:.*?\[(.*)\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A model and where it is."""

    model: str  #: litellm's name, provider first
    api_base: str | None = None
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float | None = None  #: of one attempt; None: judge.timeout_s
    arguments: Mapping[str, Any] = field(default_factory=dict)  #: further ones of litellm's call
    #: of the configuration that names it, for error texts; or the option that lists it
    section: str = field(default="judge", compare=False)

    @property
    def option(self) -> str:
        """Where its model's name is set."""
        return self.section if self.section in _LISTS else f"{self.section}.model"

    @property
    def base_option(self) -> str:
        """Where its address is set."""
        return f"api_base in {self.section}" if self.section in _LISTS else f"{self.section}.api_base"

    def placed(self) -> Endpoint:
        """Itself.

        Raises:
            JudgeConfigError: a server of one's own without an address. litellm would ask api.openai.com instead.
        """
        if self.model.startswith("hosted_vllm/") and not self.api_base and not os.getenv("HOSTED_VLLM_API_BASE"):
            raise JudgeConfigError(
                f"{self.option} names {self.model}, a server of your own, without its address: set {self.base_option}, "
                "for example http://127.0.0.1:8000/v1"
            )
        return self

    @property
    def place(self) -> tuple[str, str | None]:
        """What tells it from other endpoints."""
        return self.model, self.api_base

    @classmethod
    def of(cls, given: str | Mapping[str, Any], option: str = "judge.fallbacks") -> Endpoint:
        """From an entry of `option`, a list: a name, or a mapping of the fields.

        Raises:
            JudgeConfigError: neither.
        """
        try:
            fields = {"model": given} if isinstance(given, str) else {str(k): v for k, v in given.items()}
            made = cls(**{"section": option, **fields})
        except (TypeError, AttributeError):
            made = None
        if made is None or not isinstance(made.model, str) or not made.model:
            raise JudgeConfigError(
                f"{option} must be a list of model names or of mappings {{model, api_base, api_key, timeout_s}}"
            )
        return made


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back."""

    text: str
    truncated: bool  #: at the length limit
    served_model: str  #: as the provider names it; empty when unknown
    fingerprint: str  #: the provider's system fingerprint; empty when unknown
    usage: Usage
    cost_usd: float | None  #: None: no known price
    latency_s: float
    estimated: bool = False  #: usage and cost are, because the provider gave none


class Fault(Exception):
    """A request without a reply.

    Attributes:
        kind: rate_limit | server_error | timeout | connection (these may pass), too_long | refused | unexpected (this
            prompt), auth | not_found | bad_request (for good).
        passing: another attempt may succeed.
        wait_s: the provider asked for this pause, 0 if it did not say.
        latency_s: until it failed.
    """

    def __init__(self, kind: str, text: str, *, passing: bool, wait_s: float = 0.0) -> None:
        super().__init__(text)
        self.kind, self.passing, self.wait_s, self.latency_s = kind, passing, wait_s, 0.0

    def final(self, endpoint: Endpoint) -> JudgeCallError | JudgeConfigError:
        """The error for a fault that will not pass."""
        model = endpoint.model
        if self.kind in _WHAT_TO_DO:
            return JudgeConfigError(
                f"{model}: {str(self).rstrip('.')}; "
                + _WHAT_TO_DO[self.kind].format(model=endpoint.option, base=endpoint.base_option)
            )
        if self.kind in ("too_long", "refused"):
            return JudgeCallError(f"{model} refused this prompt ({self.kind}): {self}")
        return JudgeCallError(f"{model}: {self}")


class Transport:
    """Sends requests.

    Args:
        temperature: None sends none, for models that refuse it.
        max_tokens: limit of a reply; None leaves it to the provider.
        response_schema: auto | on | off: whether the provider gets the reply's JSON schema.
        prices: in place of litellm's table.
        provider: import path `module:function` of a function that registers a custom litellm provider.
        redact: cleans error texts.
    """

    def __init__(
        self,
        *,
        temperature: float | None,
        max_tokens: int | None,
        response_schema: str,
        prices: Prices | None,
        provider: str | None,
        redact: Redactor,
    ) -> None:
        self.response_schema, self.prices, self.provider, self.redact = response_schema, prices, provider, redact
        self._arguments: dict[str, Any] = {"max_retries": 0}
        for name, value in (("temperature", temperature), ("max_tokens", max_tokens)):
            if value is not None:
                self._arguments[name] = value
        self._litellm: Any = None
        self._schemas: dict[str, bool] = {}  #: model → it gets the schema
        self._uncounted: set[str] = set()  #: models whose replies came without their tokens

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
            self._litellm = litellm
        return self._litellm

    async def aclose(self) -> None:
        """Close open connections, on the loop that opened them."""
        if self._litellm is not None:
            await self._litellm.close_litellm_async_clients()

    def sends_schema(self, model: str) -> bool:
        """Whether requests to this model carry the reply's JSON schema.

        vLLM decodes any model by a schema; litellm's table, which goes by model names, does not know that.
        """
        if model not in self._schemas:
            litellm = self.load()
            self._schemas[model] = self.response_schema == "on" or (
                self.response_schema == "auto"
                and (model.startswith("hosted_vllm/") or bool(litellm.supports_response_schema(model=model)))
            )
        return self._schemas[model]

    def price(self, model: str) -> Prices | None:
        """What a model costs, for estimates; None = unknown."""
        if self.prices is not None:
            return self.prices
        try:
            info = self.load().get_model_info(model)
        except Exception:  # litellm raises a bare Exception for a model that is not in its table
            return None
        names = ("input_cost_per_token", "output_cost_per_token", "cache_read_input_token_cost")
        each, output, cached = (None if info.get(name) is None else info[name] * 1e6 for name in names)
        return None if each is None or output is None else Prices(each, output, cached)

    async def send(
        self,
        endpoint: Endpoint,
        messages: list[dict[str, str]],
        phase: str,
        schema: Mapping[str, Any],
        timeout_s: float,
    ) -> Reply:
        """Make one request.

        Args:
            phase: name of the reply's schema.
            schema: JSON Schema of the reply, sent where the model takes one.
            timeout_s: seconds.

        Raises:
            Fault: no reply.
        """
        litellm = self.load()
        arguments = {**self._arguments, **endpoint.arguments, "model": endpoint.model, "timeout": timeout_s}
        if endpoint.api_base is not None:
            arguments["api_base"] = endpoint.api_base
        if endpoint.api_key is not None:
            arguments["api_key"] = endpoint.api_key
        elif endpoint.api_base is not None and endpoint.model.startswith("openai/") and not os.getenv("OPENAI_API_KEY"):
            arguments["api_key"] = "none"  # the client wants one; a server of one's own may not, or says so itself
        if self.sends_schema(endpoint.model):
            named = {"name": phase, "schema": schema, "strict": True}
            arguments["response_format"] = {"type": "json_schema", "json_schema": named}
        started = time.perf_counter()
        try:
            # Not every provider honours litellm's timeout, and a stalled call must not hold its group for ever.
            async with asyncio.timeout(timeout_s):
                response = await litellm.acompletion(messages=messages, **arguments)
        except Exception as error:
            fault = self._fault(litellm, error)
            fault.latency_s = time.perf_counter() - started
            raise fault from None  # the provider's exception may carry request headers
        return self._reply(endpoint.model, messages, response, time.perf_counter() - started)

    def _reply(self, model: str, messages: list[dict[str, str]], response: Any, latency_s: float) -> Reply:
        usage = getattr(response, "usage", None)
        details = getattr(usage, "prompt_tokens_details", None)
        choice = response.choices[0] if response.choices else None
        text = (choice.message.content or "") if choice is not None else ""
        tokens_in = getattr(usage, "prompt_tokens", None) or 0
        tokens_out = getattr(usage, "completion_tokens", None) or 0
        # litellm fills in zeros where a server does not say; a prompt has tokens, and so has a reply with a text.
        estimated = tokens_in <= 0 or (tokens_out <= 0 and text != "")
        if estimated:
            tokens_in = tokens_in if tokens_in > 0 else _tokens(m["content"] for m in messages)
            tokens_out = tokens_out if tokens_out > 0 else _tokens([text])
            if model not in self._uncounted:
                self._uncounted.add(model)
                log.warning(
                    "%s does not say how many tokens its calls take: they are estimated, four bytes a token, and "
                    "so are their cost and what counts against judge.max_tokens_total and judge.max_usd",
                    model,
                )
        counted = Usage(tokens_in, tokens_out, min(getattr(details, "cached_tokens", None) or 0, tokens_in))
        hidden = getattr(response, "_hidden_params", None) or {}
        cost = hidden.get("response_cost") if self.prices is None else self.prices.cost(counted)
        if estimated and self.prices is None and not cost:  # litellm's 0 is that of no tokens
            prices = self.price(model)
            cost = None if prices is None else prices.cost(counted)
        return Reply(
            text=text,
            truncated=choice is not None and choice.finish_reason == "length",
            served_model=getattr(response, "model", None) or "",
            fingerprint=getattr(response, "system_fingerprint", None) or "",
            usage=counted,
            cost_usd=cost,
            latency_s=latency_s,
            estimated=estimated,
        )

    def _fault(self, litellm: Any, error: Exception) -> Fault:
        """What a transport error means."""
        text = self.redact.error(f"{type(error).__name__}: {_said(error)}")
        exceptions = litellm.exceptions
        if isinstance(error, (TimeoutError, exceptions.Timeout)):
            return Fault("timeout", text, passing=True)
        if isinstance(error, (exceptions.ContextWindowExceededError, exceptions.ContentPolicyViolationError)):
            kind = "too_long" if isinstance(error, exceptions.ContextWindowExceededError) else "refused"
            return Fault(kind, text, passing=False)
        if _NO_KEY.search(text):
            return Fault("auth", text, passing=False)
        status = getattr(error, "status_code", None)
        if isinstance(error, exceptions.RateLimitError) or status == 429:
            return Fault("rate_limit", text, passing=True, wait_s=retry_after(error))
        if not (isinstance(status, int) and 400 <= status < 500) and (unreachable := _unreachable(error)):
            return Fault("connection", self.redact.error(unreachable), passing=True)
        if isinstance(error, exceptions.APIConnectionError):
            return Fault("connection", text, passing=True)
        if status in (401, 403):
            return Fault("auth", text, passing=False)
        if status == 404:
            return Fault("not_found", text, passing=False)
        if isinstance(status, int) and 400 <= status < 500 and status != 408:
            return Fault("bad_request", text, passing=False)
        if isinstance(status, int):
            return Fault("server_error", text, passing=True, wait_s=retry_after(error))
        if isinstance(error, (ConnectionError, OSError)):
            return Fault("connection", text, passing=True)
        return Fault("unexpected", text, passing=False)


def _tokens(texts: Iterable[str]) -> int:
    """About how many tokens texts are, never 0: four bytes each. Text that is not Latin takes more a character."""
    return max(1, -(-sum(len(text.encode(errors="surrogatepass")) for text in texts) // 4))


def _unreachable(error: BaseException | None) -> str:
    """Why there is no connection to the server, if that is the fault; else empty. litellm calls it the server's."""
    place = why = ""
    while error is not None:
        if found := _NO_CONNECTION.search(str(error)):
            place, why = found[1], found[2]
        if isinstance(error, ConnectionRefusedError):
            why = "connection refused"
        error = error.__cause__ or error.__context__
    if "WRONG_VERSION_NUMBER" in why:
        return f"{place} does not speak https: should its address begin with http://?"
    return f"cannot connect to {place}: {why}" if place else ""


def _said(error: Exception) -> str:
    """An error's text on one line, without what litellm wraps around it; the status where there is no text."""
    text = _ADVICE.sub("", str(error).partition("This looks like a bug in LiteLLM")[0].strip())
    if "Traceback (most recent call last)" in text:
        text = text.splitlines()[-1]
    text = " ".join(_WRAPPING.sub("", text).split())
    return text or f"status {getattr(error, 'status_code', None) or 'unknown'}, without a word"


def retry_after(error: Exception) -> float:
    """Seconds that the provider asked to wait, an hour at most: Retry-After (a number or a date) or retry-after-ms."""
    sources = (
        getattr(error, "litellm_response_headers", None),
        getattr(error, "headers", None),
        getattr(getattr(error, "response", None), "headers", None),
    )
    for headers in sources:
        found = {str(k).lower(): str(v) for k, v in dict(headers or {}).items()}
        if "retry-after-ms" in found:
            return _seconds(found["retry-after-ms"]) / 1000.0
        if "retry-after" in found:
            return _seconds(found["retry-after"])
    return 0.0


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        date = email.utils.parsedate_tz(text)
        seconds = email.utils.mktime_tz(date) - time.time() if date is not None else 0.0
    return min(max(seconds, 0.0), 3600.0) if seconds == seconds else 0.0
