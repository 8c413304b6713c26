"""One asyncio event loop on a daemon thread: judge calls run on it while the main thread generates.

>>> loop = BackgroundLoop()
>>> async def answer() -> int:
...     return 42
>>> loop.submit(answer()).result()
42
>>> loop.close()
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, ClassVar, TypeVar

__all__ = ["BackgroundLoop"]

T = TypeVar("T")


class BackgroundLoop:
    """An event loop that runs until `close`. Thread-safe."""

    _shared: ClassVar[BackgroundLoop | None] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="draco-background", daemon=True)
        self._thread.start()

    @classmethod
    def shared(cls) -> BackgroundLoop:
        """The loop of this process; a new one if the last was closed."""
        with cls._lock:
            if cls._shared is None or cls._shared.closed:
                cls._shared = cls()
            return cls._shared

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._loop.is_closed()

    def submit(self, coro: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `coro` on the loop. Cancelling the future cancels the task.

        Raises:
            RuntimeError: the loop is closed.
        """
        if self.closed:
            coro.close()
            raise RuntimeError("the background loop is closed; take a new one from BackgroundLoop.shared()")
        return asyncio.run_coroutine_threadsafe(coro, self._loop)

    def close(self) -> None:
        """Cancel every task, wait for them, and end the thread. Safe to call twice."""
        if self.closed:
            return
        asyncio.run_coroutine_threadsafe(self._drain(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _drain(self) -> None:
        # A cancelled task may start another one while it ends (litellm's logging worker does): repeat.
        this = asyncio.current_task()
        while tasks := [task for task in asyncio.all_tasks() if task is not this]:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.get_running_loop().shutdown_asyncgens()
        await asyncio.get_running_loop().shutdown_default_executor()
