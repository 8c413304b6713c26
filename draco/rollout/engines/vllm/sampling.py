"""The requests of one batch of rollouts: one a turn, repeated from the same token prefix when a server is lost."""

from __future__ import annotations

import asyncio
import hashlib
import math

import aiohttp

from draco.core.distributed import rank
from draco.core.errors import EngineError, ServerLost
from draco.rollout.engines.vllm.adapter_check import AdapterCheck
from draco.rollout.engines.vllm.adapters import Adapter
from draco.rollout.engines.vllm.client import Completion, ModelMissing, ServerBusy, attempts
from draco.rollout.engines.vllm.routing import Router
from draco.rollout.engines.vllm.sync import AdapterSync
from draco.rollout.rollout import Rollout

__all__ = ["Sampler"]


class Sampler:
    """Samples the turns of one batch by one adapter version; options as in `VllmEngine`."""

    def __init__(
        self,
        sync: AdapterSync,
        session: aiohttp.ClientSession,
        adapter: Adapter,
        check: AdapterCheck,
        *,
        temperature: float,
        retries: int,
        cooldown_s: float,
    ) -> None:
        self.sync, self.adapter, self.check = sync, adapter, check
        self.temperature, self.retries = temperature, retries
        self.replicas = sync.replicas.each
        self.servers = [sync.replicas.server(replica, session) for replica in self.replicas]
        self.router = Router(len(self.replicas), cooldown_s=cooldown_s, first=rank() % len(self.replicas))
        #: a server gets an adapter once, not once for each waiting trajectory
        self._locks = [asyncio.Lock() for _ in self.replicas]
        for index, replica in enumerate(self.replicas):
            if adapter.name not in replica.adapters:  # lost while it was pushed
                self.router.lost(index)

    async def turn(self, rollout: Rollout) -> None:
        """Sample until the turn is over.

        Raises:
            EngineError: it cannot be sampled.
        """
        over = False
        while not over:
            completion = await self._complete(rollout)
            if not completion.token_ids:
                raise EngineError("a server sampled no token")
            for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
                if not math.isfinite(logprob):
                    raise EngineError("a server returned a log-prob that is not a number")
                over = rollout.push(token, logprob)
                if over:
                    break  # whatever a server sampled beyond the end of the turn is not part of it

    async def _complete(self, rollout: Rollout) -> Completion:
        """One request for the rest of the turn, repeated on another server when one is lost."""
        tried: list[int] = []
        async for attempt in attempts(ServerLost, self.retries):
            with attempt:
                index = self.router.enter(rollout.group_index, tried)
                try:
                    return await self._ask(index, rollout)
                except ServerLost as loss:
                    tried = [*tried, index] if len(tried) + 1 < len(self.replicas) else []
                    if not isinstance(loss, ServerBusy | ModelMissing):
                        self.router.lost(index)
                    self.sync.counts["retries"] += 1
                    raise
                finally:
                    self.router.leave(index)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _ask(self, index: int, rollout: Rollout) -> Completion:
        replica, server, position = self.replicas[index], self.servers[index], len(rollout.token_ids)
        if self.adapter.name not in replica.adapters:
            async with self._locks[index]:
                await self.sync.push_again(replica, server, self.adapter, self.check)
        room = min(rollout.budget(), replica.max_len - position)
        if room < 1:
            raise EngineError(
                f"the trajectory has {position} tokens; the context of {replica.url} is {replica.max_len}"
            )
        try:
            return await server.complete(
                self.adapter.name,
                rollout.token_ids,
                max_tokens=room,
                temperature=self.temperature,
                seed=_seed(rollout.seed, position),
                stop=rollout.stop,
                end_ids=sorted(rollout.chat.end_ids),
            )
        except ModelMissing:
            replica.forget()  # a server that was started anew: push again
            raise


def _seed(seed: int, position: int) -> int:
    """A 63-bit key for the request at a position: a repeated request draws the same numbers, another turn does not."""
    digest = hashlib.blake2b(f"{seed}|{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
