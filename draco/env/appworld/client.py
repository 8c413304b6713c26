"""The trainer's side of AppWorld: starts a fork server and speaks JSON lines to it, by asyncio.

AppWorld itself is never imported here: it needs pydantic 1, and its freezegun would stop this process's clock.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import tempfile
import weakref
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from draco.env.appworld.faults import ProtocolBroken, StartFailed, WorkerDied, fault

__all__ = ["SERVER", "ForkServer", "Limits", "ServerOptions"]

SERVER = Path(__file__).parent / "inside" / "server.py"
_LINE = 64 << 20
_ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH")  # what a worker inherits: no keys, no tokens


@dataclass(frozen=True, slots=True)
class Limits:
    """What one episode's process may use."""

    memory_mb: int = 1024  #: address space beyond the warm server's
    cpu_s: int = 900  #: CPU seconds over the whole episode
    files: int = 256
    file_mb: int = 64  #: size of one file


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How a fork server is started."""

    python: str  #: interpreter of AppWorld's own environment
    data: str  #: the folder `data` of a data root
    role: str  #: rollout or evaluate
    soft_s: int = 60  #: AppWorld's own timeout of one block: the agent reads of it and goes on
    max_output: int = 200_000  #: characters of one observation that leave the worker
    start_s: float = 300.0  #: to import and warm up
    limits: Limits = field(default_factory=Limits)
    require: tuple[str, ...] = ()  #: layers of isolation without which nothing runs
    check_code: bool = True  #: refuse unsafe code by its syntax; off only in tests of the sandbox behind it
    server: str = str(SERVER)


class ForkServer:
    """One fork server and its episodes. Every method belongs to the event loop that `start` ran on."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.pid = 0
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._next = 1
        self._writer: asyncio.StreamWriter | None = None
        self._reader_task: asyncio.Task[None] | None = None
        self._gone = ""
        self._finalizer: Any = None

    async def start(self) -> None:
        """Start the process and wait until it is warm.

        Raises:
            StartFailed: it did not come up; the message holds the last line that it printed.
        """
        options = self.options
        stage = Path(tempfile.mkdtemp(prefix="draco-appworld-"))
        sock = self._launch(stage)
        reader, self._writer = await asyncio.open_connection(sock=sock, limit=_LINE)
        ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._pending[0] = ready
        self._reader_task = asyncio.create_task(self._read(reader))
        try:
            await asyncio.wait_for(ready, options.start_s)
        except (Exception, asyncio.CancelledError) as error:
            errors = stage / "stderr"
            said = errors.read_text(errors="replace").strip().splitlines()[-1:] if errors.is_file() else []
            await self.stop()
            if isinstance(error, asyncio.CancelledError):
                raise
            what = f"not ready after {options.start_s} s" if isinstance(error, TimeoutError) else str(error)
            raise StartFailed(f"AppWorld's {options.role} server did not start: {what} {' '.join(said)}") from error

    def _launch(self, stage: Path) -> socket.socket:
        """Start the process in the folder `stage`; our end of the connection."""
        options = self.options
        home, outputs = stage / "home", stage / "experiments" / "outputs"
        home.mkdir()
        outputs.mkdir(parents=True)
        data = Path(options.data).resolve()
        (stage / "data").symlink_to(data)
        environment = {k: os.environ[k] for k in _ENVIRONMENT if k in os.environ}
        # A fixed hash seed: what an episode prints must not depend on the order of sets in one process.
        environment |= {
            "HOME": str(home), "IPYTHONDIR": str(home / "ipython"), "APPWORLD_ROOT": str(stage),
            "APPWORLD_CACHE": str(home), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0",
        }  # fmt: skip
        settings = {
            **{k: v for k, v in asdict(options).items() if k not in ("python", "server", "start_s")},
            "data": str(data), "root": str(stage), "outputs": str(outputs), "home": str(home),
            "environment": sorted(environment),
        }  # fmt: skip
        ours, theirs = socket.socketpair()
        python = os.path.abspath(options.python) if os.sep in options.python else options.python
        try:
            with theirs, (stage / "stderr").open("wb") as log:
                process = subprocess.Popen(
                    [python, "-s", "-P", options.server, str(theirs.fileno()), json.dumps(settings)],
                    pass_fds=(theirs.fileno(),), env=environment, cwd=stage, stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL, stderr=log, start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            ours.close()
            shutil.rmtree(stage, ignore_errors=True)
            raise StartFailed(
                f"env.python={options.python} could not be started: {error}; run scripts/setup_appworld.sh of the "
                "repository"
            ) from error
        self.pid = process.pid
        self._finalizer = weakref.finalize(self, _end, process, stage)
        return ours

    @property
    def alive(self) -> bool:
        """True between `start` and the end of the process."""
        return self._writer is not None and not self._gone

    async def request(self, op: str, *, deadline_s: float | None = None, **fields: Any) -> dict[str, Any]:
        """Send one request and wait for its answer.

        Raises:
            AppWorldFault: the kind of error that came back, or the server died.
        """
        if self._writer is None or self._gone:
            raise WorkerDied(f"AppWorld's {self.options.role} server is not running: {self._gone or 'never started'}")
        number, self._next = self._next, self._next + 1
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        message = {"id": number, "op": op, **fields}
        if deadline_s is not None:
            message["deadline_s"] = deadline_s
        try:
            self._writer.write(json.dumps(message).encode() + b"\n")
            await self._writer.drain()
            return await future
        except (ConnectionError, OSError) as error:
            raise WorkerDied(f"AppWorld's {self.options.role} server hung up: {error}") from error
        finally:
            self._pending.pop(number, None)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        why = "it closed the connection"
        try:
            while line := await reader.readline():
                self._answer(json.loads(line))
        except (ValueError, OSError) as error:
            why = f"{type(error).__name__}: {error}"
        except asyncio.CancelledError:
            why = "stopped"
        finally:
            self._gone = why
            for future in self._pending.values():
                if not future.done():
                    future.set_exception(WorkerDied(f"AppWorld's {self.options.role} server is gone: {why}"))
            if self._writer is not None:
                self._writer.close()

    def _answer(self, message: dict[str, Any]) -> None:
        future = self._pending.get(message.get("id", -1))
        if future is None or future.done():
            return  # the caller has stopped waiting
        if isinstance(message.get("ok"), dict):
            future.set_result(message["ok"])
        elif isinstance(message.get("error"), dict):
            error = message["error"]
            raised = fault(str(error.get("kind")), str(error.get("message")))
            raised.signal = int(error.get("signal", 0))
            future.set_exception(raised)
        else:
            future.set_exception(ProtocolBroken(f"expected ok or error, got {sorted(message)}"))

    async def stop(self) -> None:
        """End the server and its episodes, and remove its files. Safe to call twice."""
        if self._reader_task is not None:
            self._reader_task.cancel()
            await asyncio.gather(self._reader_task, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
        if self._finalizer is not None:
            await asyncio.to_thread(self._finalizer)


def _end(process: subprocess.Popen[bytes], stage: Path) -> None:
    """The kernel ends the children of a killed server."""
    process.kill()
    process.wait()
    shutil.rmtree(stage, ignore_errors=True)
