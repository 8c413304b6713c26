"""A judge: calls to one frozen model with limits, retries, fallbacks, a cache, caps on what it may cost, and a record
of every attempt.

    call ─ cache? ─ ask ─ [slot, pace, spend cap] ─ request ─ JSON ─ check ─ value
                     │            ↑  backoff, Retry-After │      └ one corrective re-ask, then JudgeReplyError
                     └ next fallback model ───────────────┘ JudgeCallError; key, model, bad request: JudgeConfigError
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from pydoc import locate
from typing import Any, Generic, Literal, TypeVar

import tenacity

from draco.config.checks import listed, number, one_of, whole
from draco.core.errors import JudgeCallError, JudgeConfigError, JudgeReplyError, TrainingStopped
from draco.core.llm.faults import Fault, retrying
from draco.core.llm.money import Prices, Usage
from draco.core.llm.redact import Redactor
from draco.core.llm.transport import Endpoint, Reply, Transport
from draco.judge.breaker import Breaker
from draco.judge.budget import Spend
from draco.judge.cache import Store, Stored, key_of
from draco.judge.endpoints import JudgeEndpoint
from draco.judge.limits import Pace
from draco.judge.parsing import ReplyFault, parse_json
from draco.judge.prompts import prompt_version
from draco.judge.records import CallRecord
from draco.judge.replies import json_schema
from draco.judge.requests import ASKER, JudgeRequest
from draco.judge.votes import RULES

__all__ = [
    "JudgeClient",
    "JudgeMember",
    "JudgeOptions",
]

T = TypeVar("T")

log = logging.getLogger("draco")

#: characters of a faulty reply that a corrective re-ask quotes
_QUOTED = 8_000
#: tokens of a reply before any was seen, for judge.tokens_per_min
_REPLY_GUESS = 1_000


@dataclass(frozen=True, slots=True)
class JudgeOptions:
    """What `conf/judge/*.yaml` sets."""

    model: str  #: litellm's name of the judge, provider first
    temperature: float | None = 0.1  #: None sends none, for models that refuse it
    max_tokens: int | None = None  #: limit of a reply; None leaves it to the provider
    response_schema: Literal["auto", "on", "off"] = "auto"  #: whether the provider gets the reply's JSON schema
    api_base: str | None = None  #: address of an OpenAI-compatible server
    api_key: str | None = field(default=None, repr=False)  #: where no environment variable can hold it; never recorded
    environments: Sequence[str] = ()  #: names of those that it can judge; empty: any. Read before a run
    provider: str | None = None  #: `module:function` of a function that registers a custom litellm provider
    #: models to ask, in turn, where this one gives no reply
    fallbacks: Sequence[str | Mapping[str, Any]] = field(default=(), repr=False)
    fallback_s: float = 60.0  #: a model that gave no reply is passed over so long; doubles up to 10 min
    concurrency: int = 32  #: requests in flight at once, over all ranks
    requests_per_min: float | None = None  #: over all ranks; None = unlimited
    tokens_per_min: float | None = None  #: prompt and reply, over all ranks; None = unlimited
    timeout_s: float = 120.0  #: of one attempt
    deadline_s: float | None = None  #: of one call with all its attempts and pauses, from its first request on
    group_deadline_s: float | None = None  #: of all calls of a group, waiting for a slot included
    max_retries: int = 4  #: further attempts after rate limits, server errors, timeouts and lost connections
    backoff_s: float = 1.0  #: first pause before a retry; doubles up to a minute, with jitter; Retry-After is obeyed
    cache: Literal["read_write", "read_only", "off"] = "off"  #: replies kept in the run folder
    max_usd: float | None = None  #: the run stops, state saved, before it spends more
    max_tokens_total: int | None = None  #: the same for tokens, prompt and reply
    prices: Mapping[str, Any] | None = None  #: USD a million tokens, in place of litellm's table: input, output, cached
    on_model_change: Literal["warn", "stop"] = "warn"  #: the provider serves another model or fingerprint than before
    max_failed_share: float = 0.25  #: more failed judgements than this share of a batch's trajectories stop the run
    plan: str = "paper"  #: or lean; read by the pipeline (`draco.judge.views`)
    #: models that score together; empty: `model` alone (`draco.judge.votes`). Asked at `api_base` with `api_key`
    #: unless they name their own
    members: Sequence[str | Mapping[str, Any]] = field(default=(), repr=False)
    ensemble: str = "majority"  #: or unanimous, weighted: how the members' votes become a verdict

    def __post_init__(self) -> None:
        for name, choices in (
            ("response_schema", ("auto", "on", "off")),
            ("cache", ("read_write", "read_only", "off")),
            ("on_model_change", ("warn", "stop")),
        ):
            one_of(f"judge.{name}", getattr(self, name), choices)
        if not isinstance(self.model, str) or not self.model:
            raise JudgeConfigError(
                f"judge.model is {self.model!r}; expected PROVIDER/MODEL, for example openai/gpt-5.4"
            )
        if self.api_base is not None and not str(self.api_base).startswith(("http://", "https://")):
            raise JudgeConfigError(
                f"judge.api_base is {self.api_base!r}; expected an address such as http://127.0.0.1:8000/v1"
            )
        number("judge.temperature", self.temperature, 0, optional=True)
        number("judge.timeout_s", self.timeout_s, 0, above=True)
        number("judge.backoff_s", self.backoff_s, 0)
        number("judge.fallback_s", self.fallback_s, 0)
        whole("judge.max_retries", self.max_retries, 0)
        whole("judge.concurrency", self.concurrency, 1)
        whole("judge.max_tokens", self.max_tokens, 1, optional=True)
        limits = ("requests_per_min", "tokens_per_min", "deadline_s", "group_deadline_s", "max_usd", "max_tokens_total")
        for name in limits:
            number(f"judge.{name}", getattr(self, name), 0, above=True, optional=True)
        number("judge.max_failed_share", self.max_failed_share, 0, 1)
        listed("judge.fallbacks", self.fallbacks)
        listed("judge.members", self.members)
        one_of("judge.ensemble", self.ensemble, tuple(RULES))

    def needs_store(self) -> bool:
        """Whether something of this judge must outlive the process."""
        capped = self.max_usd is not None or self.max_tokens_total is not None
        return self.cache != "off" or capped or self.on_model_change == "stop"


@dataclass(slots=True)
class _Call(Generic[T]):
    """One call on its way."""

    request: JudgeRequest[T]
    started: float | None = None  #: time.monotonic() of its first request
    attempts: int = 0
    endpoint: Endpoint | None = None  #: that answered last
    sent: tuple[tuple[str, str], ...] = ()  #: messages of the current question, redacted
    prompt_hash: str = ""

    @property
    def schema(self) -> Mapping[str, Any]:
        """JSON Schema of the reply."""
        return self.request.schema or json_schema(self.request.phase)


class JudgeClient:
    """Calls one frozen judge model through litellm. Nothing is sent and nothing heavy is imported before it is used."""

    def __init__(self, model: str, **options: Any) -> None:
        """Set up a client.

        Args:
            model: litellm's name of the judge, provider first.
            options: see `JudgeOptions`.

        Raises:
            JudgeConfigError: an option cannot work.
        """
        self.options = o = JudgeOptions(model, **options)
        self.model, self.temperature = o.model, o.temperature
        self.plan, self.ensemble = o.plan, o.ensemble
        fallbacks = (JudgeEndpoint.listed(f, "judge.fallbacks") for f in o.fallbacks)
        own = JudgeEndpoint(o.model, o.api_base, o.api_key)
        self.endpoints = (own, *fallbacks)
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
        self.spend = Spend(o.max_usd, o.max_tokens_total)
        self.breaker = Breaker(o.fallback_s)
        self.unreachable = 0  #: calls given up because the provider failed, retries and fallbacks exhausted
        self.model_changes = 0
        self._uncounted: set[str] = set()  #: models whose replies came without their tokens
        self._semaphore: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._folder: Path | None = None
        self._store: Store | None = None
        self._served: dict[str, list[tuple[str, str]]] = {}
        self._replies, self._reply_tokens = 0, 0
        self._seed = self._rank = 0
        self._place(1)

    # -- where and for whom it works -----------------------------------------------------------------------------

    def bind(self, run: Path, seed: int, rank: int = 0, world: int = 1) -> None:
        """Say which run this is: its cache and ledger lie in `run`/judge, and limits are shared by `world` ranks."""
        self.close()
        self._folder, self._seed, self._rank = run / "judge", seed, rank
        self._place(world)

    def _place(self, world: int) -> None:
        o = self.options
        requests, tokens = (
            None if limit is None else limit / world for limit in (o.requests_per_min, o.tokens_per_min)
        )
        self.pace = Pace(requests, tokens)
        self._slots = max(o.concurrency // world, 1)
        self._semaphore = None
        self.spend.world = world

    def load(self) -> Any:
        """Import and set up litellm, once. Called by the first call; call it earlier to take the wait elsewhere."""
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

    @property
    def store(self) -> Store | None:
        """The database, opened at first use; None where nothing is kept."""
        if self._store is None and self._folder is not None and self.options.needs_store():
            self._store = Store(self._folder, self._rank)
            past = self._store.ledger()
            self.spend.usd, self.spend.tokens = past.usd, past.tokens
            self.spend.attempts, self.spend.unpriced = past.attempts, past.unpriced
            self.spend.agree(past.usd, past.tokens)
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

    def with_model(self, model: str, **arguments: Any) -> JudgeMember:
        """The same judge with another model.

        Args:
            model: litellm's name of it.
            arguments: `api_base`, `api_key`, `timeout_s`, `section` (see `Endpoint`); others go to litellm's call.
        """
        names = ("api_base", "api_key", "timeout_s", "section")
        place = {name: arguments.pop(name) for name in names if name in arguments}
        self.redact.add(place.get("api_key"))
        return JudgeMember(self, JudgeEndpoint(model, **place, arguments=arguments))

    def voters(self) -> tuple[JudgeMember, ...]:
        """This judge's calls to each of its `members`."""
        return tuple(JudgeMember(self, endpoint) for endpoint in self.members)

    # -- a call --------------------------------------------------------------------------------------------------

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
            raise JudgeCallError(f"{request.phase}: {self._late()}") from None

    async def _call(self, request: JudgeRequest[T]) -> T:
        call = _Call(request)
        ASKER.set((request.task_id, request.sample, request.repeat))
        messages = [dict(m) for m in request.messages]
        self._words(call, messages)
        key = self._key(call)
        if key is not None and (found := self._from_cache(call, key)) is not None:
            return found[0]
        usable: tuple[T] | None = None
        fault = ""
        for asked in (1, 2):
            try:
                reply = await self._ask(call, messages)
            except JudgeCallError:
                if usable is not None:
                    return usable[0]
                raise
            try:
                if reply.truncated:
                    raise ReplyFault("the reply was cut off at the length limit; answer more briefly")
                data, repaired = parse_json(reply.text)
                value, soft = request.check(data)
            except ReplyFault as error:
                fault = str(error)
                self._record(call, "reask" if asked == 1 else "reply_error", fault, reply)
            else:
                if soft is None or asked == 2:
                    self._record(call, "repaired" if repaired else "ok", soft or "", reply)
                    self._keep(call, key, reply, "repaired" if repaired else "ok")
                    return value
                self._record(call, "reask", soft, reply)
                usable, fault = (value,), soft
            messages = [
                *messages,
                {"role": "assistant", "content": _quote(reply.text) or "(empty)"},
                {
                    "role": "user",
                    "content": f"That reply cannot be used: {fault}\nReply again in full with one JSON object as "
                    "described above, and nothing else.",
                },
            ]
            self._words(call, messages)
        if usable is not None:  # the first reply lacked citations only; it is better than the broken second
            return usable[0]
        asked_of = self.model if request.endpoint is None else request.endpoint.model
        raise JudgeReplyError(f"{request.phase}: unusable reply of {asked_of}: {self.redact(fault)[:500]}")

    async def _ask(self, call: _Call[T], messages: list[dict[str, str]]) -> Reply:
        """A reply from the model, or from the first fallback that gives one.

        A model with a fallback that was given up a moment ago is passed over (`draco.judge.breaker`).
        """
        endpoints = self.endpoints if call.request.endpoint is None else (call.request.endpoint,)
        for endpoint in endpoints:
            last, before = endpoint is endpoints[-1], call.attempts
            turn = "ask" if last else self.breaker.enter(endpoint.place)
            if turn == "pass":
                continue
            try:
                reply = await self._retry(call, endpoint, messages, last=last, once=turn == "try")
            except Fault as fault:
                error = endpoint.error(fault)
                if isinstance(error, JudgeConfigError):
                    raise error from None
                if fault.passing:
                    self.unreachable += last
                    times = call.attempts - before
                    error = JudgeCallError(f"{call.request.phase}: {endpoint.model} failed {times} times: {fault}")
                    if not last:
                        self.breaker.gave_up(endpoint.place, turn == "try", str(fault))
                elif fault.kind in ("too_long", "refused"):
                    self.breaker.replied(endpoint.place)
                if last or fault.kind == "deadline":
                    raise error from None
            else:
                self.breaker.replied(endpoint.place)
                return reply
            finally:
                if turn == "try":
                    self.breaker.left(endpoint.place)
        raise AssertionError("unreachable")

    async def _retry(
        self, call: _Call[T], endpoint: Endpoint, messages: list[dict[str, str]], *, last: bool, once: bool
    ) -> Reply:
        def enough(state: tenacity.RetryCallState) -> bool:
            if once or (not last and self.breaker.open(endpoint.place)):  # another call has given it up meanwhile
                return True
            return state.attempt_number > self.options.max_retries or state.upcoming_sleep >= self._left(call)

        async for attempt in retrying(enough, self.options.backoff_s):
            with attempt:
                # The slot is given back while a failed attempt waits for its next one.
                async with self._slot():
                    if not last and not once and self.breaker.open(endpoint.place):
                        raise Fault("connection", "another call has given it up", passing=True)
                    return await self._attempt(call, endpoint, messages)
        raise AssertionError("unreachable")

    async def _attempt(self, call: _Call[T], endpoint: Endpoint, messages: list[dict[str, str]]) -> Reply:
        guess = self._guess(messages)
        use = await self.pace.enter(guess)
        _ = self.store  # what earlier processes spent is known from here on
        self.spend.check(guess)
        now = time.monotonic()
        call.started = now if call.started is None else call.started
        call.endpoint = endpoint
        if (left := self._left(call)) <= 0.0:
            raise Fault("deadline", self._late(), passing=False)
        call.attempts += 1
        self.spend.under_way += guess
        timeout_s = min(endpoint.timeout_s or self.options.timeout_s, left)
        try:
            reply = await self.transport.complete(
                messages, endpoint, timeout_s=timeout_s, schema=(call.request.phase, call.schema)
            )
        except Fault as fault:
            use.tokens = 0
            if fault.wait_s:
                self.pace.hold(fault.wait_s)
            self._record(call, fault.kind, str(fault), latency_s=fault.latency_s)
            raise
        except asyncio.CancelledError:
            self._record(call, "cancelled", "the group was given up", latency_s=time.monotonic() - now)
            raise
        finally:
            self.spend.under_way -= guess
        use.tokens = reply.usage.tokens_in + reply.usage.tokens_out
        self._replies += 1
        self._reply_tokens += reply.usage.tokens_out
        self.spend.add(reply.usage, reply.cost_usd, guess, estimated=reply.estimated)
        self._warn_if_estimated(endpoint.model, reply)
        self._check_served(call, reply)
        return reply

    def _warn_if_estimated(self, model: str, reply: Reply) -> None:
        if reply.estimated and model not in self._uncounted:
            self._uncounted.add(model)
            log.warning(
                "%s does not say how many tokens its calls take: they are estimated, four bytes a token, and so are "
                "their cost and what counts against judge.max_tokens_total and judge.max_usd",
                model,
            )

    def _slot(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._semaphore is None or self._semaphore[0] is not loop:
            self._semaphore = (loop, asyncio.Semaphore(self._slots))
        return self._semaphore[1]

    def _left(self, call: _Call[T]) -> float:
        """Seconds until the call must be done."""
        now, left = time.monotonic(), float("inf")
        if call.request.deadline is not None:
            left = call.request.deadline - now
        if self.options.deadline_s is not None and call.started is not None:
            left = min(left, call.started + self.options.deadline_s - now)
        return left

    def _late(self) -> str:
        return f"{self.model} gave no usable reply before judge.deadline_s or judge.group_deadline_s had passed"

    def _guess(self, messages: list[dict[str, str]]) -> int:
        """Tokens that a request will use; four characters a token is the usual rule of thumb."""
        guess = self._reply_tokens // self._replies if self._replies else _REPLY_GUESS
        return sum(len(m["content"]) for m in messages) // 4 + min(guess, self.options.max_tokens or guess)

    # -- what is kept --------------------------------------------------------------------------------------------

    def _words(self, call: _Call[T], messages: list[dict[str, str]]) -> None:
        call.sent = tuple((m["role"], self.redact(m["content"])) for m in messages)
        call.prompt_hash = hashlib.sha256(repr(call.sent).encode(errors="surrogatepass")).hexdigest()[:32]

    def _key(self, call: _Call[T]) -> str | None:
        o, request = self.options, call.request
        if o.cache == "off" or not request.cached or self.store is None:
            return None
        asked = request.endpoint or self.endpoints[0]
        parameters: dict[str, Any] = {"model": asked.model, "temperature": o.temperature, "max_tokens": o.max_tokens}
        parameters |= {"salt": request.salt, **asked.arguments}
        if self.transport.sends_schema(asked.model):
            parameters["schema"] = call.schema
        return key_of(parameters, call.prompt_hash, self._seed, request.step, request.sample, request.repeat)

    def _from_cache(self, call: _Call[T], key: str) -> tuple[T] | None:
        """The value of a stored reply. One that today's checks refuse is asked for again."""
        assert self._store is not None
        stored = self._store.get(key)
        if stored is None:
            return None
        try:
            value, _ = call.request.check(parse_json(stored.reply)[0])
        except ReplyFault:
            return None
        call.attempts, call.endpoint = 1, Endpoint(stored.model)
        usage = Usage(stored.tokens_in, stored.tokens_out, stored.tokens_cached)
        seen = (stored.served_model, stored.fingerprint)
        reply = Reply(stored.reply, False, *seen, usage, stored.cost_usd, stored.latency_s, stored.estimated)
        self._record(call, stored.outcome, "", reply, from_cache=True)
        return (value,)

    def _keep(self, call: _Call[T], key: str | None, reply: Reply, outcome: str) -> None:
        if key is None or self._store is None or self.options.cache != "read_write" or call.endpoint is None:
            return
        self._store.put(
            key,
            Stored(
                self.redact(reply.text), call.endpoint.model, reply.served_model, reply.fingerprint, outcome,
                reply.usage.tokens_in, reply.usage.tokens_out, reply.usage.tokens_cached, reply.cost_usd,
                reply.latency_s, reply.estimated,
            ),
        )  # fmt: skip

    def _record(
        self,
        call: _Call[T],
        outcome: str,
        error: str,
        reply: Reply | None = None,
        *,
        latency_s: float = 0.0,
        from_cache: bool = False,
    ) -> None:
        request, usage = call.request, reply.usage if reply else Usage()
        record = CallRecord(
            phase=request.phase,
            task_id=request.task_id,
            sample=request.sample,
            step=request.step,
            model=call.endpoint.model if call.endpoint else self.model,
            served_model=reply.served_model if reply else "",
            fingerprint=reply.fingerprint if reply else "",
            prompt_version=request.version or prompt_version(request.phase),
            prompt_hash=call.prompt_hash,
            temperature=self.temperature,
            attempt=call.attempts,
            outcome=outcome,
            error=self.redact(error)[:2000],
            tokens_in=usage.tokens_in,
            tokens_out=usage.tokens_out,
            tokens_cached=usage.tokens_cached,
            cost_usd=reply.cost_usd if reply else 0.0,  # a failed attempt is not billed as far as anybody can know
            latency_s=reply.latency_s if reply else latency_s,
            messages=call.sent,
            reply=self.redact(reply.text) if reply else "",
            repeat=request.repeat,
            from_cache=from_cache,
            estimated=reply.estimated if reply else False,
        )
        if self._store is not None and not from_cache:
            self._store.log(record)
        request.sink(record)

    def _check_served(self, call: _Call[T], reply: Reply) -> None:
        """Notice when the provider's model or fingerprint is not the one that it was.

        Raises:
            TrainingStopped: it changed and `on_model_change` is stop.
        """
        assert call.endpoint is not None
        model, now = call.endpoint.model, (reply.served_model, reply.fingerprint)
        if model not in self._served:
            self._served[model] = self._store.served(model) if self._store is not None else []
        seen = self._served[model]
        if now in seen:
            return
        seen.append(now)
        if self._store is not None:
            self._store.add_served(model, *now)
        if len(seen) == 1:
            return
        self.model_changes += 1
        said = f"{model} is now served as {_name(now)}, before as {_name(seen[-2])}: verdicts may no longer compare"
        if self.options.on_model_change == "stop":
            self._record(call, "model_change", said, reply)
            raise TrainingStopped(f"{said} (judge.on_model_change=stop); a resume accepts what is known now")
        log.warning("%s", said)


@dataclass(frozen=True, slots=True)
class JudgeMember:
    """A client's calls to another model. Slots, limits, spending, cache and ledger are the client's; the client's
    fallbacks, which stand in for its own model, are not used."""

    client: JudgeClient
    endpoint: JudgeEndpoint

    @property
    def model(self) -> str:
        """litellm's name."""
        return self.endpoint.model

    @property
    def plan(self) -> str:
        """The client's."""
        return self.client.plan

    def group_deadline(self) -> float | None:
        """See `JudgeClient.group_deadline`."""
        return self.client.group_deadline()

    async def call(self, request: JudgeRequest[T]) -> T:
        """See `JudgeClient.call`."""
        return await self.client.call(replace(request, endpoint=self.endpoint))


def prices_of(given: Mapping[str, Any] | None) -> Prices | None:
    """From `judge.prices`.

    Raises:
        JudgeConfigError: not such a mapping.
    """
    if given is None:
        return None
    try:
        made = Prices(**{str(k): None if v is None else float(v) for k, v in given.items()})  # type: ignore[arg-type]
        each = (made.input, made.output, made.cached or 0.0)
        if min(each) < 0 or not all(map(math.isfinite, each)):
            raise ValueError
    except (TypeError, ValueError, AttributeError):
        raise JudgeConfigError(
            f"judge.prices is {given}; expected USD a million tokens as {{input: 1.25, output: 10, cached: 0.125}}"
        ) from None
    return made


def _register(provider: str) -> None:
    """Call the function that `judge.provider` names."""
    register = locate(provider.replace(":", "."))
    if not callable(register):
        raise JudgeConfigError(f"judge.provider {provider!r} is no function; expected module:function")
    register()


def _name(served: tuple[str, str]) -> str:
    return f"{served[0] or '(unnamed)'}{f' / {served[1]}' if served[1] else ''}"


def _quote(text: str) -> str:
    """A faulty reply as the corrective re-ask shows it."""
    if len(text) <= _QUOTED:
        return text
    half = _QUOTED // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters left out …]\n{text[-half:]}"
