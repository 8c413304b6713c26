"""The pool of fork servers: places for live episodes, a queue in order of arrival, servers started when needed.

At most `places` episodes are open at a time. Opening one more waits for a place for as long as other episodes end; when
none has ended for `queue_s`, it gives up with `PoolBusy`. A server that died is replaced at the next `open`; its
episodes are gone.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from draco.env.appworld.client import ForkServer, ServerOptions
from draco.env.appworld.faults import AppWorldFault, PoolBusy, TooSlow, WorkerDied

__all__ = ["Executed", "KeptServer", "PerLoop", "Pool", "Slot"]

#: signals that only the agent's own code can have caused; a SIGKILL that we did not send is none of them
_OWN = frozenset({
    signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGXCPU, signal.SIGXFSZ,
    signal.SIGSYS, signal.SIGTRAP,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Executed:
    """What one code block did."""

    output: str
    mistake: str = ""  #: unsafe | interrupt | long_output | deadline | crashed: the agent's own, where it made one
    engine_s: float = 0.0  #: seconds inside AppWorld's own execute


@dataclass(slots=True)
class Slot:
    """One open episode."""

    server: ForkServer
    index: int  #: of the server
    experiment: str
    completed: bool = False  #: the completion API was called so far
    failed: bool = False  #: with a failure status
    over: bool = False  #: the episode's process is gone, and the episode with it
    closed: bool = False


class KeptServer:
    """A fork server that is started when it is first needed, and replaced when it has died."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.server: ForkServer | None = None
        self._starting = asyncio.Lock()

    async def get(self) -> ForkServer:
        """The running server.

        Raises:
            StartFailed: it does not come up.
        """
        async with self._starting:
            if self.server is None or not self.server.alive:
                await self.stop()
                server = ForkServer(self.options)
                await server.start()
                self.server = server
            return self.server

    async def stop(self) -> None:
        """End it, and its episodes."""
        if self.server is not None:
            await self.server.stop()
        self.server = None


K = TypeVar("K", "Pool", KeptServer)


class PerLoop(Generic[K]):
    """One pool or server for the event loop that runs. What belonged to an earlier, closed loop ended with it."""

    def __init__(self, make: Callable[[], K]) -> None:
        self.made: K | None = None
        self._make: Callable[[], K] = make
        self._loop: asyncio.AbstractEventLoop | None = None

    def get(self) -> K:
        """That of the running loop."""
        loop = asyncio.get_running_loop()
        if self.made is None or self._loop is not loop:
            self.made, self._loop = self._make(), loop
        return self.made

    def close(self) -> None:
        """End it, from outside its loop. Not needed at the end of a process; it ends with it."""
        if self.made is not None and self._loop is not None and self._loop.is_running():
            asyncio.run_coroutine_threadsafe(self.made.stop(), self._loop).result()
        self.made = None


class Pool:
    """Opens, runs and closes episodes. Every method belongs to one event loop.

    Args:
        options: how a server is started.
        places: live episodes at most; each takes about 60 MB.
        servers: fork servers to spread them over.
        open_s, execute_s: deadlines; a process that passes its own is killed.
        queue_s: how long `open` waits while no episode ends; the end of an episode restarts the clock.
    """

    def __init__(
        self,
        options: ServerOptions,
        *,
        places: int = 128,
        servers: int = 1,
        open_s: float = 60.0,
        execute_s: float = 90.0,
        queue_s: float = 600.0,
    ) -> None:
        self.open_s, self.execute_s, self.queue_s = open_s, execute_s, queue_s
        self.servers = [KeptServer(options) for _ in range(servers)]
        self._live = [0] * servers
        self._free = asyncio.Semaphore(places)
        self._waiting: set[asyncio.Timeout] = set()
        self._tidying: set[asyncio.Task[None]] = set()

    @property
    def live(self) -> int:
        """Episodes open now."""
        return sum(self._live)

    async def open(self, task: str) -> Slot:
        """A new episode in a process of its own.

        Raises:
            AppWorldFault: no place in time, or it could not be opened.
        """
        await self._place()
        index = min(range(len(self._live)), key=self._live.__getitem__)
        self._live[index] += 1
        server, experiment = None, f"e{secrets.token_hex(8)}"
        try:
            server = await self.servers[index].get()
            await server.request("open", task=task, experiment=experiment, deadline_s=self.open_s)
        except BaseException:  # the caller may have been cancelled while the server goes on
            self._leave(index)
            if server is not None and server.alive:
                tidying = asyncio.create_task(_forget(server, experiment))
                self._tidying.add(tidying)
                tidying.add_done_callback(self._tidying.discard)
            raise
        return Slot(server, index, experiment)

    async def _place(self) -> None:
        try:
            async with asyncio.timeout(self.queue_s) as clock:
                self._waiting.add(clock)
                try:
                    await self._free.acquire()
                finally:
                    self._waiting.discard(clock)
        except TimeoutError:
            raise PoolBusy(
                f"no episode ended in {self.queue_s} s, and no place is free: {self.live} episodes are open; raise "
                "env.environment.places (about 60 MB each) or open fewer at a time"
            ) from None

    def _leave(self, index: int) -> None:
        self._live[index] -= 1
        self._free.release()
        until = asyncio.get_running_loop().time() + self.queue_s
        for clock in self._waiting:
            if not clock.expired():
                clock.reschedule(until)

    async def execute(self, slot: Slot, code: str) -> Executed:
        """Run one block. The agent's own mistakes are in the answer.

        Raises:
            AppWorldFault: a fault that is not the agent's.
        """
        try:
            answer = await slot.server.request(
                "execute", experiment=slot.experiment, code=code, deadline_s=self.execute_s
            )
        except TooSlow:
            slot.over = True
            text = f"Execution failed: the code ran longer than {self.execute_s:g} s and was stopped for good."
            return Executed(text, "deadline")
        except WorkerDied as died:
            if died.signal not in _OWN:
                raise
            slot.over = True
            name = signal.Signals(died.signal).name
            return Executed(f"Execution failed: the code ended its own process ({name}).", "crashed")
        slot.completed, slot.failed = bool(answer["completed"]), bool(answer["failed"])
        return Executed(str(answer["output"]), str(answer["mistake"]), answer["engine_s"])

    async def state(self, slot: Slot) -> dict[str, Any]:
        """What the episode changed, for an evaluator.

        Raises:
            AppWorldFault: it left nothing.
        """
        return await slot.server.request("state", experiment=slot.experiment)

    async def close(self, slot: Slot) -> None:
        """End the episode's process and remove its files. Safe to call twice."""
        if slot.closed:
            return
        slot.closed = True
        try:
            if slot.server.alive:
                await slot.server.request("close", experiment=slot.experiment)
        except WorkerDied:
            pass  # the server went with all its episodes
        finally:
            self._leave(slot.index)

    async def stop(self) -> None:
        """End every server and every episode."""
        for kept in self.servers:
            await kept.stop()


async def _forget(server: ForkServer, experiment: str) -> None:
    """End an episode that may not exist."""
    with suppress(AppWorldFault):
        await server.request("close", experiment=experiment)
