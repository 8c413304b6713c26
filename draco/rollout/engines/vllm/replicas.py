"""The servers of an engine: who answers, what each of them holds, who sleeps."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp

from draco.core.background import BackgroundLoop
from draco.core.distributed import local_rank
from draco.core.errors import EngineError, ServerLost
from draco.rollout.engines.vllm.adapters import PREFIX
from draco.rollout.engines.vllm.client import Completion, Server
from draco.rollout.engines.vllm.launch import BASE, Launched

__all__ = ["Replica", "Replicas", "wait_for"]

T = TypeVar("T")
_RUNNING_S = 30.0  #: within which a server that should be running answers


@dataclass(slots=True)
class Replica:
    """What is known of one server."""

    url: str
    base: str = ""  #: name of the base model there
    max_len: int = 0  #: tokens of its context
    adapters: list[str] = field(default_factory=list)  #: verified, oldest first
    base_answer: Completion | None = None  #: to the adapter check, by the base model

    def forget(self) -> None:
        """The server was started anew: it holds nothing."""
        self.adapters.clear()
        self.base_answer = None


class Replicas:
    """All servers of an engine, and their processes if they belong to this run."""

    def __init__(
        self, urls: Sequence[str], *, key_variable: str, timeout_s: float, launched: Launched | None = None
    ) -> None:
        self.each = [Replica(url) for url in urls]
        self.key_variable, self.timeout_s, self.launched = key_variable, timeout_s, launched

    @property
    def key(self) -> str:
        """Their API key; empty if they want none."""
        return os.environ.get(self.key_variable, "")

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[aiohttp.ClientSession]:
        """Connections for one use: the background loop may be another one the next time."""
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(headers=headers, connector=connector) as session:
            yield session

    def server(self, replica: Replica, session: aiohttp.ClientSession, within_s: float = math.inf) -> Server:
        """One of them over HTTP; no request takes longer than `within_s`."""
        return Server(replica.url, session, timeout_s=min(self.timeout_s, within_s))

    async def reach(self, within_s: float = _RUNNING_S) -> None:
        """Wait until every server is healthy.

        Raises:
            EngineError: one is not, after `within_s` seconds.
            ConfigError: a launched one has ended.
        """
        async with self.session() as session:
            for replica in self.each:
                until = time.monotonic() + within_s
                while not await self.server(replica, session).healthy():
                    if self.launched:
                        self.launched.check()
                    if time.monotonic() > until:
                        option = self.launched.option if self.launched else "engine.servers"
                        raise EngineError(
                            f"{option}: {replica.url} is not healthy; is the server running and reachable from here?"
                        )
                    await asyncio.sleep(0.2)

    async def inspect(self, default_len: int) -> None:
        """Look up what each serves; `default_len` is the context of a server that does not say.

        Raises:
            EngineError: one serves no base model, or does not say what it serves.
        """
        async with self.session() as session:
            for replica in self.each:
                models = await self.server(replica, session, _RUNNING_S).models()
                bases = [m for m in models if not m.get("parent") and not str(m.get("id", "")).startswith(PREFIX)]
                if not bases:
                    raise EngineError(f"{replica.url}/v1/models lists no base model; is it a vLLM server?")
                base = next((m for m in bases if m["id"] == BASE), bases[0])
                replica.base, length = str(base["id"]), base.get("max_model_len")
                replica.max_len = length if isinstance(length, int) else default_len

    async def wake(self, *, patient: bool = False) -> None:
        """Local rank 0 wakes the servers that sleep, the others wait until they are awake.

        Args:
            patient: go on without a server that does not answer; a later request says what is wrong with it.

        Raises:
            ServerLost: one does not answer, or is not woken.
        """
        async with self.session() as session:
            for replica in self.each:
                with contextlib.suppress(ServerLost) if patient else contextlib.nullcontext():
                    await self._wake(self.server(replica, session))

    async def _wake(self, server: Server) -> None:
        until = time.monotonic() + self.timeout_s
        while await server.sleeps():
            if local_rank() == 0:
                await server.wake()
            elif time.monotonic() > until:  # rank 0's request may have failed
                raise ServerLost(f"{server.url} still sleeps after {self.timeout_s:.0f} s")
            else:
                await asyncio.sleep(0.1)

    async def sleep(self) -> None:
        """Local rank 0 has every server that answers give its GPU memory back."""
        if local_rank():
            return
        async with self.session() as session:
            for replica in self.each:
                with contextlib.suppress(ServerLost):
                    await self.server(replica, session).sleep()


def wait_for(coro: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the background loop; this thread waits and stays interruptible."""
    future = BackgroundLoop.shared().submit(coro)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
