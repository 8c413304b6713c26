"""The fork server: one process that has AppWorld imported and warm, and one child for every episode.

    PYTHON -s -P server.py FD '{"role": "rollout", "root": ..., "outputs": ..., …}'

Runs inside AppWorld's own environment and imports nothing of draco. FD is one end of a stream socket; both sides speak
JSON lines. A request is {"id", "op", …}; its answer is {"id", "ok": {…}} or {"id", "error": {"kind", "message"}}. The
parent never runs an agent's code: it forks, relays, kills a child that passes its deadline, and reads what a child left
on disk.

Roles: `rollout` serves open, execute, state and close; `evaluate` serves evaluate. Error kinds: bad_request,
unknown_task, unknown_episode, engine, died, deadline, isolation.
"""

from __future__ import annotations

import os
import resource
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

if not __package__:  # run by its path: only the folder `inside` is made importable, and only for these imports
    sys.path.insert(0, str(Path(__file__).parents[1]))
    __package__ = "inside"

from . import sandbox
from .episode import check_apart, episode, evaluation, failure, warm
from .protocol import Channel, Failed, Real
from .state import difference, restore

if __package__ == "inside":
    sys.path.pop(0)

_FAILED = 70  # exit status of a child whose own code, not the agent's, failed


class Child:
    """A forked process as its parent sees it."""

    def __init__(self, pid: int, sock: socket.socket, name: str, task: str) -> None:
        self.pid, self.channel, self.name, self.task = pid, Channel(sock), name, task
        self.request: int | None = None  # id of the request in progress
        self.op = ""
        self.deadline: float | None = None
        self.ended = ""  # why it no longer runs


class Server:
    """The parent."""

    def __init__(self, sock: socket.socket, options: dict[str, Any]) -> None:
        self.options = options
        self.client = Channel(sock)
        self.root, self.outputs = Path(options["root"]), Path(options["outputs"])
        self.children: dict[str, Child] = {}
        self.selector = selectors.DefaultSelector()
        self.selector.register(sock, selectors.EVENT_READ, None)

    def run(self) -> None:
        """Serve until the client hangs up; then no child is left."""
        try:
            while True:
                now = Real.monotonic()
                due = [c.deadline for c in self.children.values() if c.deadline is not None]
                timeout = max(0.0, min(due) - now) if due else None
                for key, _ in self.selector.select(timeout):
                    if key.data is None:
                        messages = self.client.receive()
                        if messages is None:
                            return
                        for message in messages:
                            self._request(message)
                    else:
                        self._hear(key.data)
                self._expire()
        finally:
            try:
                for child in list(self.children.values()):
                    self._kill(child)
            finally:  # a client that was killed cannot remove it
                shutil.rmtree(self.root, ignore_errors=True)

    def _request(self, message: dict[str, Any]) -> None:
        number, op = message.get("id"), message.get("op")
        try:
            operation = _OPERATIONS[self.options["role"]].get(str(op))
            if operation is None:
                raise Failed("bad_request", f"no operation {op!r} in role {self.options['role']}")
            answer = operation(self, message)
            if answer is not None:
                self.client.send({"id": number, "ok": answer})
        except Failed as error:
            self.client.send({"id": number, **error.answer})
        except (KeyError, TypeError, ValueError) as error:
            self.client.send({"id": number, **Failed("bad_request", repr(error)).answer})

    def _give_up(self, child: Child, kind: str, message: str, number: int = 0) -> None:
        """Answer the request in progress, if any, with an error; `number` is the signal that ended the child."""
        if child.request is not None:
            error = {"kind": kind, "message": message, "signal": number}
            self.client.send({"id": child.request, "error": error})
            child.request = None

    # --- operations; None means that the child answers later ---

    def ping(self, message: dict[str, Any]) -> dict[str, Any]:
        return {"children": len(self.children), "pids": {n: c.pid for n, c in self.children.items()}}

    def open(self, message: dict[str, Any]) -> None:
        task, name = self._task(message["task"]), self._name(message["experiment"])
        if name in self.children:
            raise Failed("bad_request", f"experiment {name!r} is in use")
        shutil.rmtree(self.outputs / name, ignore_errors=True)
        self._expect(self._fork(name, task, episode, name), message)

    def execute(self, message: dict[str, Any]) -> None:
        child = self._idle(message["experiment"])
        if child.ended:
            raise Failed("died", f"the episode's process is gone: {child.ended}")
        self._expect(child, message)
        with suppress(OSError):  # a child that died meanwhile is noticed by the end of its stream
            child.channel.send({"op": "execute", "code": message["code"]})

    def state(self, message: dict[str, Any]) -> dict[str, Any]:
        child = self._idle(message["experiment"])
        folder = self.outputs / child.name / "tasks" / child.task
        found = folder / "dbs" if (folder / "dbs").is_dir() else folder / "dbs.old"
        if not found.is_dir():
            raise Failed("engine", "the episode left no state")
        return {"task": child.task, "dbs": difference(found, self.root, child.task)}

    def close(self, message: dict[str, Any]) -> dict[str, Any]:
        child = self._child(message["experiment"])
        self._give_up(child, "died", "closed while it was busy")
        self._kill(child)
        self.children.pop(child.name, None)
        shutil.rmtree(self.outputs / child.name, ignore_errors=True)
        return {"closed": child.name}

    def evaluate(self, message: dict[str, Any]) -> None:
        task, name = self._task(message["task"]), self._name(message["experiment"])
        folder = self.outputs / name / "tasks" / task
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "dbs").mkdir(parents=True)
        restore(message["dbs"], folder / "dbs", self.root, task)
        self._expect(self._fork(f"{name}/{task}", task, evaluation, name), message)

    # --- what requests name ---

    def _task(self, task: Any) -> str:
        if not isinstance(task, str) or task.count("_") != 1 or not task.replace("_", "").isalnum():
            raise Failed("unknown_task", f"{task!r} is no task id: expected SCENARIO_NUMBER")
        if not (self.root / "data" / "tasks" / task / "specs.json").is_file():
            raise Failed("unknown_task", f"task {task!r} is not in the data")
        return task

    def _name(self, name: Any) -> str:
        if not isinstance(name, str) or not name.replace("-", "").replace("_", "").isalnum() or "memory" in name:
            raise Failed("bad_request", f"{name!r} is no experiment name")
        return name

    def _child(self, name: str) -> Child:
        if name not in self.children:
            raise Failed("unknown_episode", f"no episode {name!r}: open it first; closed ones are gone")
        return self.children[name]

    def _idle(self, name: str) -> Child:
        """A child that has no request in progress."""
        child = self._child(name)
        if child.request is not None:
            raise Failed("bad_request", "the episode is busy with another request")
        return child

    # --- children ---

    def _fork(self, name: str, task: str, body: Callable[..., None], experiment: str) -> Child:
        ours, theirs = socket.socketpair()
        folder = self.outputs / experiment
        folder.mkdir(parents=True, exist_ok=True)
        pid = os.fork()
        if pid == 0:
            code = _FAILED
            try:
                ours.close()
                self._become_child()
                body(Channel(theirs), self.options, task, experiment, folder)
                code = 0
            except BaseException:  # nothing may escape into the parent's loop
                pass
            finally:
                os._exit(code)
        theirs.close()
        child = Child(pid, ours, name, task)
        self.children[name] = child
        self.selector.register(ours, selectors.EVENT_READ, child)
        return child

    def _become_child(self) -> None:
        sandbox.die_with_parent()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        self.selector.close()
        self.client.sock.close()
        for other in self.children.values():
            other.channel.sock.close()
        self.children.clear()
        void = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            os.dup2(void, fd)

    def _expect(self, child: Child, message: dict[str, Any]) -> None:
        child.request, child.op = message["id"], message["op"]
        child.deadline = Real.monotonic() + float(message["deadline_s"])

    def _hear(self, child: Child) -> None:
        if child.ended:
            return  # a request of the same round ended it
        messages = child.channel.receive()
        if messages is None:
            self._gone(child)
        for message in messages or ():
            number, child.request, child.deadline = child.request, None, None
            if number is not None:
                self.client.send({**message, "id": number})

    def _gone(self, child: Child) -> None:
        status = self._reap(child)
        if status is None:  # it closed its end or sent nonsense and still runs: only an agent's code does that
            number, how = int(signal.SIGABRT), "a broken connection"
        elif os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            how = f"signal {signal.Signals(number).name}"
        else:  # our own code ends with 70 when it fails, and with 0 when we hang up; other ways out are the agent's
            how = f"exit status {os.WEXITSTATUS(status)}"
            number = 0 if os.WEXITSTATUS(status) == _FAILED else int(signal.SIGABRT)
        self._forget(child, how)
        # A signal that we did not send and the agent's code cannot send itself is not the agent's doing.
        self._give_up(child, "died", f"the process ended with {how}", number)
        self._tidy(child)

    def _reap(self, child: Child) -> int | None:
        """Exit status of a child whose stream has ended; None if it had to be killed."""
        for _ in range(50):
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid:
                return status
            time.sleep(0.02)
        os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
        return None

    def _expire(self) -> None:
        now = Real.monotonic()
        for child in [c for c in self.children.values() if c.deadline is not None and c.deadline <= now]:
            self._kill(child, "deadline")
            self._give_up(child, "deadline", f"{child.op} passed its deadline; the process was killed")
            self._tidy(child)

    def _kill(self, child: Child, why: str = "closed") -> None:
        if not child.ended:
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
            self._forget(child, why)

    def _forget(self, child: Child, why: str) -> None:
        self.selector.unregister(child.channel.sock)
        child.channel.sock.close()
        child.ended, child.deadline = why, None

    def _tidy(self, child: Child) -> None:
        if child.op == "evaluate":
            self.children.pop(child.name, None)
            shutil.rmtree(self.outputs / child.name.split("/")[0], ignore_errors=True)


_OPERATIONS: Mapping[str, Mapping[str, Callable[[Server, dict[str, Any]], dict[str, Any] | None]]] = {
    "rollout": {
        "ping": Server.ping,
        "open": Server.open,
        "execute": Server.execute,
        "state": Server.state,
        "close": Server.close,
    },
    "evaluate": {"ping": Server.ping, "evaluate": Server.evaluate},
}


def main() -> int:
    options = Real.loads(sys.argv[2])
    sock = socket.socket(fileno=int(sys.argv[1]))
    channel = Channel(sock)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        check_apart(options)
        os.chdir(options["root"])
        warm(options)
    except BaseException as error:
        channel.send({"id": 0, **failure(error)})
        return 1
    channel.send({"id": 0, "ok": {}})
    Server(sock, options).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
