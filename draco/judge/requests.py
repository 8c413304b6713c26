"""One question to a judge, and the record of every attempt to get it answered."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from draco.core.llm.money import Usage
from draco.core.llm.redact import Redactor
from draco.core.llm.transport import Endpoint, Reply
from draco.judge.cache import Store
from draco.judge.endpoints import JudgeEndpoint
from draco.judge.prompts import prompt_version
from draco.judge.records import CallRecord
from draco.judge.replies import json_schema

__all__ = ["ASKER", "Call", "JudgeRequest"]

T = TypeVar("T")
#: role and content of each message
Messages = Sequence[Mapping[str, str]]

#: task, attempt and repeat of the call under way, for a provider in this process (`draco.judge.local`)
ASKER: ContextVar[tuple[str, int, int]] = ContextVar("asker", default=("", -1, 0))


@dataclass(frozen=True, slots=True)
class JudgeRequest(Generic[T]):
    """One call to make."""

    phase: str
    messages: Messages
    #: the reply's JSON → usable value, and a fault that is worth one re-ask but no failure; raises `ReplyFault`
    check: Callable[[Any], tuple[T, str | None]]
    sink: Callable[[CallRecord], None]  #: gets a record of every attempt
    task_id: str = ""
    sample: int = -1
    step: int = 0
    repeat: int = 0  #: 0-based, where one prompt is asked several times; part of the cache key
    deadline: float | None = None  #: time.monotonic() after which the call fails; None = none
    cached: bool = True  #: False: neither read from nor written to the cache
    version: str = ""  #: of the packaged texts behind `messages`; empty: those of the paper's prompt for `phase`
    schema: Mapping[str, Any] | None = None  #: JSON Schema of the reply; None: that of `phase`
    salt: str = ""  #: part of the cache key: the adapter's hash where the policy is the judge
    endpoint: JudgeEndpoint | None = None  #: whom to ask; None: the judge's model and its fallbacks


@dataclass(slots=True)
class Call(Generic[T]):
    """A request on its way."""

    request: JudgeRequest[T]
    endpoint: Endpoint  #: that was asked last
    temperature: float | None
    redact: Redactor
    store: Store | None
    messages: Messages = ()  #: of the current question
    sent: tuple[tuple[str, str], ...] = ()  #: the same as (role, content), redacted
    prompt_hash: str = ""
    attempts: int = 0
    started: float | None = None  #: time.monotonic() of its first attempt

    def ask(self, messages: Messages) -> None:
        """Make these the current question."""
        self.messages = messages
        self.sent = tuple((m["role"], self.redact(m["content"])) for m in messages)
        self.prompt_hash = hashlib.sha256(repr(self.sent).encode(errors="surrogatepass")).hexdigest()[:32]

    @property
    def schema(self) -> Mapping[str, Any]:
        """JSON Schema of the reply."""
        return self.request.schema or json_schema(self.request.phase)

    def left(self, deadline_s: float | None) -> float:
        """Seconds until the call must be done; `deadline_s` counts from its first attempt, None = none."""
        now, left = time.monotonic(), float("inf")
        if self.request.deadline is not None:
            left = self.request.deadline - now
        if deadline_s is not None and self.started is not None:
            left = min(left, self.started + deadline_s - now)
        return left

    def record(
        self,
        outcome: str,
        error: str = "",
        reply: Reply | None = None,
        *,
        latency_s: float = 0.0,
        from_cache: bool = False,
    ) -> None:
        """Hand out a record of the last attempt, and log it in the judge's database."""
        request, usage = self.request, reply.usage if reply else Usage()
        record = CallRecord(
            phase=request.phase,
            task_id=request.task_id,
            sample=request.sample,
            step=request.step,
            model=self.endpoint.model,
            served_model=reply.served_model if reply else "",
            fingerprint=reply.fingerprint if reply else "",
            prompt_version=request.version or prompt_version(request.phase),
            prompt_hash=self.prompt_hash,
            temperature=self.temperature,
            attempt=self.attempts,
            outcome=outcome,
            error=self.redact(error)[:2000],
            tokens_in=usage.tokens_in,
            tokens_out=usage.tokens_out,
            tokens_cached=usage.tokens_cached,
            cost_usd=reply.cost_usd if reply else 0.0,  # a failed attempt is not billed as far as anybody can know
            latency_s=reply.latency_s if reply else latency_s,
            messages=self.sent,
            reply=self.redact(reply.text) if reply else "",
            repeat=request.repeat,
            from_cache=from_cache,
            estimated=reply.estimated if reply else False,
        )
        if self.store is not None and not from_cache:
            self.store.log(record)
        request.sink(record)
