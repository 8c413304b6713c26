"""Every server gets the policy's current adapter and must prove that it serves it, before rollouts use it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from draco.core.distributed import gather
from draco.core.errors import EngineError, ServerLost, ServerRefused, TrainingStopped
from draco.policy.policy import Policy
from draco.policy.sharding import is_sharded
from draco.rollout.engines.vllm.adapter_check import SAMPLED, AdapterCheck, default_tolerance, require_applied
from draco.rollout.engines.vllm.adapters import Adapter, AdapterStore
from draco.rollout.engines.vllm.client import Completion, ModelMissing, Server, attempts
from draco.rollout.engines.vllm.replicas import Replica, Replicas, wait_for

__all__ = ["AdapterSync", "push"]

log = logging.getLogger("draco")


class AdapterSync:
    """Keeps servers on the policy's weights.

    Args:
        folder_on_server: the store's folder as servers see it; None = the same path.
        tolerance: mean |Δ log-prob| of the check; None = `default_tolerance`.
        retries: of a push that lost its server.
    """

    def __init__(
        self,
        replicas: Replicas,
        store: AdapterStore,
        *,
        folder_on_server: str | None,
        tolerance: float | None,
        retries: int,
    ) -> None:
        self.replicas, self.store, self.retries = replicas, store, retries
        self.folder_on_server, self.tolerance = folder_on_server, tolerance
        self.adapter: Adapter | None = None  #: the version that servers hold
        self.check: AdapterCheck | None = None  #: of that version
        self.counts: Counter[str] = Counter()
        self.seconds = 0.0

    def sync(self, policy: Policy, temperature: float, *, first: bool = False) -> tuple[Adapter, AdapterCheck]:
        """Every reachable server holds the policy's current adapter when this returns, and has proved it.

        A sharded policy has no weights before Lightning gives it some: the proof then waits for the first rollouts. Its
        ranks come here together, with tasks or without.

        Args:
            first: no server may be missing.

        Raises:
            TrainingStopped: a server answers and cannot serve it, or none answers.
        """
        started = time.perf_counter()
        adapter = self.store.publish(policy)
        if self.adapter != adapter or self.check is None:
            tolerance = default_tolerance(policy) if self.tolerance is None else self.tolerance
            self.adapter, self.check = adapter, AdapterCheck(policy, temperature, tolerance)
        check = self.check
        lacking = not check.ready or any(adapter.name not in replica.adapters for replica in self.replicas.each)
        if first or (any(gather(lacking)) if is_sharded(policy.model) else lacking):
            answers = wait_for(self._push_all(adapter, check, everywhere=first))
            if not next(policy.model.parameters()).is_meta:
                self._prove(adapter, check, answers)
        self.seconds += time.perf_counter() - started
        return adapter, check

    async def _push_all(self, adapter: Adapter, check: AdapterCheck, *, everywhere: bool) -> list[Completion | None]:
        """What each server answers by the adapter; None: it is lost."""
        async with self.replicas.session() as session:
            pushes = [self._push_patiently(replica, session, adapter, check) for replica in self.replicas.each]
            results = await asyncio.gather(*pushes, return_exceptions=True)
        failed = [r for r in results if isinstance(r, BaseException)]
        fatal = [r for r in failed if not isinstance(r, ServerLost) or everywhere]
        if fatal or len(failed) == len(self.replicas.each):
            raise _unserved(adapter, (fatal or failed)[0])
        for loss in failed:
            log.warning("going on without a generation server: %s", loss)
        self.counts["servers_lost"] += len(failed)
        return [None if isinstance(r, BaseException) else r for r in results]

    async def _push_patiently(
        self, replica: Replica, session: aiohttp.ClientSession, adapter: Adapter, check: AdapterCheck
    ) -> Completion:
        server = self.replicas.server(replica, session)
        async for attempt in attempts(ServerLost, self.retries):
            with attempt:
                return await self._push(replica, server, adapter, check)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _push(self, replica: Replica, server: Server, adapter: Adapter, check: AdapterCheck) -> Completion:
        folder = Path(self.folder_on_server) / adapter.name if self.folder_on_server else adapter.folder
        return await push(replica, server, adapter, folder, check.prompt, check.temperature)

    def _prove(self, adapter: Adapter, check: AdapterCheck, answers: Sequence[Completion | None]) -> None:
        """Compare answers with the trainer's own log-probs: as many forward passes as servers, on every rank."""
        expected = [check.expect(answer.token_ids if answer else ()) for answer in answers]
        for replica, answer, ours in zip(self.replicas.each, answers, expected, strict=True):
            if answer is None:
                continue
            assert replica.base_answer is not None
            try:
                require_applied(replica.url, adapter, answer, replica.base_answer)
                check.compare(replica.url, adapter.name, answer, ours)
            except EngineError as error:
                replica.adapters.remove(adapter.name)
                raise _unserved(adapter, error) from error

    async def push_again(self, replica: Replica, server: Server, adapter: Adapter, check: AdapterCheck) -> None:
        """Give the adapter to a server that has come back in the middle of a batch."""
        if adapter.name in replica.adapters:
            return
        answer = await self._push(replica, server, adapter, check)
        assert replica.base_answer is not None
        try:
            require_applied(replica.url, adapter, answer, replica.base_answer)
            check.compare_prompt(replica.url, adapter.name, answer)
        except EngineError:
            replica.adapters.remove(adapter.name)
            raise

    @property
    def holding(self) -> list[Replica]:
        """The servers that hold the current version."""
        return [r for r in self.replicas.each if self.adapter is not None and self.adapter.name in r.adapters]


async def push(
    replica: Replica, server: Server, adapter: Adapter, folder: Path, prompt: Sequence[int], temperature: float
) -> Completion:
    """Load an adapter, ask base model and adapter about the prompt, and unload what is older than the version before.

    Args:
        folder: of the adapter, as the server sees it.
        prompt: token ids.

    Returns:
        The adapter's answer; the base model's is kept in the replica.

    Raises:
        ServerLost: no answer.
        ServerRefused: the server cannot load it.
    """
    if adapter.name not in replica.adapters:
        try:
            await server.load_adapter(adapter.name, str(folder))
        except ModelMissing as error:
            raise ServerRefused(
                f"{replica.url} cannot load adapters from {folder} ({str(error)[-160:]}): a server on another machine "
                "must see the run folder (mount it, or set engine.adapter_dir and engine.adapter_dir_on_server to "
                "a shared folder) and runs with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
            ) from error

    async def ask(model: str) -> Completion:
        return await server.complete(
            model, prompt, max_tokens=SAMPLED, temperature=temperature, seed=0, with_prompt=True
        )

    if replica.base_answer is None:
        replica.base_answer = await ask(replica.base)
    try:
        answer = await ask(adapter.name)
    except ModelMissing:
        replica.forget()  # started anew since it was given the adapter: the next attempt gives it again
        raise
    if adapter.name not in replica.adapters:
        replica.adapters.append(adapter.name)
    while len(replica.adapters) > 2:
        await server.unload_adapter(replica.adapters.pop(0))
    return answer


def _unserved(adapter: Adapter, why: BaseException) -> TrainingStopped:
    return TrainingStopped(f"adapter {adapter.name} could not be served: {why}")
