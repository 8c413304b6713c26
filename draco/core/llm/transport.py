"""Sends one request to a model through litellm and reads its reply."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draco.core.llm.faults import fault_of
from draco.core.llm.library import load_litellm
from draco.core.llm.money import Prices, Usage, price_of
from draco.core.llm.redact import Redactor

__all__ = ["Endpoint", "Reply", "Transport"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A model and where it is."""

    model: str  #: litellm's name, provider first
    api_base: str | None = None
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float | None = None  #: of one attempt; None: as for other models
    arguments: Mapping[str, Any] = field(default_factory=dict)  #: further ones of litellm's call

    @property
    def place(self) -> tuple[str, str | None]:
        """The key by which this endpoint is told from others: model and address."""
        return self.model, self.api_base

    @property
    def needs_address(self) -> bool:
        """A server of one's own without an address: litellm would ask api.openai.com instead."""
        return self.model.startswith("hosted_vllm/") and not self.api_base and not os.getenv("HOSTED_VLLM_API_BASE")


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
    estimated: bool = False  #: usage and cost are estimates: the provider reported none


class Transport:
    """Sends requests.

    Args:
        arguments: of litellm, for every request; those that are None are not sent.
        response_schema: auto | on | off: whether the provider gets the reply's JSON schema.
        prices: in place of litellm's table.
        register: makes a custom litellm provider known; called once, before the first request.
        redact: removes keys from error texts; None: those of the environment.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any] | None = None,
        *,
        response_schema: str = "off",
        prices: Prices | None = None,
        register: Callable[[], None] | None = None,
        redact: Redactor | None = None,
    ) -> None:
        self.response_schema, self.prices, self.redact = response_schema, prices, redact or Redactor()
        self._arguments = {k: v for k, v in (arguments or {}).items() if v is not None}
        self._register = register
        self._litellm: Any = None
        self._schemas: dict[str, bool] = {}  #: model → it gets the schema

    def load(self) -> Any:
        """Import and set up litellm, once. The first request does it; call it earlier to wait for it elsewhere."""
        if self._litellm is None:
            litellm = load_litellm()
            if self._register is not None:
                self._register()
            self._litellm = litellm
        return self._litellm

    async def aclose(self) -> None:
        """Close open connections, on the loop that opened them. It may be used again afterwards."""
        if self._litellm is not None:
            await self._litellm.close_litellm_async_clients()
            self._litellm.in_memory_llm_clients_cache.flush_cache()  # litellm would go on using the closed clients

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
        """What a model costs; None = unknown."""
        return self.prices or price_of(model)

    async def complete(
        self,
        messages: Sequence[Mapping[str, str]],
        endpoint: Endpoint,
        *,
        timeout_s: float,
        schema: tuple[str, Mapping[str, Any]] | None = None,
    ) -> Reply:
        """Make one request.

        Args:
            messages: role and content of each.
            timeout_s: seconds until it is given up.
            schema: name and JSON Schema of the reply, sent where the model takes one.

        Raises:
            Fault: no reply.
        """
        litellm = self.load()
        arguments = {
            "max_retries": 0,
            **self._arguments,
            **endpoint.arguments,
            "model": endpoint.model,
            "timeout": timeout_s,
        }
        if endpoint.api_base is not None:
            arguments["api_base"] = endpoint.api_base
        if endpoint.api_key is not None:
            arguments["api_key"] = endpoint.api_key
        elif endpoint.api_base is not None and endpoint.model.startswith("openai/") and not os.getenv("OPENAI_API_KEY"):
            arguments["api_key"] = "none"  # the client wants one; a server of one's own may not, or says so itself
        if schema is not None and self.sends_schema(endpoint.model):
            named = {"name": schema[0], "schema": schema[1], "strict": True}
            arguments["response_format"] = {"type": "json_schema", "json_schema": named}
        started = time.perf_counter()
        try:
            # Not every provider honours litellm's timeout, and a stalled call must not hold its caller for ever.
            async with asyncio.timeout(timeout_s):
                response = await litellm.acompletion(messages=[dict(m) for m in messages], **arguments)
        except Exception as error:
            fault = fault_of(error, self.redact)
            fault.latency_s = time.perf_counter() - started
            raise fault from None  # the provider's exception may carry request headers
        return self._reply(endpoint.model, messages, response, time.perf_counter() - started)

    def _reply(self, model: str, messages: Sequence[Mapping[str, str]], response: Any, latency_s: float) -> Reply:
        choice = response.choices[0] if response.choices else None
        text = (choice.message.content or "") if choice is not None else ""
        usage, estimated = _usage(response, messages, text)
        hidden = getattr(response, "_hidden_params", None) or {}
        cost = hidden.get("response_cost") if self.prices is None else self.prices.cost(usage)
        if estimated and self.prices is None and not cost:  # litellm's 0 is that of no tokens
            prices = self.price(model)
            cost = None if prices is None else prices.cost(usage)
        return Reply(
            text=text,
            truncated=choice is not None and choice.finish_reason == "length",
            served_model=getattr(response, "model", None) or "",
            fingerprint=getattr(response, "system_fingerprint", None) or "",
            usage=usage,
            cost_usd=cost,
            latency_s=latency_s,
            estimated=estimated,
        )


def _usage(response: Any, messages: Sequence[Mapping[str, str]], text: str) -> tuple[Usage, bool]:
    """The tokens that a response took, and whether they had to be estimated."""
    usage = getattr(response, "usage", None)
    details = getattr(usage, "prompt_tokens_details", None)
    tokens_in = getattr(usage, "prompt_tokens", None) or 0
    tokens_out = getattr(usage, "completion_tokens", None) or 0
    # litellm fills in zeros where a server does not say; a prompt has tokens, and so has a reply with a text.
    estimated = tokens_in <= 0 or (tokens_out <= 0 and text != "")
    if estimated:
        tokens_in = tokens_in if tokens_in > 0 else _tokens(m["content"] for m in messages)
        tokens_out = tokens_out if tokens_out > 0 else _tokens([text])
    return Usage(tokens_in, tokens_out, min(getattr(details, "cached_tokens", None) or 0, tokens_in)), estimated


def _tokens(texts: Iterable[str]) -> int:
    """About how many tokens texts are, never 0: four bytes each. Text that is not Latin takes more a character."""
    return max(1, -(-sum(len(text.encode(errors="surrogatepass")) for text in texts) // 4))
