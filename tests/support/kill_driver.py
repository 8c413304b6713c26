"""Runs jobs in forked children of one warm process and kills them at given points, for tests/runs/test_resume.py.

    echo '[{"run": FOLDER, "overrides": […], "kills": [POINT, …]}]' | python -m support.kill_driver

A point is where the child ends itself with SIGKILL (file operations are seen as audit events):

    {"file": REGEX, "event": "os.rename", "nth": 1}      before the n-th file operation on a matching path
    {"call": "MODULE:CLASS.METHOD", "nth": 1, "after": false}
    {"delay": SECONDS}                                   whatever it is doing then

A point with "maybe": true need not be reached.

After the last point the job is resumed to its end. Nothing of this is known to the code under test.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import secrets
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # on another thread the signal may take a moment


def arm(point: dict[str, Any]) -> None:
    """Make this process kill itself there."""
    left = point.get("nth", 1)
    if "delay" in point:
        threading.Timer(point["delay"], die).start()
    elif "file" in point:
        pattern, event = re.compile(point["file"]), point.get("event", "os.rename")

        def watch(name: str, args: tuple[Any, ...]) -> None:
            nonlocal left
            if name == event and pattern.search(os.fspath(args[0]) if not isinstance(args[0], int) else ""):
                left -= 1
                if left == 0:
                    die()

        sys.addaudithook(watch)
    else:
        module, path = point["call"].split(":")
        name, method = path.split(".")
        owner = getattr(importlib.import_module(module), name)
        inner = getattr(owner, method)

        @functools.wraps(inner)
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0 and not point.get("after"):
                die()
            result = inner(*args, **kwargs)
            if left == 0:
                die()
            return result

        setattr(owner, method, counted)


def job(run: Path, overrides: list[str]) -> None:
    """What `python train.py` does, without its process."""
    from hydra import compose, initialize_config_module

    from draco.run.folder import resume_config
    from draco.run.train import train

    resume = (run / "config.yaml").is_file()
    given = [f"resume={run}"] if resume else [*overrides, f"run={run}"]
    with initialize_config_module("conf", version_base="1.3"):
        config = compose("train", given)
    train(resume_config(run, config, given) if resume else config)


def fork(run: Path, overrides: list[str], point: dict[str, Any] | None, log: Path) -> int:
    """Run a child; returns its wait status as an exit code (negative: the signal)."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            print(f"--- {run.name}: {point}", flush=True)
            if point is not None:
                arm(point)
            job(run, overrides)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)


def main() -> None:
    jobs = json.load(sys.stdin)
    import logging

    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm  # noqa: F401
    import torch
    from transformers.models.llama import modeling_llama  # noqa: F401

    import draco.env.desk.judge
    import draco.study.evaluate  # noqa: F401

    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("draco").setLevel(logging.INFO)
    torch.set_num_threads(1)
    secrets.token_bytes = lambda n=32: b"k" * (n or 32)  # the delimiters of prompts, so that archives can be compared
    threads = [Path(f"/proc/self/task/{t}/comm").read_text().strip() for t in os.listdir("/proc/self/task")]
    # The allocator that pyarrow brings restarts its thread after a fork; any other would be lost.
    assert len([t for t in threads if not t.startswith("jemalloc")]) == 1, threads
    for item in jobs:
        run, started = Path(item["run"]), time.perf_counter()
        log = run.with_suffix(".log")
        for point in [*item["kills"], None]:
            expected = 0 if point is None else -signal.SIGKILL
            code = fork(run, item["overrides"], point, log)
            if code != expected and not (point and code == 0 and ("delay" in point or point.get("maybe"))):
                sys.exit(f"{run.name} ended with {code} instead of {expected} at {point}:\n{log.read_text()[-3000:]}")
            if point and point.get("torn"):  # the kill came in the middle of a line
                with open(run / "metrics.csv", "a") as file:
                    file.write("2,0.25,0.")
        print(f"{run.name}: {time.perf_counter() - started:.1f} s", flush=True)


if __name__ == "__main__":
    main()
