"""Gets a question answered: by the judge's model, or by the first of its fallbacks that gives a reply.

    question ─ [slot, requests a minute, spend cap] ─ request ─ reply
       ↑  pause, or Retry-After                          │
       ├── the same model, while retries are left ───────┤
       └── the next fallback ────────────────────────────┘

Each model has a circuit breaker, so that a dead one does not cost every call its retries:

    closed ── a call gives the model up ──→ open: not asked for `rest_s` ──→ one call tries it, once
       ↑                                      ↑                                   │
       └────────────── it replied ────────────┼───────────────────────────────────┤
                                              └── it did not: twice as long ──────┘

tenacity repeats a request. litellm's Router is not used: it hides the attempts that it makes, and here every attempt is
recorded and checked against the spend caps before it is sent.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import tenacity

from draco.core.errors import JudgeCallError, JudgeConfigError, TrainingStopped
from draco.core.llm.faults import Fault, retrying
from draco.core.llm.transport import Reply, Transport
from draco.judge.budget import Spend
from draco.judge.endpoints import JudgeEndpoint
from draco.judge.limits import Pace, PerLoop
from draco.judge.options import JudgeOptions
from draco.judge.requests import Call

__all__ = ["Breaker", "Router"]

log = logging.getLogger("draco")


class Router:
    """Sends the questions of one judge to its model and that model's fallbacks, in the order of `endpoints`."""

    def __init__(self, options: JudgeOptions, endpoints: Sequence[JudgeEndpoint], transport: Transport) -> None:
        self.options, self.endpoints, self.transport = options, tuple(endpoints), transport
        self.spend = Spend(options.max_usd, options.max_tokens_total)
        self.breaker = Breaker(options.fallback_s)
        self.unreachable = 0  #: calls given up because the provider failed, retries and fallbacks exhausted
        self.model_changes = 0
        self._uncounted: set[str] = set()  #: models whose replies came without their tokens
        self._served: dict[str, list[tuple[str, str]]] = {}  #: model → (served model, fingerprint), oldest first
        self.share(1)

    def share(self, world: int) -> None:
        """Share the limits with the other ranks, `world` in all."""
        o = self.options
        self.pace = Pace(
            o.requests_per_min and o.requests_per_min / world, o.tokens_per_min and o.tokens_per_min / world
        )
        slots = max(o.concurrency // world, 1)
        self.slot = PerLoop(lambda: asyncio.Semaphore(slots))
        self.spend.world = world

    def late(self) -> str:
        """What to say of a call whose time is up."""
        model = self.endpoints[0].model
        return f"{model} gave no usable reply before judge.deadline_s or judge.group_deadline_s had passed"

    async def ask(self, call: Call[Any]) -> Reply:
        """A reply to the current question of a call.

        A model with a fallback that gave no reply a moment ago is not asked (`Breaker`).

        Raises:
            JudgeCallError: no model gave one in time, or the last one refused this prompt.
            JudgeConfigError: a provider refused for good.
            TrainingStopped: a cap on spending is reached, or the served model changed and must not.
        """
        endpoints = (call.request.endpoint,) if call.request.endpoint else self.endpoints
        for endpoint in endpoints:
            last, before = endpoint is endpoints[-1], call.attempts
            turn = "ask" if last else self.breaker.enter(endpoint.place)
            if turn == "pass":
                continue
            try:
                reply = await self._retry(call, endpoint, last=last, once=turn == "try")
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
        raise AssertionError("unreachable: the last endpoint replies or raises")

    async def _retry(self, call: Call[Any], endpoint: JudgeEndpoint, *, last: bool, once: bool) -> Reply:
        """A reply from one model, or the fault of its last attempt. `last`: no other model can be asked."""

        def given_up() -> bool:
            """Whether another call has found meanwhile that the model gives no reply."""
            return not last and not once and self.breaker.open(endpoint.place)

        def enough(state: tenacity.RetryCallState) -> bool:
            late = state.upcoming_sleep >= call.left(self.options.deadline_s)
            return once or given_up() or state.attempt_number > self.options.max_retries or late

        async for attempt in retrying(enough, self.options.backoff_s):
            with attempt:
                # The slot is given back while a failed attempt waits for its next one.
                async with self.slot():
                    if given_up():
                        raise Fault("connection", "another call has given it up", passing=True)
                    return await self._attempt(call, endpoint)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _attempt(self, call: Call[Any], endpoint: JudgeEndpoint) -> Reply:
        guess = self.spend.guess(call.messages, self.options.max_tokens)
        entry = await self.pace.enter(guess)
        with self.spend.expecting(guess):
            now = time.monotonic()
            call.started = now if call.started is None else call.started
            call.endpoint = endpoint
            if (left := call.left(self.options.deadline_s)) <= 0.0:
                raise Fault("deadline", self.late(), passing=False)
            call.attempts += 1
            timeout_s = min(endpoint.timeout_s or self.options.timeout_s, left)
            try:
                reply = await self.transport.complete(
                    call.messages, endpoint, timeout_s=timeout_s, schema=(call.request.phase, call.schema)
                )
            except Fault as fault:
                entry.tokens = 0
                if fault.wait_s:
                    self.pace.hold(fault.wait_s)
                call.record(fault.kind, str(fault), latency_s=fault.latency_s)
                raise
            except asyncio.CancelledError:
                call.record("cancelled", "the group was given up", latency_s=time.monotonic() - now)
                raise
        entry.tokens = reply.usage.tokens_in + reply.usage.tokens_out
        self.spend.add(reply.usage, reply.cost_usd, guess, estimated=reply.estimated)
        if reply.estimated and endpoint.model not in self._uncounted:
            self._uncounted.add(endpoint.model)
            log.warning(
                "%s does not say how many tokens its calls take: they are estimated, four bytes a token, and so are "
                "their cost and what counts against judge.max_tokens_total and judge.max_usd",
                endpoint.model,
            )
        self._check_served(call, reply)
        return reply

    def _check_served(self, call: Call[Any], reply: Reply) -> None:
        """Notice when the provider's model or fingerprint is not the one that it was."""
        model, now = call.endpoint.model, (reply.served_model, reply.fingerprint)
        if model not in self._served:
            self._served[model] = call.store.served(model) if call.store is not None else []
        seen = self._served[model]
        if now in seen:
            return
        seen.append(now)
        if call.store is not None:
            call.store.add_served(model, *now)
        if len(seen) == 1:
            return
        self.model_changes += 1
        said = f"{model} is now served as {_name(now)}, before as {_name(seen[-2])}: verdicts may no longer compare"
        if self.options.on_model_change == "stop":
            call.record("model_change", said, reply)
            raise TrainingStopped(f"{said} (judge.on_model_change=stop); a resume accepts what is known now")
        log.warning("%s", said)


def _name(served: tuple[str, str]) -> str:
    return f"{served[0] or '(unnamed)'}{f' / {served[1]}' if served[1] else ''}"


_LONGEST_S = 600.0
#: name and address of a model
Place = tuple[str, str | None]


@dataclass(slots=True)
class _State:
    failures: int = 0  #: in a row; 0 = closed
    until: float = 0.0  #: when it may be tried again
    trying: bool = False


class Breaker:
    """Knows the models that have a fallback. One event loop at a time.

    Args:
        rest_s: first pause; doubles with every trial that fails, up to ten minutes.
    """

    def __init__(self, rest_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rest_s, self._clock = rest_s, clock
        self._states: defaultdict[Place, _State] = defaultdict(_State)

    def open(self, place: Place) -> bool:
        """Whether the model is not asked at present."""
        return self._states[place].failures > 0

    def enter(self, place: Place) -> Literal["ask", "try", "pass"]:
        """What the next call should do: ask with all its retries, try once, or pass on to the fallback."""
        state = self._states[place]
        if not state.failures:
            return "ask"
        if state.trying or self._clock() < state.until:
            return "pass"
        state.trying = True
        return "try"

    def replied(self, place: Place) -> None:
        """It gave a reply, or refused one prompt: it is there."""
        state = self._states[place]
        if state.failures:
            log.warning("%s answers again", place[0])
        state.failures, state.trying = 0, False

    def gave_up(self, place: Place, tried: bool, why: str) -> None:
        """It gave no reply; `tried` by a call that `enter` had told to try.

        Calls that began before another call found this out change nothing.
        """
        state = self._states[place]
        if state.failures and not tried:
            return
        state.failures += 1
        state.trying = False
        pause = min(self.rest_s * 2.0 ** (state.failures - 1), _LONGEST_S)
        state.until = self._clock() + pause
        log.warning("%s gives no reply (%s): its fallback is asked for %.0f s", place[0], why, pause)

    def left(self, place: Place) -> None:
        """A trial ended without saying anything about the model (cancelled, out of time)."""
        self._states[place].trying = False
