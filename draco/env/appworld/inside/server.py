"""The fork server: one process that has AppWorld imported and warm, and one child for every episode.

    PYTHON -s -P server.py FD '{"role": "rollout", "root": ..., "outputs": ..., …}'

Runs inside AppWorld's own environment and imports nothing of draco. FD is one end of a stream socket; both sides speak
JSON lines. A request is {"id", "op", …}; its answer {"id", "ok": {…}} or {"id", "error": {"kind", "message"}}. The
parent never runs an agent's code: it forks, relays, kills a child that passes its deadline, and reads what a child left
on disk.

Roles: `rollout` serves open, execute, state and close; `evaluate` serves evaluate. Error kinds: bad_request,
unknown_task, unknown_episode, engine, died, deadline, isolation.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import selectors
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


class Real:
    """What freezegun and an agent's code replace in modules (freezegun in this one, too, but not in a class)."""

    monotonic = staticmethod(time.monotonic)
    dumps, loads, rename = staticmethod(json.dumps), staticmethod(json.loads), staticmethod(os.rename)


sys.path.insert(0, str(Path(__file__).parent))
import cage  # noqa: E402
import guard  # noqa: E402

_MAX_LINE = 64 << 20
_FAILED = 70  # exit status of a child whose own code, not the agent's, failed


class Failed(Exception):
    """An error with a kind of the protocol."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Channel:
    """JSON lines over a socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self._buffer = sock, bytearray()

    def send(self, message: dict[str, Any]) -> None:
        self.sock.sendall(Real.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """Messages that have come in whole; None at the end of the stream."""
        try:
            data = self.sock.recv(1 << 16)
        except (ConnectionError, OSError):
            return None
        if not data:
            return None
        self._buffer += data
        if len(self._buffer) > _MAX_LINE:
            return None
        *lines, rest = bytes(self._buffer).split(b"\n")
        self._buffer = bytearray(rest)
        try:
            messages = [Real.loads(line) for line in lines if line]
        except ValueError:
            return None
        return messages if all(isinstance(m, dict) for m in messages) else None


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
        self.outputs = Path(options["outputs"])
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
            finally:  # a client that was killed cannot
                shutil.rmtree(self.options["root"], ignore_errors=True)

    def _request(self, message: dict[str, Any]) -> None:
        number, op = message.get("id"), message.get("op")
        try:
            handler = getattr(self, f"_op_{op}", None)
            if handler is None or op not in _OPS[self.options["role"]]:
                raise Failed("bad_request", f"no operation {op!r} in role {self.options['role']}")
            answer = handler(message)
            if answer is not None:
                self.client.send({"id": number, "ok": answer})
        except Failed as error:
            self.client.send({"id": number, "error": {"kind": error.kind, "message": str(error)}})
        except (KeyError, TypeError, ValueError) as error:
            self.client.send({"id": number, "error": {"kind": "bad_request", "message": repr(error)}})

    # --- operations; None means that the child answers later ---

    def _op_ping(self, message: dict[str, Any]) -> dict[str, Any]:
        return {"children": len(self.children), "pids": {n: c.pid for n, c in self.children.items()}}

    def _op_open(self, message: dict[str, Any]) -> None:
        task, name = self._task(message["task"]), self._name(message["experiment"])
        if name in self.children:
            raise Failed("bad_request", f"experiment {name!r} is in use")
        shutil.rmtree(self.outputs / name, ignore_errors=True)
        child = self._fork(name, task, episode)
        self._expect(child, message, "open")

    def _op_execute(self, message: dict[str, Any]) -> None:
        child = self._child(message["experiment"])
        if child.ended:
            raise Failed("died", f"the episode's process is gone: {child.ended}")
        if child.request is not None:
            raise Failed("bad_request", "the episode is busy with another request")
        self._expect(child, message, "execute")
        with suppress(OSError):  # a child that died meanwhile is heard as the end of its stream
            child.channel.send({"op": "execute", "code": message["code"]})

    def _op_state(self, message: dict[str, Any]) -> dict[str, Any]:
        child = self._child(message["experiment"])
        if child.request is not None:
            raise Failed("bad_request", "the episode is busy with another request")
        folder = self.outputs / child.name / "tasks" / child.task
        found = folder / "dbs" if (folder / "dbs").is_dir() else folder / "dbs.old"
        if not found.is_dir():
            raise Failed("engine", "the episode left no state")
        return {"task": child.task, "dbs": difference(found, Path(self.options["root"]), child.task)}

    def _op_close(self, message: dict[str, Any]) -> dict[str, Any]:
        child = self._child(message["experiment"])
        if child.request is not None:
            error = {"kind": "died", "message": "closed while it was busy", "signal": 0}
            self.client.send({"id": child.request, "error": error})
            child.request = None
        self._kill(child)
        self.children.pop(child.name, None)
        shutil.rmtree(self.outputs / child.name, ignore_errors=True)
        return {"closed": child.name}

    def _op_evaluate(self, message: dict[str, Any]) -> None:
        task, name = self._task(message["task"]), self._name(message["experiment"])
        shutil.rmtree(self.outputs / name / "tasks" / task, ignore_errors=True)
        dbs = self.outputs / name / "tasks" / task / "dbs"
        dbs.mkdir(parents=True)
        restore(message["dbs"], dbs, Path(self.options["root"]), task)
        child = self._fork(f"{name}/{task}", task, evaluation, experiment=name)
        self._expect(child, message, "evaluate")

    # --- children ---

    def _task(self, task: Any) -> str:
        if not isinstance(task, str) or task.count("_") != 1 or not task.replace("_", "").isalnum():
            raise Failed("unknown_task", f"{task!r} is no task id: expected SCENARIO_NUMBER")
        if not (Path(self.options["root"]) / "data" / "tasks" / task / "specs.json").is_file():
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

    def _fork(self, name: str, task: str, body: Callable[..., None], experiment: str | None = None) -> Child:
        ours, theirs = socket.socketpair()
        folder = self.outputs / (experiment or name)
        folder.mkdir(parents=True, exist_ok=True)
        pid = os.fork()
        if pid == 0:
            code = _FAILED
            try:
                ours.close()
                self._become_child()
                body(Channel(theirs), self.options, task, experiment or name, folder)
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
        cage.die_with_parent()
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

    def _expect(self, child: Child, message: dict[str, Any], op: str) -> None:
        child.request, child.op = message["id"], op
        child.deadline = Real.monotonic() + float(message["deadline_s"])

    def _hear(self, child: Child) -> None:
        if child.ended:
            return  # by a request of the same round
        messages = child.channel.receive()
        if messages is None:
            self._gone(child)
        for message in messages or ():
            number, child.request, child.deadline = child.request, None, None
            if number is not None:
                self.client.send({**message, "id": number})

    def _gone(self, child: Child) -> None:
        status = self._reap(child)
        if status is None:  # it closed its end or spoke nonsense, and runs on: only an agent's code does that
            number, how = int(signal.SIGABRT), "a broken connection"
        elif os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            how = f"signal {signal.Signals(number).name}"
        else:  # our own code ends with 70 when it fails, and with 0 when we hang up; other ways out are the agent's
            how = f"exit status {os.WEXITSTATUS(status)}"
            number = 0 if os.WEXITSTATUS(status) == _FAILED else int(signal.SIGABRT)
        self._forget(child, how)
        if child.request is not None:
            # A signal that we did not send and the agent's code cannot send itself is not the agent's doing.
            error = {"kind": "died", "message": f"the process ended with {how}", "signal": number}
            self.client.send({"id": child.request, "error": error})
            child.request = None
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
            number, child.request = child.request, None
            self._kill(child, "deadline")
            error = {"kind": "deadline", "message": f"{child.op} passed its deadline; the process was killed"}
            self.client.send({"id": number, "error": error})
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


_OPS = {"rollout": ("ping", "open", "execute", "state", "close"), "evaluate": ("ping", "evaluate")}


# --- state between processes: what an episode changed ---


def _apps(root: Path) -> list[str]:
    return sorted(p.stem for p in (root / "data" / "base_dbs").glob("*.db"))


def difference(dbs: Path, root: Path, task: str) -> dict[str, Any]:
    """What the files of an episode hold beyond those of the task: {app: [lines in common, text after them]}, and the
    hashes. The engine appends to a task's own changes, so the common part is all of them."""
    changes: dict[str, Any] = {}
    for app in _apps(root):
        after = (dbs / f"{app}.jsonl").read_text()
        start = root / "data" / "tasks" / task / "dbs" / f"{app}.jsonl"
        before = start.read_text() if start.is_file() else ""
        if after == before:
            continue
        kept, lines, base = 0, after.splitlines(keepends=True), before.splitlines(keepends=True)
        while kept < min(len(lines), len(base)) and lines[kept] == base[kept]:
            kept += 1
        changes[app] = [kept, "".join(lines[kept:])]
    return {"changes": changes, "hashes": (dbs / "model_hashes.json").read_text()}


def restore(state: dict[str, Any], dbs: Path, root: Path, task: str) -> None:
    """The inverse of `difference`: write the files of an episode into the folder `dbs`."""
    apps = _apps(root)
    if set(state["changes"]) - set(apps):
        raise Failed("bad_request", f"the end state names unknown apps: {sorted(set(state['changes']) - set(apps))}")
    for app in apps:
        start = root / "data" / "tasks" / task / "dbs" / f"{app}.jsonl"
        text = start.read_text() if start.is_file() else ""
        if app in state["changes"]:
            kept, added = state["changes"][app]
            text = "".join(text.splitlines(keepends=True)[: int(kept)]) + str(added)
        (dbs / f"{app}.jsonl").write_text(text)
    untouched = root / "data" / "tasks" / task / "dbs" / "model_hashes.json"
    hashes = untouched.read_text() if state["hashes"] is None else str(state["hashes"])
    (dbs / "model_hashes.json").write_text(hashes)


# --- what runs in a child ---


def _readable(options: dict[str, Any]) -> list[str]:
    """What an episode may read: the data, and what Python and AppWorld load from. Not this file's folder: beside it lie
    the solutions of the miniature tasks."""
    return [options["data"], sys.prefix, sys.base_prefix, options["home"], "/usr/lib", "/usr/share/zoneinfo", "/lib",
            "/lib64", "/etc/localtime", "/etc/mime.types", "/dev/urandom"]  # fmt: skip


def check_apart(options: dict[str, Any]) -> None:
    """The folder that holds both data roots must lie in nothing that an episode may read, or its answers could be read.

    Raises:
        Failed: it does.
    """
    if options["role"] != "rollout":
        return
    both = Path(options["data"]).parents[1]
    for path in _readable(options)[1:]:
        if both.is_relative_to(Path(path).resolve()):
            raise Failed("isolation", f"{both} lies in {path}, which episodes read; move the data (env.data) elsewhere")


def _confine(options: dict[str, Any], folder: Path) -> None:
    limits = options["limits"]
    applied = cage.confine(read=_readable(options), write=[str(folder), "/dev/null"], **limits)
    missing = [layer for layer in options["require"] if layer not in applied]
    if missing:
        raise Failed("isolation", f"this machine cannot apply {', '.join(missing)}; applied: {', '.join(applied)}")


def episode(channel: Channel, options: dict[str, Any], task: str, experiment: str, folder: Path) -> None:
    """One episode: open the world, then run code until the parent hangs up or kills."""
    try:
        _confine(options, folder)
        world = World(options, task, experiment)
    except Failed as error:
        channel.send({"error": {"kind": error.kind, "message": str(error)}})
        return
    except BaseException as error:
        channel.send({"error": {"kind": "engine", "message": _brief(error)}})
        return
    channel.send({"ok": {}})
    while (messages := channel.receive()) is not None:
        for message in messages:
            try:
                answer = {"ok": world.execute(message["code"])}
            except BaseException as error:
                answer = {"error": {"kind": "engine", "message": _brief(error)}}
            channel.send(answer)


def evaluation(channel: Channel, options: dict[str, Any], task: str, experiment: str, folder: Path) -> None:
    """Score one end state by AppWorld's own evaluator."""
    try:
        _confine(options, folder)
        from appworld.evaluator import evaluate_task

        tracker = evaluate_task(task_id=task, experiment_name=experiment, save_report=False)
        answer = {"ok": tracker.to_dict()}
    except Failed as error:
        answer = {"error": {"kind": error.kind, "message": str(error)}}
    except BaseException as error:
        answer = {"error": {"kind": "engine", "message": _brief(error)}}
    channel.send(answer)


def _brief(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" at {Path(last[0].filename).name}:{last[0].lineno}" if last else ""
    return f"{type(error).__name__}: {str(error)[:500]}{where}"


class World:
    """AppWorld's world, its inputs guarded and its module state put back after every block."""

    #: an agent's code may change these for the rest of its block, no longer: the engine lives on them
    PROTECTED = ("builtins", "json", "json.encoder", "json.decoder", "os", "os.path", "re", "copy", "random",
                 "datetime",
                 "calendar", "itertools", "functools", "collections", "math", "operator", "time", "string", "uuid",
                 "pendulum", "sqlite3", "shutil")  # fmt: skip

    def __init__(self, options: dict[str, Any], task: str, experiment: str) -> None:
        from appworld.environment import AppWorld

        guarded = options["guard"]
        self._guarded, self._max = guarded, options["max_output"]
        self.world = AppWorld(
            task_id=task, experiment_name=experiment, load_ground_truth=False, timeout_seconds=options["soft_s"],
            max_interactions=1_000_000, raise_on_unsafe_syntax=guarded, null_patch_unsafe_execution=guarded,
            gc_threshold=None,
        )  # fmt: skip
        self.world.shell.automagic = False  # else `ls -l` is a command: the syntax tree shows a subtraction
        for name in ("ApiCollection", "Requester", "requester", "get_ipython", "exit", "quit", "open"):
            self.world.shell.user_ns.pop(name, None)
        self._save, self.world._save_state = self.world._save_state, self._save_whole
        self._run, self.world._shell_run_cell = self.world._shell_run_cell, self._run_cell
        self._modules = [sys.modules[n] for n in self.PROTECTED if n in sys.modules]
        self._folder = Path(self.world.output_db_home_path_on_disk)

    def execute(self, code: str) -> dict[str, Any]:
        """Run one block; its printed output and how the task stands."""
        started, mistake = Real.monotonic(), ""
        if self._guarded and (reason := guard.refusal(code)):
            return {"output": f"Execution refused: {reason}.", "mistake": "unsafe", "engine_s": 0.0, **self._status()}
        guarded_s = Real.monotonic() - started
        try:
            output = self.world.execute(code)
        except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError) as error:
            # What AppWorld does not catch: its own bookkeeping after a block is made up for.
            output, mistake = f"Execution failed. Traceback:\n{type(error).__name__}: {error}", "interrupt"
            self.world.safety_guard.disable()
            self.world.num_interactions += 1
            self.world._save_state(str(self._folder))
        engine_s = Real.monotonic() - started - guarded_s
        if len(output) > self._max:
            output = output[: self._max].rsplit("\n", 1)[0]
            mistake = mistake or "long_output"
        return {"output": output, "mistake": mistake, "engine_s": engine_s, **self._status()}

    def _status(self) -> dict[str, bool]:
        status = self.world.models.supervisor.Task.all()[0].status
        return {"completed": status is not None, "failed": status == "fail"}

    def _run_cell(self, code: str) -> Any:
        before = [dict(vars(module)) for module in self._modules]
        try:
            return self._run(code)
        finally:
            for module, names in zip(self._modules, before, strict=True):
                now = vars(module)
                if now.keys() != names.keys() or any(now[k] is not v for k, v in names.items()):
                    now.clear()
                    now.update(names)

    def _save_whole(self, directory: str) -> None:
        """Save beside the last state and swap, so that a kill in the middle leaves one of the two whole."""
        if Path(directory) != self._folder:
            self._save(directory)
            return
        new, old = self._folder.with_suffix(".new"), self._folder.with_suffix(".old")
        self._save(str(new))
        shutil.rmtree(old, ignore_errors=True)
        if self._folder.is_dir():
            Real.rename(self._folder, old)
        Real.rename(new, self._folder)


def warm(options: dict[str, Any]) -> list[str]:
    """Import everything that an episode uses and open one world, so that a child finds it done; no thread is left."""
    import threading

    import appworld.evaluator
    from appworld.apps.model_lib import get_cached_db_engine, get_direct_cached_sqlite3_connection
    from appworld.environment import AppWorld

    tasks = sorted(p.name for p in (Path(options["root"]) / "data" / "tasks").iterdir())
    if tasks and options["role"] == "rollout":
        world = AppWorld(task_id=tasks[0], experiment_name="warm", load_ground_truth=False)
        world.execute("print(apis.supervisor.show_profile())\nprint(1 / 0)")
    elif tasks:
        world = AppWorld(task_id=tasks[0], experiment_name="warm", load_ground_truth=True)
        appworld.evaluator.evaluate_task(tasks[0], "warm", save_report=False)
    AppWorld.close_all()
    for name in os.environ.keys() - set(options["environment"]):
        del os.environ[name]  # AppWorld reads a .env file if it finds one, keys and all
    # Connections must not cross a fork.
    for cached in (get_cached_db_engine, get_direct_cached_sqlite3_connection):
        cached.cache_clear()
    shutil.rmtree(Path(options["outputs"]) / "warm", ignore_errors=True)
    gc.collect()
    gc.freeze()
    running = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    if running:
        raise Failed("engine", f"threads are left after warming up: {running}")
    return tasks


def main() -> int:
    options = Real.loads(sys.argv[2])
    sock = socket.socket(fileno=int(sys.argv[1]))
    channel = Channel(sock)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    started = Real.monotonic()
    try:
        check_apart(options)
        os.chdir(options["root"])
        tasks = warm(options)
    except Failed as error:
        channel.send({"id": 0, "error": {"kind": error.kind, "message": str(error)}})
        return 1
    except BaseException as error:
        channel.send({"id": 0, "error": {"kind": "engine", "message": _brief(error)}})
        return 1
    channel.send({"id": 0, "ok": {"tasks": len(tasks), "warm_s": Real.monotonic() - started, "pid": os.getpid()}})
    Server(sock, options).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
