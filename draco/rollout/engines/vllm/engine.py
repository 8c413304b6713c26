"""`engine=vllm`: episodes run as tasks on the background loop, sampling is done by servers over HTTP.

Before a batch, every server gets the adapter version that the trainer holds and must prove it (`sync.py`). Then each
trajectory asks its group's server for one turn at a time, by token ids, and runs its environment on a worker thread
(`driver.py`). A server that is lost costs a repeated request from the same token prefix on another one.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Le

from draco.config.options import Count, Index, NonNegative, Positive, checked
from draco.core.distributed import gather, local_rank, rank
from draco.core.errors import ConfigError, EngineError, TrainingStopped
from draco.policy.policy import Policy
from draco.policy.sharding import is_sharded
from draco.rollout.engines.base import Engine
from draco.rollout.engines.driver import Flight, drive
from draco.rollout.engines.vllm.adapter_check import AdapterCheck
from draco.rollout.engines.vllm.adapters import Adapter, AdapterStore
from draco.rollout.engines.vllm.launch import Launch, Launched, ServedModel, interpreter
from draco.rollout.engines.vllm.replicas import Replicas, wait_for
from draco.rollout.engines.vllm.sampling import Sampler
from draco.rollout.engines.vllm.sync import AdapterSync
from draco.rollout.rollout import Rollout

__all__ = ["VllmEngine"]

_REACH_S = 10.0  #: to wait for a server that should be running

log = logging.getLogger("draco")


@checked("engine")
class VllmEngine(Engine):
    """Drives rollouts through vLLM servers.

    Args:
        servers: URLs of running servers, e.g. ``["http://10.0.0.1:8000"]``.
        launch: servers to start on this machine; not looked at if `servers` are given.
        python: interpreter of the environment with vLLM.
        api_key_env: environment variable with the servers' API key; a launched server gets a random one if unset.
        max_prompt_tokens, max_response_tokens: `limits`: what a server's context must hold.
        max_mismatch: see `Engine`.
        probe_tolerance: mean |Δ log-prob| between server and trainer on a fixed prompt, above which an adapter is
            refused; None = 1e-3 for float32 weights, 0.1 otherwise.
        retries: of a request or an adapter push, on other servers where there are some.
        request_timeout_s: of one request.
        cooldown_s: a lost server rests so long.
        concurrency: trajectories in flight, and no more than their environment has places for; further ones wait.
        env_threads: worker threads that step environments.
        threads: CPU threads of a launched server on a CPU; None = 1.
        adapter_dir: where adapter versions are written; None = ``RUN/adapters``.
        adapter_dir_on_server: the same folder as servers see it; None = the same path.
        sleep: servers give their GPU memory back while the trainer updates.
        staleness: batches that are sampled ahead of the update, with the weights before it: 0 or 1.
    """

    def __init__(
        self,
        servers: Sequence[str] = (),
        launch: Launch | None = None,
        *,
        python: str = ".venv-vllm/bin/python",
        api_key_env: str = "VLLM_API_KEY",
        max_prompt_tokens: Count = 4096,
        max_response_tokens: Count = 24576,
        max_mismatch: NonNegative | None = None,
        probe_tolerance: NonNegative | None = None,
        retries: Index = 3,
        request_timeout_s: Positive = 600.0,
        cooldown_s: NonNegative = 10.0,
        concurrency: Count = 512,
        env_threads: Count = 32,
        threads: Count | None = None,
        adapter_dir: str | None = None,
        adapter_dir_on_server: str | None = None,
        sleep: bool = False,
        staleness: Annotated[int, Ge(0), Le(1)] = 0,
    ) -> None:
        self.urls = [str(url).rstrip("/").removesuffix("/v1") for url in servers]
        if wrong := [url for url in self.urls if not url.startswith(("http://", "https://"))]:
            raise ConfigError(f"engine.servers has {wrong[0]!r}; expected URLs like http://HOST:8000")
        if not self.urls and launch is None:
            raise ConfigError("engine=vllm needs engine.servers=[http://HOST:PORT,…] or engine.launch")
        if staleness and sleep:
            raise ConfigError(
                "engine.staleness=1 has the servers at work while the trainer updates, engine.sleep=true has them "
                "asleep: set one of them, and with engine.staleness=1 servers on GPUs of their own (placement=split or "
                "remote)"
            )
        self.launch, self.python, self.threads = launch, python, threads
        self.api_key_env, self.lengths = api_key_env, max_prompt_tokens + max_response_tokens
        self.max_mismatch, self.probe_tolerance = max_mismatch, probe_tolerance
        self.retries, self.request_timeout_s, self.cooldown_s = retries, request_timeout_s, cooldown_s
        self.concurrency, self.env_threads = concurrency, env_threads
        self.adapter_dir, self.adapter_dir_on_server = adapter_dir, adapter_dir_on_server
        self.sleep = self.frees_memory = sleep
        self.staleness = staleness
        self._launched: Launched | None = None
        self._replicas = self._known([])
        self._sync: AdapterSync | None = None  #: while open
        self._threads: ThreadPoolExecutor | None = None
        self._flights: list[Flight[Rollout]] = []  #: that nobody has collected yet
        self._judged = 0  #: batches that asked where to judge

    def _known(self, urls: Sequence[str]) -> Replicas:
        return Replicas(urls, key_variable=self.api_key_env, timeout_s=self.request_timeout_s, launched=self._launched)

    # --- life cycle -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """The interpreter of servers to start is there; servers that should run answer."""
        if not self.urls:
            interpreter(self.python)
            return
        try:
            wait_for(self._known(self.urls).reach(_REACH_S))
        except EngineError as error:
            raise ConfigError(str(error)) from error

    def open(self, policy: Policy, run: Path, *, temperature: float) -> None:
        """Start or reach the servers and let each prove the current adapter.

        Raises:
            ConfigError: one does not start, does not answer, cannot read the adapter's folder, serves another model,
                or has too short a context.
        """
        self.close()
        try:
            self._meet(self.urls or self._start(policy, run), policy)
            folder = Path(self.adapter_dir) if self.adapter_dir else run / "adapters"
            self._threads = ThreadPoolExecutor(self.env_threads, thread_name_prefix="draco-env")
            self._sync = AdapterSync(
                self._replicas,
                AdapterStore(folder.absolute(), writer=local_rank() == 0),
                folder_on_server=self.adapter_dir_on_server,
                tolerance=self.probe_tolerance,
                retries=self.retries,
            )
            self._sync.sync(policy, temperature, first=True)
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
            ServedModel.of(policy, self.lengths),
            logs=run / "servers",
            key_variable=self.api_key_env,
            threads=self.threads,
        )
        return self._launched.urls

    def _meet(self, urls: Sequence[str], policy: Policy) -> None:
        """Wait until every server is healthy and awake, then look at what it serves."""
        self._replicas = self._known(urls)
        wait_for(self._replicas.reach(*([self.launch.start_timeout_s] if self._launched and self.launch else [])))
        if self.sleep:
            wait_for(self._replicas.wake())
        wait_for(self._replicas.inspect(self.lengths))
        for replica in self._replicas.each:
            if replica.max_len < min(self.lengths, policy.context or self.lengths):
                raise EngineError(
                    f"{replica.url} has a context of {replica.max_len} tokens, shorter than limits.max_prompt_tokens + "
                    f"limits.max_response_tokens = {self.lengths}; start it with a larger --max-model-len"
                )

    @property
    def context(self) -> int | None:
        """The shortest of the servers' contexts."""
        return min((replica.max_len for replica in self._replicas.each), default=None)

    def close(self) -> None:
        """End launched servers. Running ones keep this run's last two adapters: nobody asks them to forget them."""
        for flight in self._flights:
            flight.stop()
            if (error := flight.fault()) is not None:
                log.warning("rollouts that no step came to use had failed: %s", error)
        self._flights = []
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        if self._launched is not None:
            self._launched.stop()
        self._threads = self._launched = self._sync = None
        self._replicas = self._known([])

    # --- rollouts ---------------------------------------------------------------------------------------------------

    def run(self, policy: Policy, rollouts: Sequence[Rollout], *, temperature: float) -> Iterator[Rollout]:
        """Yield each rollout as it ends. `temperature` > 0, or 0 for greedy decoding."""
        if self._sync is None:
            raise RuntimeError("open the engine first")
        if self.sleep:
            wait_for(self._replicas.wake(patient=True))
        if rollouts or self.staleness or is_sharded(policy.model):
            yield from self.begin(policy, rollouts, temperature=temperature)

    def begin(self, policy: Policy, rollouts: Sequence[Rollout], *, temperature: float) -> Iterator[Rollout]:
        """See `Engine`. The servers do one batch at a time: what was begun before, on any rank, ends first."""
        assert self._sync is not None
        if self.staleness:
            for earlier in self._flights:
                earlier.wait()
            gather(None)
        adapter, check = self._sync.sync(policy, temperature)
        if not rollouts:
            return iter(())
        flight = Flight(rollouts, lambda ended: self._batch(rollouts, adapter, check, temperature, ended))
        self._flights.append(flight)
        return self._collect(flight)

    def _collect(self, flight: Flight[Rollout]) -> Iterator[Rollout]:
        try:
            yield from flight.collect()
        finally:
            self._flights = [other for other in self._flights if other is not flight]

    async def _batch(
        self,
        rollouts: Sequence[Rollout],
        adapter: Adapter,
        check: AdapterCheck,
        temperature: float,
        ended: Callable[[Rollout], None],
    ) -> None:
        assert self._sync is not None
        assert self._threads is not None
        async with self._replicas.session() as session:
            sampler = Sampler(
                self._sync,
                session,
                adapter,
                check,
                temperature=temperature,
                retries=self.retries,
                cooldown_s=self.cooldown_s,
            )
            await drive(rollouts, sampler.turn, concurrency=self.concurrency, threads=self._threads, ended=ended)

    def free_memory(self) -> None:
        """With `sleep`, let the servers release their GPU memory until the next rollouts."""
        if self.sleep and self._replicas.each:
            gather(None)  # no rank's trajectories or judgements are left on the servers that ranks share
            wait_for(self._replicas.sleep())

    def judge_endpoint(self) -> tuple[str, str, str] | None:
        """Where the policy judges with its current adapter.

        Returns:
            Address of the server's OpenAI-compatible API, the adapter version's name there (to litellm
            ``hosted_vllm/NAME``), and the server's key ("" if it wants none); None before the first rollouts. Ranks,
            and the batches of a rank, take the servers in turn.
        """
        holding = self._sync.holding if self._sync else []
        if self._sync is None or self._sync.adapter is None or not holding:
            return None
        self._judged += 1
        replica = holding[(rank() + self._judged) % len(holding)]
        return f"{replica.url}/v1", self._sync.adapter.name, self._replicas.key

    def take_metrics(self) -> dict[str, float]:
        counts, seconds = (self._sync.counts, self._sync.seconds) if self._sync else (Counter[str](), 0.0)
        found = {
            "engine/retries": float(counts["retries"]),
            "engine/servers_lost": float(counts["servers_lost"]),
            "time/adapter_sync_s": seconds,
        }
        if self._sync:
            self._sync.counts, self._sync.seconds = Counter(), 0.0
        return found
