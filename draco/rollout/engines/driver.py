"""Episodes as tasks on the background loop, for engines whose models answer over the network.

The engine says how one turn is sampled (a coroutine); what a turn does in the environment runs on worker threads. At
the deadline nobody waits for an environment: the thread that is inside closes the episode once it is out.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

from draco.core.background import BackgroundLoop
from draco.core.errors import ConfigError, EngineError
from draco.core.types import Termination
from draco.rollout.engines.base import at_a_time
from draco.rollout.loop import AgentLoop

__all__ = ["Flight", "drive"]

R = TypeVar("R", bound=AgentLoop)


class Flight(Generic[R]):
    """A batch of rollouts under way on the background loop, from construction on.

    Args:
        work: drives them to their ends; its argument takes each rollout that has ended.
    """

    def __init__(self, rollouts: Sequence[R], work: Callable[[Callable[[R], None]], Awaitable[None]]) -> None:
        self.rollouts = rollouts
        self._ended: queue.SimpleQueue[R | None] = queue.SimpleQueue()
        self._out = threading.Event()  #: the tasks have let go of their rollouts
        self._future = BackgroundLoop.shared().submit(self._run(work))
        self._future.add_done_callback(lambda _: self._ended.put(None))

    async def _run(self, work: Callable[[Callable[[R], None]], Awaitable[None]]) -> None:
        try:
            await work(self._ended.put)
        finally:
            self._out.set()

    def collect(self) -> Iterator[R]:
        """Hand over each rollout once it has ended. A caller that turns away ends the rest.

        Raises:
            EngineError: the work ended without all of its rollouts; or whatever error ended the work.
        """
        try:
            for _ in self.rollouts:
                if (rollout := self._ended.get()) is None:
                    self._future.result()
                    raise EngineError("generation ended without all of its rollouts")
                yield rollout
            self._future.result()
        finally:
            self.stop()

    def wait(self) -> None:
        """Wait until all is over; an error on the way is `collect`'s to raise."""
        wait([self._future])

    def stop(self) -> None:
        """Break off what is under way and close its episodes; changes nothing where all has ended."""
        if not self._future.done():
            self._future.cancel()
            self._out.wait(10)
        for rollout in self.rollouts:
            rollout.end(Termination.ENGINE_ERROR, "generation was interrupted")

    def fault(self) -> BaseException | None:
        """What ended the work too early, once it is over."""
        return None if self._future.cancelled() else self._future.exception()


async def drive(
    rollouts: Sequence[R],
    sample: Callable[[R], Awaitable[None]],
    *,
    concurrency: int,
    threads: ThreadPoolExecutor,
    ended: Callable[[R], None],
) -> None:
    """Drive every rollout to its end.

    Args:
        sample: gets the next turn of a rollout from its model, or ends the rollout.
        concurrency: rollouts at a time, and no more than their environment has places for.
        threads: where environments are stepped.
        ended: takes each rollout that has ended.

    Raises:
        ConfigError: from `sample`: no further request can succeed. No rollout is started after it.
    """
    places = asyncio.Semaphore(at_a_time(rollouts, concurrency))
    hopeless = False

    async def one(rollout: R) -> None:
        nonlocal hopeless
        async with places:
            if hopeless:  # the group's cancellation comes a moment after the next place is free
                return
            try:
                await _play(rollout, sample, threads)
            except ConfigError:
                hopeless = True
                raise
        ended(rollout)

    try:
        async with asyncio.TaskGroup() as group:
            for rollout in rollouts:
                group.create_task(one(rollout))
    except* ConfigError as errors:
        raise errors.exceptions[0] from None


async def _play(rollout: R, sample: Callable[[R], Awaitable[None]], threads: ThreadPoolExecutor) -> None:
    """One rollout, to its end, whatever happens on the way."""
    rollout.start()
    left = rollout.time_left
    try:
        async with asyncio.timeout(None if left == math.inf else left):
            while rollout.termination is None:
                await sample(rollout)
                if rollout.termination is None:
                    await _act(rollout, threads)
    # Closing an episode blocks, and some (AppWorld's) wait for this very loop to do it: not here, nor on one of
    # `threads`, which an environment may hold up.
    except TimeoutError:
        late = "the deadline passed while a model was answering"
        await asyncio.to_thread(rollout.end, Termination.DEADLINE, late)
    except EngineError as error:
        await asyncio.to_thread(rollout.end, Termination.ENGINE_ERROR, str(error))


async def _act(rollout: AgentLoop, threads: ThreadPoolExecutor) -> None:
    """Run the actions of a turn on a worker thread; a cancellation leaves the thread behind."""
    acting = _Acting(rollout)
    working = threads.submit(acting)
    try:
        await asyncio.shield(asyncio.wrap_future(working))
    except asyncio.CancelledError:
        if acting.leave():  # the thread cannot be stopped and is not waited for
            working.add_done_callback(acting.never_began)
        raise


class _Acting:
    """The actions of a turn, on a worker thread. A thread that is left behind closes the episode once it is out.

    It needs no event loop for that: the run may be over by then, and its loop closed.
    """

    def __init__(self, rollout: AgentLoop) -> None:
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
