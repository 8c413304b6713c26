"""`engine=vllm`: episodes run as tasks on the background loop, sampling is done by servers over HTTP.

Before a batch, every server gets the adapter version that the trainer holds and must prove it (`probe.py`). Then each
trajectory asks its group's server for one turn at a time, by token ids, and runs its environment on a worker thread. A
server that is lost in the middle costs a repeated request from the same token prefix on another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from draco.config.checks import whole
from draco.core.background import BackgroundLoop
from draco.core.distributed import gather, local_rank, rank
from draco.core.errors import ConfigError, EngineError, ServerLost, ServerRefused, TrainingStopped
from draco.core.types import Termination
from draco.policy.policy import Policy
from draco.policy.sharding import is_sharded
from draco.rollout.engines.base import Engine, at_a_time
from draco.rollout.engines.vllm.adapters import PREFIX, Adapter, AdapterStore
from draco.rollout.engines.vllm.client import Completion, ModelMissing, Server, ServerBusy
from draco.rollout.engines.vllm.launch import BASE, Launch, Launched, interpreter
from draco.rollout.engines.vllm.probe import SAMPLED, Probe, default_tolerance
from draco.rollout.engines.vllm.routing import Router
from draco.rollout.rollout import Rollout

__all__ = ["VllmEngine"]

T = TypeVar("T")
_REACH_S = 10.0  #: to wait for a server that should be running

log = logging.getLogger("draco")


@dataclass(slots=True)
class _Seat:
    """What is known of one server."""

    url: str
    base: str = ""  #: name of the base model there
    max_len: int = 0
    adapters: list[str] = field(default_factory=list)  #: verified, oldest first
    base_answer: Completion | None = None  #: to the probe

    def forget(self) -> None:
        """It is another process than before."""
        self.adapters.clear()
        self.base_answer = None


@dataclass(slots=True)
class _Job:
    """One call of `run`."""

    seats: list[_Seat]
    servers: list[Server]
    router: Router
    adapter: Adapter
    probe: Probe
    temperature: float
    locks: list[asyncio.Lock]  #: a server gets an adapter once, not once for each waiting trajectory
    ended: queue.SimpleQueue[Rollout]


@dataclass(slots=True)
class _Flight:
    """Rollouts on their way, on the background loop."""

    rollouts: Sequence[Rollout]
    ended: queue.SimpleQueue[Rollout] = field(default_factory=queue.SimpleQueue)
    finished: threading.Event = field(default_factory=threading.Event)  #: tasks have let go of their rollouts
    future: Future[None] | None = None

    def stop(self) -> None:
        """Break off what is under way and close its episodes; changes nothing where all has ended."""
        if self.future is not None and not self.future.done():
            self.future.cancel()
            self.finished.wait(10)
        for rollout in self.rollouts:
            rollout.end(Termination.ENGINE_ERROR, "generation was interrupted")


class VllmEngine(Engine):
    """Drives rollouts through vLLM servers.

    Args:
        servers: URLs of running servers, e.g. ``["http://10.0.0.1:8000"]``.
        launch: servers to start on this machine; not looked at if `servers` are given.
        python: interpreter of the environment with vLLM.
        api_key_env: environment variable with the servers' API key; a launched server gets a random one if unset.
        max_prompt_tokens, max_response_tokens: `limits`: what a server's context must hold.
        max_mismatch: see `Engine`.
        probe_tolerance: mean |Δ log-prob| on the probe; None = 1e-3 for float32 weights, 0.1 otherwise.
        retries: of a request or an adapter push, on other servers where there are some.
        request_timeout_s: of one request.
        cooldown_s: a lost server rests so long.
        concurrency: trajectories in flight, and no more than their environment has places for; further ones wait.
        env_threads: worker threads that step environments.
        threads: CPU threads of a launched server on a CPU; None = 1.
        adapter_dir: where adapter versions are written; None = ``RUN/adapters``.
        adapter_dir_on_server: the same folder as servers see it; None = the same path.
        sleep: servers give their GPU memory back while the trainer updates.
        staleness: batches that roll out ahead of the update, by the weights before it: 0 or 1.
    """

    def __init__(
        self,
        servers: Sequence[str] = (),
        launch: Launch | None = None,
        *,
        python: str = ".venv-vllm/bin/python",
        api_key_env: str = "VLLM_API_KEY",
        max_prompt_tokens: int = 4096,
        max_response_tokens: int = 24576,
        max_mismatch: float | None = None,
        probe_tolerance: float | None = None,
        retries: int = 3,
        request_timeout_s: float = 600.0,
        cooldown_s: float = 10.0,
        concurrency: int = 512,
        env_threads: int = 32,
        threads: int | None = None,
        adapter_dir: str | None = None,
        adapter_dir_on_server: str | None = None,
        sleep: bool = False,
        staleness: int = 0,
    ) -> None:
        urls = [str(url).rstrip("/").removesuffix("/v1") for url in servers]
        if wrong := [url for url in urls if not url.startswith(("http://", "https://"))]:
            raise ConfigError(f"engine.servers has {wrong[0]!r}; expected URLs like http://HOST:8000")
        if not urls and launch is None:
            raise ConfigError("engine=vllm needs engine.servers=[http://HOST:PORT,…] or engine.launch")
        if retries < 0 or concurrency < 1 or env_threads < 1 or request_timeout_s <= 0:
            raise ConfigError(
                f"engine.retries={retries} (≥ 0), concurrency={concurrency} (≥ 1), env_threads={env_threads} (≥ 1), "
                f"request_timeout_s={request_timeout_s} (> 0): a value is out of range"
            )
        whole("engine.staleness", staleness, 0, 1)
        if staleness and sleep:
            raise ConfigError(
                "engine.staleness=1 has the servers at work while the trainer updates, engine.sleep=true has them "
                "asleep: set one of them, and with engine.staleness=1 servers on GPUs of their own (placement=split or "
                "remote)"
            )
        self.urls, self.launch, self.python = urls, launch, python
        self.api_key_env, self.lengths = api_key_env, max_prompt_tokens + max_response_tokens
        self.max_mismatch, self.probe_tolerance = max_mismatch, probe_tolerance
        self.retries, self.request_timeout_s, self.cooldown_s = retries, request_timeout_s, cooldown_s
        self.concurrency, self.env_threads, self.threads = concurrency, env_threads, threads
        self.adapter_dir, self.adapter_dir_on_server = adapter_dir, adapter_dir_on_server
        self.sleep = self.rests = sleep
        self.staleness = staleness
        self._launched: Launched | None = None
        self._store: AdapterStore | None = None
        self._seats: list[_Seat] = []
        self._pool: ThreadPoolExecutor | None = None
        self._adapter: Adapter | None = None  #: the version that servers hold
        self._probe: Probe | None = None  #: of that version
        self._flights: list[_Flight] = []  #: that nobody has collected yet
        self._judged = 0  #: batches that asked where to judge
        self._counts: Counter[str] = Counter()
        self._sync_s = 0.0

    # --- life cycle -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """The interpreter of servers to start is there; servers that should run answer."""
        if not self.urls:
            interpreter(self.python)
            return
        try:
            self._wait(self._reach())
        except EngineError as error:
            raise ConfigError(str(error)) from error

    async def _reach(self) -> None:
        async with self._session() as session:
            for url in self.urls:
                await self._answer(Server(url, session, timeout_s=_REACH_S), url, _REACH_S)

    async def _answer(self, server: Server, url: str, within_s: float) -> None:
        """Wait until a server is healthy."""
        until = time.monotonic() + within_s
        while not await server.healthy():
            if self._launched:
                self._launched.check()
            if time.monotonic() > until:
                option = "engine.launch" if self._launched else "engine.servers"
                raise EngineError(f"{option}: {url} is not healthy; is the server running and reachable from here?")
            await asyncio.sleep(0.2)

    def open(self, policy: Policy, run: Path, *, temperature: float) -> None:
        """Start or reach the servers and let each prove the current adapter.

        Raises:
            ConfigError: one does not start, does not answer, cannot read the adapter's folder, serves another model,
                or has too short a context.
        """
        self.close()
        try:
            urls = self.urls or self._start(policy, run)
            folder = Path(self.adapter_dir) if self.adapter_dir else run / "adapters"
            self._store = AdapterStore(folder.absolute(), writer=local_rank() == 0)
            self._seats = [_Seat(url) for url in urls]
            self._pool = ThreadPoolExecutor(self.env_threads, thread_name_prefix="draco-env")
            self._wait(self._meet(policy))
            self._sync(policy, temperature, first=True)
        except (EngineError, TrainingStopped) as error:
            try:
                if self._launched:
                    self._launched.check()  # one that has ended says why
            finally:
                self.close()
            raise ConfigError(f"engine=vllm cannot start: {error}") from error
        except BaseException:
            self.close()
            raise

    def _start(self, policy: Policy, run: Path) -> list[str]:
        assert self.launch is not None
        self._launched = Launched(
            self.launch,
            self.python,
            policy,
            lengths=self.lengths,
            logs=run / "servers",
            key_variable=self.api_key_env,
            threads=self.threads,
        )
        return self._launched.urls

    @property
    def context(self) -> int | None:
        """The shortest of the servers' contexts."""
        return min((seat.max_len for seat in self._seats if seat.max_len), default=None)

    def close(self) -> None:
        """End launched servers. Running ones keep this run's last two adapters: nobody asks them to forget them."""
        for flight in self._flights:
            flight.stop()
            future = flight.future
            if future is not None and not future.cancelled() and (error := future.exception()) is not None:
                log.warning("rollouts that no step came to use had failed: %s", error)
        self._flights = []
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        if self._launched is not None:
            self._launched.stop()
        self._pool = self._launched = self._store = self._adapter = self._probe = None
        self._seats = []

    async def _meet(self, policy: Policy) -> None:
        """Wait until every server is healthy, then look at what it serves."""
        async with self._session() as session:
            for seat in self._seats:
                server = Server(seat.url, session, timeout_s=30)
                within_s = self.launch.start_timeout_s if self._launched and self.launch else 30.0
                await self._answer(server, seat.url, within_s)
                if self.sleep:
                    await self._waken(server)
                self._inspect(seat, await server.models(), policy)

    def _inspect(self, seat: _Seat, models: list[dict[str, object]], policy: Policy) -> None:
        bases = [m for m in models if not m.get("parent") and not str(m.get("id", "")).startswith(PREFIX)]
        if not bases:
            raise EngineError(f"{seat.url}/v1/models lists no base model; is it a vLLM server?")
        base = next((m for m in bases if m["id"] == BASE), bases[0])
        seat.base, length = str(base["id"]), base.get("max_model_len")
        seat.max_len = length if isinstance(length, int) else self.lengths
        if seat.max_len < min(self.lengths, policy.context or self.lengths):
            raise EngineError(
                f"{seat.url} has a context of {seat.max_len} tokens, shorter than limits.max_prompt_tokens + "
                f"limits.max_response_tokens = {self.lengths}; start it with a larger --max-model-len"
            )

    @contextlib.asynccontextmanager
    async def _session(self) -> AsyncIterator[aiohttp.ClientSession]:
        """Belongs to one use: the background loop may be another one the next time."""
        key = os.environ.get(self.api_key_env)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(headers=headers, connector=connector) as session:
            yield session

    # --- weights ----------------------------------------------------------------------------------------------------

    def _sync(self, policy: Policy, temperature: float, *, first: bool = False) -> tuple[Adapter, Probe]:
        """Every reachable server holds the policy's current adapter when this returns, and has proved it.

        A sharded policy has no weights before Lightning gives it some: the proof then waits for the first rollouts. Its
        ranks come here together, with tasks or without.

        Raises:
            TrainingStopped: a server answers and cannot serve it, or none answers.
        """
        assert self._store is not None
        started = time.perf_counter()
        adapter = self._store.publish(policy)
        if self._adapter != adapter or self._probe is None:
            tolerance = default_tolerance(policy) if self.probe_tolerance is None else self.probe_tolerance
            self._adapter, self._probe = adapter, Probe(policy, temperature, tolerance)
        probe = self._probe
        lacking = not probe.ready or any(adapter.name not in seat.adapters for seat in self._seats)
        if first or (any(gather(lacking)) if is_sharded(policy.model) else lacking):
            answers = self._wait(self._push_all(adapter, probe, everywhere=first))
            if not next(policy.model.parameters()).is_meta:
                self._prove(adapter, probe, answers)
        self._sync_s += time.perf_counter() - started
        return adapter, probe

    async def _push_all(self, adapter: Adapter, probe: Probe, *, everywhere: bool) -> list[Completion | None]:
        """What each server answers the probe by the adapter; None: it is lost."""
        async with self._session() as session:
            pushes = [self._push_patiently(seat, session, adapter, probe) for seat in self._seats]
            results = await asyncio.gather(*pushes, return_exceptions=True)
        failed = [r for r in results if isinstance(r, BaseException)]
        fatal = [r for r in failed if not isinstance(r, ServerLost) or everywhere]
        if fatal or len(failed) == len(self._seats):
            raise _unserved(adapter, (fatal or failed)[0])
        for loss in failed:
            log.warning("going on without a generation server: %s", loss)
        self._counts["servers_lost"] += len(failed)
        return [None if isinstance(r, BaseException) else r for r in results]

    def _prove(self, adapter: Adapter, probe: Probe, answers: Sequence[Completion | None]) -> None:
        """Compare answers with the trainer's own log-probs: as many forward passes as servers, on every rank."""
        expected = [probe.expect(answer.token_ids if answer else ()) for answer in answers]
        for seat, answer, ours in zip(self._seats, answers, expected, strict=True):
            if answer is None:
                continue
            assert seat.base_answer is not None
            try:
                probe.check(seat.url, adapter.name, adapter.trained, answer, seat.base_answer, ours)
            except EngineError as error:
                seat.adapters.remove(adapter.name)
                raise _unserved(adapter, error) from error

    async def _push_patiently(
        self, seat: _Seat, session: aiohttp.ClientSession, adapter: Adapter, probe: Probe
    ) -> Completion:
        server = Server(seat.url, session, timeout_s=self.request_timeout_s)
        async for attempt in self._attempts(ServerLost):
            with attempt:
                return await self._push(seat, server, adapter, probe)
        raise AssertionError("unreachable")

    async def _push(self, seat: _Seat, server: Server, adapter: Adapter, probe: Probe) -> Completion:
        """Load, ask the probe, forget what is older than the version before."""
        path = adapter.folder
        if self.adapter_dir_on_server:
            path = Path(self.adapter_dir_on_server) / adapter.name
        if adapter.name not in seat.adapters:
            try:
                await server.load_adapter(adapter.name, str(path))
            except ModelMissing as error:
                raise ServerRefused(
                    f"{seat.url} cannot load adapters from {path} ({str(error)[-160:]}): a server on another machine "
                    "must see the run folder (mount it, or set engine.adapter_dir and engine.adapter_dir_on_server to "
                    "a shared folder) and runs with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
                ) from error

        async def ask(model: str) -> Completion:
            return await server.complete(
                model, probe.prompt, max_tokens=SAMPLED, temperature=probe.temperature, seed=0, with_prompt=True
            )

        if seat.base_answer is None:
            seat.base_answer = await ask(seat.base)
        try:
            answer = await ask(adapter.name)
        except ModelMissing:
            seat.forget()  # started anew since it was given the adapter: the next attempt gives it again
            raise
        if adapter.name not in seat.adapters:
            seat.adapters.append(adapter.name)
        while len(seat.adapters) > 2:
            await server.unload_adapter(seat.adapters.pop(0))
        return answer

    async def _push_again(self, seat: _Seat, server: Server, adapter: Adapter, probe: Probe) -> None:
        """To a server that has come back in the middle of a batch."""
        if adapter.name in seat.adapters:
            return
        answer = await self._push(seat, server, adapter, probe)
        assert seat.base_answer is not None
        try:
            probe.check_prompt(seat.url, adapter.name, adapter.trained, answer, seat.base_answer)
        except EngineError:
            seat.adapters.remove(adapter.name)
            raise

    def _attempts(self, kind: type[Exception]) -> AsyncRetrying:
        return AsyncRetrying(
            stop=stop_after_attempt(self.retries + 1),
            wait=wait_random_exponential(multiplier=0.2, max=10),
            retry=retry_if_exception_type(kind),
            reraise=True,
        )

    # --- rollouts ---------------------------------------------------------------------------------------------------

    def run(self, policy: Policy, rollouts: Sequence[Rollout], *, temperature: float) -> Iterator[Rollout]:
        """Yield each rollout as it ends. `temperature` > 0, or 0 for greedy decoding."""
        if self._store is None:
            raise RuntimeError("open the engine first")
        if self.sleep:
            self._wait(self._wake_all())
        if rollouts or self.staleness or is_sharded(policy.model):
            yield from self.begin(policy, rollouts, temperature=temperature)

    def begin(self, policy: Policy, rollouts: Sequence[Rollout], *, temperature: float) -> Iterator[Rollout]:
        """See `Engine`. The servers do one batch at a time: what was begun before, on any rank, ends first."""
        if self.staleness:
            wait([flight.future for flight in self._flights if flight.future is not None])
            gather(None)
        adapter, probe = self._sync(policy, temperature)
        flight = _Flight(rollouts)
        if rollouts:
            self._flights.append(flight)
            flight.future = BackgroundLoop.shared().submit(self._fly(flight, adapter, probe, temperature))
        return self._collect(flight)

    def rest(self) -> None:
        """Have the servers give their GPU memory back, where `sleep` says so, until the next rollouts."""
        if self.sleep and self._seats:
            gather(None)  # no rank's trajectories or judgements are left on the servers that ranks share
            self._wait(self._sleep_all())

    async def _fly(self, flight: _Flight, adapter: Adapter, probe: Probe, temperature: float) -> None:
        try:
            await self._batch(flight.rollouts, adapter, probe, temperature, flight.ended)
        finally:
            flight.finished.set()

    def _collect(self, flight: _Flight) -> Iterator[Rollout]:
        """Hand over each rollout once it has ended; whoever turns away ends the rest."""
        try:
            for _ in flight.rollouts:
                assert flight.future is not None
                yield _next(flight.ended, flight.future)
            if flight.future is not None:
                flight.future.result()
        finally:
            flight.stop()
            self._flights = [other for other in self._flights if other is not flight]

    async def _batch(
        self,
        rollouts: Sequence[Rollout],
        adapter: Adapter,
        probe: Probe,
        temperature: float,
        ended: queue.SimpleQueue[Rollout],
    ) -> None:
        async with self._session() as session:
            count = len(self._seats)
            job = _Job(
                self._seats,
                [Server(seat.url, session, timeout_s=self.request_timeout_s) for seat in self._seats],
                Router(count, cooldown_s=self.cooldown_s, first=rank() % count),
                adapter,
                probe,
                temperature,
                [asyncio.Lock() for _ in self._seats],
                ended,
            )
            for index, seat in enumerate(self._seats):
                if adapter.name not in seat.adapters:  # lost while it was pushed
                    job.router.lost(index)
            places = asyncio.Semaphore(at_a_time(rollouts, self.concurrency))
            async with asyncio.TaskGroup() as group:
                for rollout in rollouts:
                    group.create_task(self._episode(job, rollout, places))

    async def _episode(self, job: _Job, rollout: Rollout, places: asyncio.Semaphore) -> None:
        """Drive one rollout to its end, whatever happens on the way."""
        try:
            async with places:
                rollout.start()
                left = rollout.time_left
                async with asyncio.timeout(None if left == math.inf else left):
                    while rollout.termination is None:
                        await self._turn(job, rollout)
        # Episodes block to close, and some (AppWorld's) wait for this very loop: not here, nor on a thread that an
        # environment may hold up.
        except TimeoutError:
            late = "the deadline passed while a server was sampling"
            await asyncio.to_thread(rollout.end, Termination.DEADLINE, late)
        except EngineError as error:
            await asyncio.to_thread(rollout.end, Termination.ENGINE_ERROR, str(error))
        job.ended.put(rollout)

    async def _turn(self, job: _Job, rollout: Rollout) -> None:
        """Sample until the turn is over, then run its actions on a worker thread."""
        over = False
        while not over:
            completion = await self._sample(job, rollout)
            if not completion.token_ids:
                raise EngineError("a server sampled no token")
            for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
                if not math.isfinite(logprob):
                    raise EngineError("a server returned a log-prob that is not a number")
                over = rollout.push(token, logprob)
                if over:
                    break  # whatever a server sampled beyond the end of the turn is not part of it
        assert self._pool is not None, "the engine is open while it has rollouts"
        acting = _Acting(rollout)
        working = self._pool.submit(acting)
        try:
            await asyncio.shield(asyncio.wrap_future(working))
        except asyncio.CancelledError:
            if acting.leave():  # the thread cannot be stopped and is not waited for
                working.add_done_callback(acting.never_began)
            raise

    async def _sample(self, job: _Job, rollout: Rollout) -> Completion:
        """One request for the rest of the turn, repeated on another server when one is lost.

        The seed depends on the trajectory's own and the position, so that a repeated request draws the same numbers.
        """
        position, group = len(rollout.token_ids), rollout.group_index
        tried: list[int] = []
        async for attempt in self._attempts(ServerLost):
            with attempt:
                index = job.router.enter(group, tried)
                try:
                    return await self._ask(job, index, rollout, position)
                except ServerLost as loss:
                    tried = [*tried, index] if len(tried) + 1 < len(job.seats) else []
                    if not isinstance(loss, ServerBusy | ModelMissing):
                        job.router.lost(index)
                    self._counts["retries"] += 1
                    raise
                finally:
                    job.router.leave(index)
        raise AssertionError("unreachable")

    async def _ask(self, job: _Job, index: int, rollout: Rollout, position: int) -> Completion:
        seat, server = job.seats[index], job.servers[index]
        if job.adapter.name not in seat.adapters:
            async with job.locks[index]:
                await self._push_again(seat, server, job.adapter, job.probe)
        room = min(rollout.budget(), seat.max_len - position)
        if room < 1:
            raise EngineError(f"the trajectory has {position} tokens; the context of {seat.url} is {seat.max_len}")
        try:
            return await server.complete(
                job.adapter.name,
                rollout.token_ids,
                max_tokens=room,
                temperature=job.temperature,
                seed=_seed(rollout.seed, position),
                stop=rollout.stop,
                end_ids=sorted(rollout.chat.end_ids),
            )
        except ModelMissing:
            seat.forget()  # a server that was started anew: push again
            raise

    # --- judge ------------------------------------------------------------------------------------------------------

    def judge_endpoint(self) -> tuple[str, str, str] | None:
        """Where the policy judges with its current adapter.

        Returns:
            Address of the server's OpenAI-compatible API, the adapter version's name there (to litellm
            ``hosted_vllm/NAME``), and the server's key ("" if it wants none); None before the first rollouts. Ranks,
            and the batches of a rank, take the servers in turn.
        """
        holding = [seat for seat in self._seats if self._adapter and self._adapter.name in seat.adapters]
        if not holding or self._adapter is None:
            return None
        self._judged += 1
        seat = holding[(rank() + self._judged) % len(holding)]
        return f"{seat.url}/v1", self._adapter.name, os.environ.get(self.api_key_env, "")

    # --- sleep ------------------------------------------------------------------------------------------------------

    async def _waken(self, server: Server) -> None:
        """Local rank 0 wakes a server that sleeps, the others wait until it is awake.

        Raises:
            ServerLost: it does not answer, or is not woken.
        """
        until = time.monotonic() + self.request_timeout_s
        while await server.sleeps():
            if local_rank() == 0:
                await server.wake()
            elif time.monotonic() > until:  # of that rank the request may have failed
                raise ServerLost(f"{server.url} still sleeps after {self.request_timeout_s:.0f} s")
            else:
                await asyncio.sleep(0.1)

    async def _wake_all(self) -> None:
        async with self._session() as session:
            for seat in self._seats:
                with contextlib.suppress(ServerLost):
                    await self._waken(Server(seat.url, session, timeout_s=self.request_timeout_s))

    async def _sleep_all(self) -> None:
        if local_rank():
            return
        async with self._session() as session:
            for seat in self._seats:
                with contextlib.suppress(ServerLost):
                    await Server(seat.url, session, timeout_s=self.request_timeout_s).sleep()

    def _wait(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run on the background loop; this thread waits and stays interruptible."""
        future = BackgroundLoop.shared().submit(coro)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def take_metrics(self) -> dict[str, float]:
        counts, self._counts = self._counts, Counter()
        seconds, self._sync_s = self._sync_s, 0.0
        return {
            "engine/retries": float(counts["retries"]),
            "engine/servers_lost": float(counts["servers_lost"]),
            "time/adapter_sync_s": seconds,
        }


def _unserved(adapter: Adapter, why: BaseException) -> TrainingStopped:
    return TrainingStopped(f"adapter {adapter.name} could not be served: {why}")


def _next(ended: queue.SimpleQueue[Rollout], future: Future[None]) -> Rollout:
    """The next rollout that ended; an error of the driving task instead of waiting for ever."""
    while True:
        try:
            return ended.get(timeout=0.5)
        except queue.Empty:
            if future.done() and ended.empty():
                future.result()
                raise EngineError("generation ended without all of its rollouts") from None


class _Acting:
    """The actions of a turn, on a worker thread. One that is left behind closes the episode itself once it is out.

    It needs no event loop for that: the run may be over by then, and its loop closed.
    """

    def __init__(self, rollout: Rollout) -> None:
        self.rollout = rollout
        self._lock, self._out, self._left = threading.Lock(), False, False

    def __call__(self) -> None:
        try:
            self.rollout.finish_turn()
        finally:
            with self._lock:
                self._out = True
            if self._left:
                self._close()

    def leave(self) -> bool:
        """Give the rollout up; False if its thread is through, and whoever ends the rollout closes the episode."""
        with self._lock:
            self._left = not self._out and self.rollout.abandon()
        return self._left

    def never_began(self, working: Future[None]) -> None:
        """The pool was shut down before it came to these actions."""
        if working.cancelled():
            self._close()

    def _close(self) -> None:
        with contextlib.suppress(Exception):
            self.rollout.episode.close()


def _seed(seed: int, position: int) -> int:
    """A 63-bit key for the request at a position: turns of a trajectory must not draw the same numbers."""
    digest = hashlib.blake2b(f"{seed}|{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
