"""When one rank fails or dies, all ranks end with its message within a minute, whatever they are waiting for.

A thread on every rank writes a heartbeat to a small key-value store on rank 0's machine and reads what the others
wrote. A rank that fails writes its message there before it ends. A rank that is killed stops its heartbeat; ranks on
the same machine notice at once, by its process id. A rank that learns of a fault ends its own process with `os._exit`,
because its main thread may be inside a collective or an environment that no exception reaches. A save in progress is
finished first. Checkpoints are complete or absent (`draco.core.files`), so the run can continue from the newest one.
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
from draco.core.signals import Interrupted

__all__ = ["Watch", "host_name", "status_of"]

log = logging.getLogger("draco")

_BEAT_S = 1.0  #: seconds between heartbeats
_SILENCE_S = 40.0  #: a rank without a heartbeat for this long is considered dead
_SIGNAL_S = 5.0  #: how long an interrupted rank waits for the fault of another one
_GRACE_S = 10.0  #: how long another rank waits for rank 0 to raise the same error
_SAVE_S = 300.0  #: longest time for a save in progress
_LEAVE_S = 20.0  #: how long rank 0 keeps the store for the others
_FIRST = "fault"  #: key of the first fault

Fault = dict[str, Any]  #: rank, host, message, status (of the exit)


class Watch:
    """The watch of one rank.

    Args:
        rank, world: this process, and the number of processes.
        store: shared by all ranks.
        host: machine of the store, for messages.
    """

    def __init__(self, rank: int, world: int, store: Any, host: str) -> None:
        self.rank, self.world, self.store, self.host = rank, world, store, host
        self._ended, self._ending = threading.Event(), threading.Lock()
        self.saving = threading.Lock()  #: while the main thread holds it, the process does not end
        self._peers: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._run, name="draco-watch", daemon=True)

    @classmethod
    def start(cls, rank: int, world: int, broadcast: Callable[[Any], Any]) -> Watch:
        """Connect all ranks and start watching.

        Args:
            rank, world: this process, and the number of processes.
            broadcast: returns rank 0's value on every rank.
        """
        address = os.environ["MASTER_ADDR"]
        patience = timedelta(seconds=20)  # of one request: a machine that vanished never answers
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
        """Stop watching: all ranks have finished."""
        self._ended.set()
        self._thread.join()
        self._leave()

    def failed(self, error: BaseException) -> None:
        """Report the error of this rank to the others.

        If another rank failed first, this process ends with that rank's message, and the call does not return.
        """
        if self._ended.is_set():
            return
        if _is_consequence(error):
            # Another rank ended and broke a connection, or the launcher is ending all ranks: find out who was first.
            # A signal may also come from outside, and to this rank first: then no other fault follows.
            first = self._wait(_SIGNAL_S if isinstance(error, Interrupted) else _SILENCE_S + 15)
            if first is not None:
                self._end(first)
        elif isinstance(error, ConfigError | TrainingStopped) and self.rank:
            # All ranks make the same checks. Rank 0 tidies up or saves when it fails: let it get there by itself.
            self._wait(_GRACE_S)
        message = f"{type(error).__name__}: {error}" if not isinstance(error, DracoError) else str(error)
        first = self._report({"rank": self.rank, "message": message, "status": status_of(error)})
        self._ended.set()
        if first["rank"] != self.rank:
            self._end(first)
        self._leave()

    def _wait(self, seconds: float) -> Fault | None:
        """The first fault, as soon as there is one; None after `seconds`."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if (first := self._first()) is not None:
                return first
            time.sleep(0.2)
        return None

    def _leave(self, without: int = -1) -> None:
        """Release the store. Rank 0 keeps it until the others have read it.

        Args:
            without: a rank not to wait for, because it may be dead.
        """
        try:
            self.store.set(f"gone/{self.rank}", "1")
            names, until = [f"gone/{r}" for r in range(self.world) if r != without], time.monotonic() + _LEAVE_S
            while self.rank == 0 and time.monotonic() < until and not self.store.check(names):
                time.sleep(0.1)
        except Exception as error:
            log.debug("leaving the watch: %s", error)

    def _report(self, fault: Fault) -> Fault:
        """Write a fault if it is the first one; returns the first one."""
        fault["host"] = self._peers[fault["rank"]]["host"]
        try:
            first: Fault = json.loads(self.store.compare_set(_FIRST, "", json.dumps(fault)))
        except Exception:  # rank 0 is gone, and the store with it
            return fault
        return first

    def _first(self) -> Fault | None:
        """The first fault, if any. A lost store is a fault of rank 0."""
        try:
            return json.loads(self.store.get(_FIRST)) if self.store.check([_FIRST]) else None
        except Exception:
            return self._rank_0_lost()

    def _rank_0_lost(self) -> Fault:
        return {
            "rank": 0, "host": self.host, "status": 1,
            "message": "the process is gone (killed, out of memory, or its machine or network is down)",
        }  # fmt: skip

    def _end(self, fault: Fault) -> None:
        """End this process, whatever its main thread is doing."""
        if not self._ending.acquire(blocking=False):  # the other thread is ending the process already
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
        """The thread: send heartbeats, and end the process when another rank has failed or is dead."""
        beats = 0
        seen: dict[int, tuple[str, float]] = {}
        while not self._ended.wait(_BEAT_S):
            beats += 1
            try:
                self.store.set(f"beat/{self.rank}", str(beats))
                fault = json.loads(self.store.get(_FIRST)) if self.store.check([_FIRST]) else None
                fault = fault or self._dead_rank(seen)
                if fault is not None:
                    fault = self._report(fault)
            except Exception:
                fault = self._rank_0_lost()
            # A fault of this rank itself: the main thread is already ending the process.
            if fault is not None and not self._ended.is_set() and fault["rank"] != self.rank:
                self._end(fault)

    def _dead_rank(self, seen: dict[int, tuple[str, float]]) -> Fault | None:
        """The first dead rank, if any. Every rank checks the processes of its machine; rank 0 checks all heartbeats.

        Args:
            seen: other rank → its last heartbeat, and when it was first seen; updated here.
        """
        now = time.monotonic()
        for other, peer in enumerate(self._peers):
            if other == self.rank:
                continue
            fault = None
            if peer["host"] == self._peers[self.rank]["host"]:
                if not _alive(peer["pid"]):
                    time.sleep(_BEAT_S)  # its own message, if it wrote one, takes precedence
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
    """Exit status of a process that ends with `error`, as `draco.cli` documents it."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, Interrupted):
        return error.status
    return (2 if isinstance(error, ConfigError) else 3) if isinstance(error, DracoError) else 1


def _is_consequence(error: BaseException) -> bool:
    """Whether an error may be the consequence of another rank's end."""
    names = {"SIGTERMException", "DistBackendError", "DistNetworkError"}
    if isinstance(error, Interrupted) or type(error).__name__ in names:
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(s in text for s in ("gloo", "nccl", "connection closed", "recv"))


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return not Path("/proc/self/stat").exists()  # without /proc, only heartbeats tell
    return state not in {"Z", "X"}


def host_name() -> str:
    """A name that differs between machines, and between containers and network namespaces of one machine."""
    try:
        return f"{socket.gethostname()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()
