"""What runs in a child of the fork server: one episode or one evaluation, inside the sandbox."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import code_check, sandbox
from .protocol import Channel, Failed, Real

__all__ = ["check_apart", "episode", "evaluation", "failure", "warm"]


def _readable(options: dict[str, Any]) -> list[str]:
    """What an episode may read: the data, and what Python and AppWorld load from. Not this file's folder."""
    return [options["data"], sys.prefix, sys.base_prefix, options["home"], "/usr/lib", "/usr/share/zoneinfo", "/lib",
            "/lib64", "/etc/localtime", "/etc/mime.types", "/dev/urandom"]  # fmt: skip


def check_apart(options: dict[str, Any]) -> None:
    """The folder that holds both data roots must not lie in a folder that an episode may read: it holds the answers.

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
    applied = sandbox.confine(read=_readable(options), write=[str(folder), "/dev/null"], **options["limits"])
    missing = [layer for layer in options["require"] if layer not in applied]
    if missing:
        raise Failed("isolation", f"this machine cannot apply {', '.join(missing)}; applied: {', '.join(applied)}")


def failure(error: BaseException) -> dict[str, Any]:
    """The message that reports an exception: one of ours as it is, any other as a fault of the engine."""
    if isinstance(error, Failed):
        return error.answer
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" at {Path(last[0].filename).name}:{last[0].lineno}" if last else ""
    return Failed("engine", f"{type(error).__name__}: {str(error)[:500]}{where}").answer


def _answered(work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    try:
        return {"ok": work(*arguments)}
    except BaseException as error:
        return failure(error)


def episode(channel: Channel, options: dict[str, Any], task: str, experiment: str, folder: Path) -> None:
    """One episode: open the world, then run code until the parent hangs up or kills."""
    try:
        _confine(options, folder)
        world = World(options, task, experiment)
    except BaseException as error:
        channel.send(failure(error))
        return
    channel.send({"ok": {}})
    while (messages := channel.receive()) is not None:
        for message in messages:
            channel.send(_answered(world.execute, message["code"]))


def evaluation(channel: Channel, options: dict[str, Any], task: str, experiment: str, folder: Path) -> None:
    """Score one end state by AppWorld's own evaluator."""

    def score() -> dict[str, Any]:
        _confine(options, folder)
        from appworld.evaluator import evaluate_task

        found: dict[str, Any] = evaluate_task(task_id=task, experiment_name=experiment, save_report=False).to_dict()
        return found

    channel.send(_answered(score))


class World:
    """AppWorld's world. Code is checked before it runs, and module state is put back after every block."""

    #: an agent's code may change these until its block ends, no longer: the engine uses them too
    PROTECTED = ("builtins", "json", "json.encoder", "json.decoder", "os", "os.path", "re", "copy", "random",
                 "datetime",
                 "calendar", "itertools", "functools", "collections", "math", "operator", "time", "string", "uuid",
                 "pendulum", "sqlite3", "shutil")  # fmt: skip

    def __init__(self, options: dict[str, Any], task: str, experiment: str) -> None:
        from appworld.environment import AppWorld

        self._checks, self._max = options["check_code"], options["max_output"]
        self.world = AppWorld(
            task_id=task, experiment_name=experiment, load_ground_truth=False, timeout_seconds=options["soft_s"],
            max_interactions=1_000_000, raise_on_unsafe_syntax=self._checks, null_patch_unsafe_execution=self._checks,
            gc_threshold=None,
        )  # fmt: skip
        self.world.shell.automagic = False  # else `ls -l` is a command: the syntax tree shows a subtraction
        for name in ("ApiCollection", "Requester", "requester", "get_ipython", "exit", "quit", "open"):
            self.world.shell.user_ns.pop(name, None)
        self._save, self.world._save_state = self.world._save_state, self._save_atomically
        self._run, self.world._shell_run_cell = self.world._shell_run_cell, self._run_cell
        self._modules = [sys.modules[n] for n in self.PROTECTED if n in sys.modules]
        self._folder = Path(self.world.output_db_home_path_on_disk)

    def execute(self, code: str) -> dict[str, Any]:
        """Run one block; its printed output and how the task stands."""
        mistake = ""
        if self._checks and (reason := code_check.refusal(code)):
            return {"output": f"Execution refused: {reason}.", "mistake": "unsafe", "engine_s": 0.0, **self._status()}
        started = Real.monotonic()
        try:
            output = self.world.execute(code)
        except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError) as error:
            # AppWorld does not catch these, so what it does after a block is done here.
            output, mistake = f"Execution failed. Traceback:\n{type(error).__name__}: {error}", "interrupt"
            self.world.safety_guard.disable()
            self.world.num_interactions += 1
            self.world._save_state(str(self._folder))
        engine_s = Real.monotonic() - started
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

    def _save_atomically(self, directory: str) -> None:
        """Save beside the last state and swap: a kill in the middle leaves one complete state."""
        if Path(directory) != self._folder:
            self._save(directory)
            return
        new, old = self._folder.with_suffix(".new"), self._folder.with_suffix(".old")
        self._save(str(new))
        shutil.rmtree(old, ignore_errors=True)
        if self._folder.is_dir():
            Real.rename(self._folder, old)
        Real.rename(new, self._folder)


def warm(options: dict[str, Any]) -> None:
    """Import everything that an episode uses and open one world, so that children find it done.

    Raises:
        Failed: a thread is left, which would not survive a fork.
    """
    import appworld.evaluator
    from appworld.apps.model_lib import get_cached_db_engine, get_direct_cached_sqlite3_connection
    from appworld.environment import AppWorld

    tasks = sorted(p.name for p in (Path(options["root"]) / "data" / "tasks").iterdir())
    if tasks:
        evaluates = options["role"] == "evaluate"
        world = AppWorld(task_id=tasks[0], experiment_name="warm", load_ground_truth=evaluates)
        if evaluates:
            appworld.evaluator.evaluate_task(tasks[0], "warm", save_report=False)
        else:
            world.execute("print(apis.supervisor.show_profile())\nprint(1 / 0)")
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
