"""Programs of tests/support in processes of their own, and whether processes are alive."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from support import ROOT


def environment(**more: str) -> dict[str, str]:
    """Variables of a process that imports draco and tests/support, computes on one thread and downloads nothing."""
    path = f"{ROOT}:{ROOT / 'tests'}"
    # The drivers fork. One of Arrow's allocators starts a thread at import, and a fork beside a thread is unsafe.
    more = {"JE_ARROW_MALLOC_CONF": "background_thread:false", **more}
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path, **more}


def drive(
    program: str, jobs: Sequence[Mapping[str, Any]], *arguments: str, within_s: float, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run `support.PROGRAM`, which reads jobs as JSON; `more` are environment variables."""
    return subprocess.run(
        [sys.executable, "-m", f"support.{program}", *arguments],
        input=json.dumps(jobs), capture_output=True, text=True, cwd=ROOT, timeout=within_s, env=environment(**more),
    )  # fmt: skip


def alive(pid: int) -> bool:
    """Zombies are not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter between opening and reading
        return False


def gone(pids: list[int], within: float = 60.0) -> bool:
    until = time.monotonic() + within
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(map(alive, pids))


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for(found: Callable[[], list[int]]) -> list[int]:
    until = time.monotonic() + 60
    while not (pids := found()):
        assert time.monotonic() < until
        time.sleep(0.05)
    return pids
