"""A judge: calls to one frozen model, with limits, retries, fallbacks, a cache, spend caps, and a record of every
attempt.

    request ─ cached? ─ ask (`routing`) ─ JSON (`parsing`) ─ check ─ value
                         ↑                                     │
                         └───── one corrective re-ask ─────────┴─ then JudgeReplyError
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from pydoc import locate
from typing import Any, TypeVar

from draco.core.errors import JudgeCallError, JudgeConfigError, JudgeReplyError
from draco.core.llm.redact import Redactor
from draco.core.llm.transport import Endpoint, Reply, Transport
from draco.judge.cache import Store, Stored, key_of
from draco.judge.endpoints import JudgeEndpoint
from draco.judge.options import JudgeOptions, prices_of
from draco.judge.parsing import ReplyFault, parse_json
from draco.judge.requests import ASKER, Call, JudgeRequest, Messages
from draco.judge.routing import Router

__all__ = ["JudgeClient"]

T = TypeVar("T")

#: characters of a faulty reply that a corrective re-ask quotes
_QUOTED = 8_000


class JudgeClient:
    """Calls one frozen judge model through litellm. Nothing is sent and nothing heavy is imported before it is used."""

    def __init__(self, model: str, **options: Any) -> None:
        """Set up a client.

        Args:
            model: litellm's name of the judge, provider first.
            options: see `JudgeOptions`.

        Raises:
            JudgeConfigError: the model, an address or the prices cannot work.
            ConfigError: another option cannot work.
        """
        if not isinstance(model, str) or not model:
            raise JudgeConfigError(f"judge.model is {model!r}; expected PROVIDER/MODEL, for example openai/gpt-5.4")
        self.options = o = JudgeOptions(model, **options)
        self.model = o.model
        own = JudgeEndpoint(o.model, o.api_base, o.api_key)
        self.endpoints = (own, *(JudgeEndpoint.listed(f, "judge.fallbacks") for f in o.fallbacks))
        #: who score; empty: `model` alone
        self.members = tuple(JudgeEndpoint.listed(m, "judge.members", near=own) for m in o.members)
        self.redact = Redactor(e.api_key for e in (*self.endpoints, *self.members))
        self.transport = Transport(
            {"temperature": o.temperature, "max_tokens": o.max_tokens},
            response_schema=o.response_schema,
            prices=prices_of(o.prices),
            register=None if o.provider is None else partial(_register, o.provider),
            redact=self.redact,
        )
        self.router = Router(o, self.endpoints, self.transport)
        self.spend = self.router.spend
        self._folder: Path | None = None
        self._store: Store | None = None
        self._seed = self._rank = 0

    def bind(self, run: Path, seed: int, rank: int = 0, world: int = 1) -> None:
        """Say which run this is: its database lies in `run`/judge, and limits are shared by `world` ranks."""
        self.close()
        self._folder, self._seed, self._rank = run / "judge", seed, rank
        self.router.share(world)

    def load(self) -> Any:
        """Import and set up litellm, once. The first call does it; call it earlier to wait for it elsewhere.

        Raises:
            JudgeConfigError: the model is of no provider that litellm knows, or `judge.provider` names no function.
        """
        litellm = self.transport.load()
        if self.options.provider is None and self.options.api_base is None:
            try:
                litellm.get_llm_provider(self.model)
            except litellm.exceptions.BadRequestError:
                raise JudgeConfigError(
                    f"judge.model is {self.model!r}, of no provider that litellm knows; expected PROVIDER/MODEL, for "
                    "example openai/gpt-5.4, or hosted_vllm/NAME with judge.api_base"
                ) from None
        return litellm

    def known_titles(self) -> frozenset[str] | None:
        """Titles of the criteria that this judge has rules for; None: it can judge any criterion.

        Raises:
            JudgeConfigError: `judge.titles` names no set of texts.
        """
        if self.options.titles is None:
            return None
        titles = locate(self.options.titles.replace(":", "."))
        if not isinstance(titles, frozenset):
            raise JudgeConfigError(f"judge.titles {self.options.titles!r} is no frozenset; expected module:NAME")
        return titles

    @property
    def store(self) -> Store | None:
        """The database, opened at first use; None where nothing is kept."""
        if self._store is None and self._folder is not None and self.options.needs_store:
            self._store = Store(self._folder, self._rank)
            self.spend.start(*self._store.spent())
        return self._store

    def close(self) -> None:
        """Close the database; the next call opens it again."""
        if self._store is not None:
            self._store.close()
            self._store = None

    async def aclose(self) -> None:
        """Close open connections, on the loop that opened them, and the database."""
        self.close()
        await self.transport.aclose()

    def group_deadline(self) -> float | None:
        """For a group that starts now: time.monotonic() after which its calls fail."""
        seconds = self.options.group_deadline_s
        return None if seconds is None else time.monotonic() + seconds

    def endpoint(self, model: str, **options: Any) -> JudgeEndpoint:
        """Another model that requests can name. Limits, spending, cache and records stay those of this judge.

        Args:
            model: litellm's name of it.
            options: `api_base`, `api_key`, `timeout_s`, `section`, `arguments` (see `JudgeEndpoint`).
        """
        made = JudgeEndpoint(model, **options)
        self.redact.add(made.api_key)
        return made

    async def call(self, request: JudgeRequest[T]) -> T:
        """Make one call and return its checked reply.

        Raises:
            JudgeReplyError: the reply was unusable twice.
            JudgeCallError: the provider failed and retries are exhausted, a deadline passed, or it refused this one
                prompt.
            JudgeConfigError: the provider refused for good.
            TrainingStopped: a cap on spending is reached, or the served model changed and must not.
        """
        if request.deadline is None:
            return await self._call(request)
        try:
            # A request under way is ended by its own timeout and recorded; this one is for waiting in a queue.
            async with asyncio.timeout(request.deadline - time.monotonic() + 0.1):
                return await self._call(request)
        except TimeoutError:
            raise JudgeCallError(f"{request.phase}: {self.router.late()}") from None

    async def _call(self, request: JudgeRequest[T]) -> T:
        endpoint = request.endpoint or self.endpoints[0]
        call = Call(request, endpoint, self.options.temperature, self.redact, self.store)
        ASKER.set((request.task_id, request.sample, request.repeat))
        messages: Messages = request.messages
        call.ask(messages)
        key = self._key(call)
        if key is not None and (found := self._from_cache(call, key)) is not None:
            return found[0]
        usable: tuple[T] | None = None  # a reply that only lacks citations is better than a broken second one
        fault = ""
        for outcome in ("reask", "reply_error"):
            try:
                reply = await self.router.ask(call)
            except JudgeCallError:
                if usable is not None:
                    return usable[0]
                raise
            try:
                value, soft, repaired = _read(call, reply)
            except ReplyFault as error:
                fault = str(error)
                call.record(outcome, fault, reply)
            else:
                if soft is None or outcome == "reply_error":
                    call.record(repaired, soft or "", reply)
                    if key is not None and call.store is not None and self.options.cache == "read_write":
                        kept = replace(reply, text=self.redact(reply.text))
                        call.store.put(key, Stored(kept, call.endpoint.model, repaired))
                    return value
                call.record(outcome, soft, reply)
                usable, fault = (value,), soft
            messages = _corrective(messages, reply, fault)
            call.ask(messages)
        if usable is not None:
            return usable[0]
        raise JudgeReplyError(f"{request.phase}: unusable reply of {endpoint.model}: {self.redact(fault)[:500]}")

    def _key(self, call: Call[T]) -> str | None:
        """Of the call in the cache; None: it is not cached."""
        o, request = self.options, call.request
        if o.cache == "off" or not request.cached or call.store is None:
            return None
        asked = call.endpoint
        parameters: dict[str, Any] = {"model": asked.model, "temperature": o.temperature, "max_tokens": o.max_tokens}
        parameters |= {"salt": request.salt, **asked.arguments}
        if self.transport.sends_schema(asked.model):
            parameters["schema"] = call.schema
        return key_of(parameters, call.prompt_hash, self._seed, request.step, request.sample, request.repeat)

    def _from_cache(self, call: Call[T], key: str) -> tuple[T] | None:
        """The value of a stored reply. One that today's checks refuse is asked for again."""
        assert call.store is not None
        stored = call.store.get(key)
        if stored is None:
            return None
        try:
            value, _ = call.request.check(parse_json(stored.reply.text)[0])
        except ReplyFault:
            return None
        call.attempts, call.endpoint = 1, Endpoint(stored.model)
        call.record(stored.outcome, "", stored.reply, from_cache=True)
        return (value,)


def _read(call: Call[T], reply: Reply) -> tuple[T, str | None, str]:
    """Value of a reply, a fault that is no failure, and the outcome: ok or repaired."""
    if reply.truncated:
        raise ReplyFault("the reply was cut off at the length limit; answer more briefly")
    data, repaired = parse_json(reply.text)
    return *call.request.check(data), "repaired" if repaired else "ok"


def _corrective(messages: Messages, reply: Reply, fault: str) -> Messages:
    """The messages with a faulty reply and what is wrong with it."""
    text, half = reply.text, _QUOTED // 2
    if len(text) > _QUOTED:
        text = f"{text[:half]}\n[… {len(text) - 2 * half} characters left out …]\n{text[-half:]}"
    said = (
        f"That reply cannot be used: {fault}\nReply again in full with one JSON object as described above, and nothing "
        "else."
    )
    return [*messages, {"role": "assistant", "content": text or "(empty)"}, {"role": "user", "content": said}]


def _register(provider: str) -> None:
    """Call the function that `judge.provider` names."""
    register = locate(provider.replace(":", "."))
    if not callable(register):
        raise JudgeConfigError(f"judge.provider {provider!r} is no function; expected module:function")
    register()
