"""One rank's fault ends all ranks, with its message and within a minute, wherever the others wait (a save is finished).

A thread on every rank keeps a heartbeat in a small key-value store on rank 0's machine and reads what the others left
there. A rank that fails writes its message before it ends; one that is killed stops beating (a neighbour on the same
machine is missed at once, by its process id). Whoever learns of it ends its own process, for the main thread may be
inside a collective or an environment that nothing in Python can interrupt. Checkpoints are complete or not there
(`draco.core.files`), so the run goes on from the newest one.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from draco.core.errors import ConfigError, DracoError, TrainingStopped

__all__ = ["Watch", "host_name", "status_of"]

log = logging.getLogger("draco")

_BEAT_S = 1.0  #: seconds between heartbeats
_SILENCE_S = 40.0  #: a rank that has not beaten for so long is taken for dead
_GRACE_S = 10.0  #: rank 0 is given to come to what may be the end of all ranks alike
_SAVE_S = 300.0  #: a save is given
_LEAVE_S = 20.0  #: rank 0 holds the store for the others
_FIRST = "fault"  #: key of the first fault


class Watch:
    """The watch of one rank.

    Args:
        rank, world: this process, and how many there are.
        store: shared by all ranks.
        host: where rank 0's store is, for messages.
    """

    def __init__(self, rank: int, world: int, store: Any, host: str) -> None:
        self.rank, self.world, self.store, self.host = rank, world, store, host
        self._ended, self._ending = threading.Event(), threading.Lock()
        self.saving = threading.Lock()  #: held by the main thread: the process does not end before it lets go
        self._peers: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._run, name="draco-watch", daemon=True)

    @classmethod
    def start(cls, rank: int, world: int, broadcast: Callable[[Any], Any]) -> Watch:
        """Connect all ranks and begin to watch.

        Args:
            rank, world: this process, and how many there are.
            broadcast: gives rank 0's value to all.
        """

        address = os.environ["MASTER_ADDR"]
        patience = timedelta(seconds=20)  # of one request: a machine that vanished answers nothing at all
        connect: Any = dist.TCPStore  # type: ignore[attr-defined]
        own = connect(address, 0, is_master=True, wait_for_workers=False, timeout=patience) if rank == 0 else None
        port, host = broadcast((own.port, host_name()) if own is not None else None)
        store = own or connect(address, port, is_master=False, timeout=patience)
        watch = cls(rank, world, store, host)
        store.set(f"who/{rank}", json.dumps({"pid": os.getpid(), "host": host_name()}))
        watch._peers = [json.loads(store.get(f"who/{r}")) for r in range(world)]
        store.set(f"beat/{rank}", "0")
        watch._thread.start()
        return watch

    def close(self) -> None:
        """All ranks are through: end the watch."""
        self._ended.set()
        self._thread.join()
        self._leave()

    def failed(self, error: BaseException) -> None:
        """Tell the others. Ends the process instead where this error is but the echo of another rank's fault."""
        if self._ended.is_set():
            return
        if _is_echo(error):
            # A connection broke because a rank ended, or the launcher is ending everyone. Who was first is known soon.
            until = time.monotonic() + _SILENCE_S + 15
            while time.monotonic() < until and (first := self._first()) is None and not self._ended.is_set():
                if type(error).__name__ == "Interrupted" and time.monotonic() > until - _SILENCE_S - 10:
                    break  # a signal from outside, to this rank before all others
                time.sleep(0.2)
            else:
                if first is not None:
                    self._end(first)
        elif isinstance(error, ConfigError | TrainingStopped) and self.rank:
            # Ranks check alike, and rank 0 tidies up or saves: it must not be ended by what it is about to find itself.
            until = time.monotonic() + _GRACE_S
            while time.monotonic() < until and self._first() is None:
                time.sleep(0.2)
        message = f"{type(error).__name__}: {error}" if not isinstance(error, DracoError) else str(error)
        first = self._tell({"rank": self.rank, "message": message, "status": status_of(error)})
        self._ended.set()
        if first["rank"] != self.rank:
            self._end(first)
        self._leave()

    def _leave(self, without: int = -1) -> None:
        """Let go of the store. Rank 0 holds it until the others have read what is in it.

        Args:
            without: a rank that needs nothing of it any more: it may be dead.
        """
        try:
            self.store.set(f"gone/{self.rank}", "1")
            names, until = [f"gone/{r}" for r in range(self.world) if r != without], time.monotonic() + _LEAVE_S
            while self.rank == 0 and time.monotonic() < until and not self.store.check(names):
                time.sleep(0.1)
        except Exception as error:
            log.debug("leaving the watch: %s", error)

    def _tell(self, fault: dict[str, Any]) -> dict[str, Any]:
        """Write a fault unless there is one; returns the first."""
        fault["host"] = self._peers[fault["rank"]]["host"]
        try:
            first: dict[str, Any] = json.loads(self.store.compare_set(_FIRST, "", json.dumps(fault)))
        except Exception:  # the store went with rank 0
            return fault
        return first

    def _first(self) -> dict[str, Any] | None:
        try:
            return json.loads(self.store.get(_FIRST)) if self.store.check([_FIRST]) else None
        except Exception:
            return self._lost()

    def _lost(self) -> dict[str, Any]:
        return {
            "rank": 0, "host": self.host, "status": 1,
            "message": "the process is gone (killed, out of memory, or its machine or network is down)",
        }  # fmt: skip

    def _end(self, fault: dict[str, Any]) -> None:
        """End this process: the main thread may be where no exception reaches it."""
        if not self._ending.acquire(blocking=False):  # the other thread is at it
            time.sleep(60)
        print(
            f"rank {self.rank}: stopped, because rank {fault['rank']} on {fault['host']} ended: {fault['message']}",
            file=sys.stderr,
            flush=True,
        )
        self.saving.acquire(timeout=_SAVE_S)
        self._leave(without=fault["rank"])
        os._exit(fault["status"] or 1)

    def _run(self) -> None:
        beats = 0
        seen: dict[int, tuple[str, float]] = {}
        while not self._ended.wait(_BEAT_S):
            beats += 1
            try:
                self.store.set(f"beat/{self.rank}", str(beats))
                fault = json.loads(self.store.get(_FIRST)) if self.store.check([_FIRST]) else None
                fault = fault or self._silent(seen)
                if fault is not None:
                    fault = self._tell(fault)
            except Exception:
                fault = self._lost()
            if fault is not None and not self._ended.is_set():
                if fault["rank"] == self.rank:
                    continue  # our own; the main thread is on its way out
                self._end(fault)

    def _silent(self, seen: dict[int, tuple[str, float]]) -> dict[str, Any] | None:
        """The first rank that is dead, if any. Rank 0 listens to heartbeats, every rank looks after its neighbours."""
        now = time.monotonic()
        for other, peer in enumerate(self._peers):
            if other == self.rank:
                continue
            fault = None
            if peer["host"] == self._peers[self.rank]["host"]:
                if not _alive(peer["pid"]):
                    time.sleep(_BEAT_S)  # what it had to say comes first
                    fault = "the process was killed (a signal, or out of memory)"
            elif self.rank == 0:
                beat = self.store.get(f"beat/{other}").decode() if self.store.check([f"beat/{other}"]) else ""
                if other not in seen or seen[other][0] != beat:
                    seen[other] = (beat, now)
                elif now - seen[other][1] > _SILENCE_S:
                    fault = f"no sign of life for {_SILENCE_S:.0f} s (killed, or its machine or network is down)"
            if fault is not None and not self.store.check([f"gone/{other}"]):
                return {"rank": other, "status": 1, "message": fault}
        return None


def status_of(error: BaseException) -> int:
    """Exit status of a process that ends by `error`, as `draco.cli` documents it."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    status = getattr(error, "status", None)  # Interrupted
    if isinstance(status, int):
        return status
    return (2 if isinstance(error, ConfigError) else 3) if isinstance(error, DracoError) else 1


def _is_echo(error: BaseException) -> bool:
    """Whether an error may be the consequence of another rank's end."""
    if type(error).__name__ in {"Interrupted", "SIGTERMException", "DistBackendError", "DistNetworkError"}:
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(s in text for s in ("gloo", "nccl", "connection closed", "recv"))


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return not Path("/proc/self/stat").exists()  # no /proc: heartbeats alone decide
    return state not in {"Z", "X"}


def host_name() -> str:
    """Tells machines apart, containers and network namespaces too."""
    try:
        return f"{socket.gethostname()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()
