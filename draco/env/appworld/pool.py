"""Fork servers behind one door: places for live episodes, a queue in order of arrival, servers started when needed.

Back-pressure: at most `places` episodes are open at a time. Whoever opens one more waits for a place as long as others
end: it gives up with `PoolBusy` when none has for `queue_s`. A server that died is replaced at the next `open`; the
episodes that it had are gone.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from draco.env.appworld.client import ForkServer, ServerOptions
from draco.env.appworld.faults import AppWorldFault, PoolBusy, TooSlow, WorkerDied

__all__ = ["Executed", "Pool", "Slot"]

#: signals by which an agent's code can only have ended its own process (a SIGKILL that we did not send is not one)
_OWN = frozenset({
    signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGXCPU, signal.SIGXFSZ,
    signal.SIGSYS, signal.SIGTRAP,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Executed:
    """What one code block did."""

    output: str
    completed: bool  #: the completion API was called so far
    failed: bool  #: with a failure status
    mistake: str = ""  #: unsafe | interrupt | long_output | deadline | crashed: the agent's own, where it made one
    over: bool = False  #: the episode's process is gone and the episode with it
    engine_s: float = 0.0  #: seconds inside AppWorld's own execute


@dataclass(slots=True)
class Slot:
    """One open episode."""

    server: ForkServer
    experiment: str
    task: str
    completed: bool = False
    failed: bool = False
    closed: bool = field(default=False)


class Pool:
    """Opens, runs and closes episodes. Every method belongs to one event loop.

    Args:
        options: how a server is started.
        places: live episodes at most; each takes about 60 MB.
        servers: fork servers to spread them over.
        open_s, execute_s: deadlines; a process that passes its own is killed.
        queue_s: how long `open` waits while no episode ends; each end starts it anew.
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
        self.options, self.places = options, places
        self.open_s, self.execute_s, self.queue_s = open_s, execute_s, queue_s
        self._servers: list[ForkServer | None] = [None] * servers
        self._live = [0] * servers
        self._starting = [asyncio.Lock() for _ in range(servers)]
        self._free = asyncio.Semaphore(places)
        self._waiting: set[asyncio.Timeout] = set()
        self._tidying: set[asyncio.Task[None]] = set()
        self.restarts = 0  #: servers that had to be replaced

    @property
    def live(self) -> int:
        """Episodes open now."""
        return sum(self._live)

    async def open(self, task: str) -> Slot:
        """A new episode in a process of its own, under a name of its own.

        Raises:
            AppWorldFault: no place in time, or it could not be opened.
        """
        await self._place()
        index = min(range(len(self._live)), key=self._live.__getitem__)
        self._live[index] += 1
        server, experiment = None, f"e{secrets.token_hex(8)}"
        try:
            server = await self._server(index)
            await server.request("open", task=task, experiment=experiment, deadline_s=self.open_s)
        except BaseException:  # whoever asked may have been cancelled while the server went on
            self._leave(index)
            if server is not None and server.alive:
                tidying = asyncio.create_task(_forget(server, experiment))
                self._tidying.add(tidying)
                tidying.add_done_callback(self._tidying.discard)
            raise
        return Slot(server, experiment, task)

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

    async def _server(self, index: int) -> ForkServer:
        async with self._starting[index]:
            server = self._servers[index]
            if server is None or not server.alive:
                if server is not None:
                    self.restarts += 1
                    await server.stop()
                server = ForkServer(self.options)
                await server.start()
                self._servers[index] = server
            return server

    def _leave(self, index: int) -> None:
        self._live[index] -= 1
        self._release()

    def _release(self) -> None:
        self._free.release()
        until = asyncio.get_running_loop().time() + self.queue_s
        for clock in self._waiting:
            if not clock.expired():
                clock.reschedule(until)

    async def execute(self, slot: Slot, code: str) -> Executed:
        """Run one block. What the agent does wrong is in the answer.

        Raises:
            AppWorldFault: what it did not do.
        """
        try:
            answer = await slot.server.request(
                "execute", experiment=slot.experiment, code=code, deadline_s=self.execute_s
            )
        except TooSlow:
            text = f"Execution failed: the code ran longer than {self.execute_s:g} s and was stopped for good."
            return Executed(text, slot.completed, slot.failed, mistake="deadline", over=True)
        except WorkerDied as died:
            if died.signal not in _OWN:
                raise
            text = f"Execution failed: the code ended its own process ({signal.Signals(died.signal).name})."
            return Executed(text, slot.completed, slot.failed, mistake="crashed", over=True)
        slot.completed, slot.failed = bool(answer["completed"]), bool(answer["failed"])
        return Executed(
            str(answer["output"]), slot.completed, slot.failed, str(answer["mistake"]), engine_s=answer["engine_s"]
        )

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
            if slot.server in self._servers:
                self._leave(self._servers.index(slot.server))
            else:
                self._release()

    async def stop(self) -> None:
        """End every server and every episode."""
        servers = [s for s in self._servers if s is not None]
        self._servers = [None] * len(self._servers)
        for server in servers:
            await server.stop()


async def _forget(server: ForkServer, experiment: str) -> None:
    """End an episode that may not exist."""
    with suppress(AppWorldFault):
        await server.request("close", experiment=experiment)
