"""Does judging hide behind rollouts? python scripts/bench_overlap.py [--quick]

A rubric stage judges groups that arrive on a fixed schedule, against a loopback judge whose every call takes the same
time. The step's wall time stands beside

    bound       what a small simulator says from the same schedule, the dependencies of the calls (propose_task →
                propose_rollout × G → merge → score × G → attribute × G) and the concurrency limit: no software cost
    one phase after another       the same calls, measured: all rollouts first, then each kind of call for all groups

Full: 16 × 6 rollouts over 30 s, judges of 2 s and 6 s a call, 64 calls at once. Quick: 8 × 3 rollouts over 6 s, judges
of 1 s and 2 s, 12 calls at once. The target is wall ≤ 1.1 × bound. Prints a table and, as the last line, one JSON
object; `wall_over_bound` is the worse of the two judges, `speedup` the smaller gain over phase after phase.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from callbacks.rubric.dynamic import DynamicRubric
from draco.core.types import Group, Message, Step, Task, Termination, Trajectory
from draco.judge.client import JudgeClient
from draco.judge.records import CallRecord

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured."""

    groups: int
    size: int  #: G rollouts a group
    over_s: float  #: the last rollout ends then
    concurrency: int
    call_s: float

    def arrivals(self) -> list[float]:
        """When each group's last rollout ends: evenly spread, the last at the end."""
        return [self.over_s * (i + 1) / self.groups for i in range(self.groups)]

    def waves(self) -> list[int]:
        """Calls of a group that may run at once, wave after wave."""
        return [1, self.size, 1, self.size, self.size]


def simulate(setting: Setting) -> float:
    """Seconds from the start of the step to the last reply, with calls served in the order in which they are ready."""
    waves = setting.waves()
    ready = [(at, group, 0) for group, at in enumerate(setting.arrivals())]  #: (time, group, wave)
    heapq.heapify(ready)
    slots = [0.0] * setting.concurrency  #: when each is free
    heapq.heapify(slots)
    end = 0.0
    while ready:
        at, group, wave = heapq.heappop(ready)
        done = 0.0
        for _ in range(waves[wave]):
            start = max(at, heapq.heappop(slots))
            heapq.heappush(slots, start + setting.call_s)
            done = max(done, start + setting.call_s)
        end = max(end, done)
        if wave + 1 < len(waves):
            heapq.heappush(ready, (done, group, wave + 1))
    return end


def made_up(setting: Setting) -> list[Group]:
    """Groups whose transcripts are a few thousand characters."""
    groups = []
    for index in range(setting.groups):
        task = Task(f"t{index}", f"do thing {index}", "train", "s")
        opening = (Message("system", "be good"), Message("user", task.instruction))
        members = tuple(
            Trajectory(
                task, sample, opening, (), (), (),
                tuple(Step(j, (0, 0), f"act {j} of sample {sample}", "seen " * 40, j) for j in range(1, 11)),
                Termination.SUBMITTED, 0, 0, 0,
            )
            for sample in range(setting.size)
        )  # fmt: skip
        groups.append(Group(task, members, index))
    return groups


def client(port: int, setting: Setting) -> JudgeClient:
    """Warm: litellm is imported and has made its first call."""
    return JudgeClient(
        "openai/loopback",
        api_base=f"http://127.0.0.1:{port}/v1",
        api_key="none",
        concurrency=setting.concurrency,
        response_schema="off",
        timeout_s=120.0,
    )


def measure(port: int, setting: Setting) -> tuple[float, list[CallRecord]]:
    """Wall seconds of a step as the trainer makes it, and its calls."""
    stage = DynamicRubric(client(port, setting), order="arrival")
    stage.check()

    def rollouts() -> Iterator[Group]:
        for group, at in zip(made_up(setting), setting.arrivals(), strict=True):
            time.sleep(max(started + at - time.perf_counter(), 0.0))
            yield group

    started = time.perf_counter()
    judged = list(stage.judge(rollouts()))
    wall = time.perf_counter() - started
    records = stage.take().calls
    stage.close()
    assert all(not j.failures for j in judged)
    return wall, records


def phase_after_phase(port: int, setting: Setting, records: list[CallRecord]) -> float:
    """Wall seconds of the same calls when every kind waits for the one before, and the first for all rollouts."""
    litellm: Any = import_module("litellm")
    slots = asyncio.Semaphore(setting.concurrency)

    async def one(record: CallRecord) -> None:
        async with slots:
            await litellm.acompletion(
                model="openai/loopback",
                messages=[{"role": role, "content": content} for role, content in record.messages],
                api_base=f"http://127.0.0.1:{port}/v1",
                api_key="none",
                max_retries=0,
                timeout=120.0,
            )

    async def run() -> float:
        started = time.perf_counter()
        await asyncio.sleep(setting.over_s)
        for phase in ("propose_task", "propose_rollout", "merge", "score", "attribute"):
            await asyncio.gather(*(one(r) for r in records if r.phase == phase))
        wall = time.perf_counter() - started
        await litellm.close_litellm_async_clients()
        return wall

    return asyncio.run(run())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="a small schedule, well under a minute")
    quick = parser.parse_args().quick
    settings = [
        Setting(8, 3, 6.0, 12, call_s) if quick else Setting(16, 6, 30.0, 64, call_s)
        for call_s in ((1.0, 2.0) if quick else (2.0, 6.0))
    ]
    table = Table(title="one step, seconds")
    for column in ("judge", "calls", "rollouts", "bound", "wall", "wall / bound", "phase after phase", "speedup"):
        table.add_column(column, justify="right")
    rows: list[dict[str, Any]] = []
    for setting in settings:
        command = [sys.executable, str(ROOT / "tests" / "support" / "loopback_judge.py"), f"latency={setting.call_s}"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            wall, records = measure(port, setting)
            apart = phase_after_phase(port, setting, records)
            server.terminate()
        bound = simulate(setting)
        row = {
            "call_s": setting.call_s, "calls": len(records), "bound_s": round(bound, 3), "wall_s": round(wall, 3),
            "phase_after_phase_s": round(apart, 3),
            "wall_over_bound": round(wall / bound, 4), "speedup": round(apart / wall, 4),
        }  # fmt: skip
        rows.append(row)
        table.add_row(
            f"{setting.call_s:g} s", str(len(records)), f"{setting.over_s:g}", f"{bound:.2f}", f"{wall:.2f}",
            f"{wall / bound:.3f}", f"{apart:.2f}", f"{apart / wall:.2f}",
        )  # fmt: skip
    Console(stderr=True).print(table)
    result = {
        "wall_over_bound": max(r["wall_over_bound"] for r in rows),
        "speedup": min(r["speedup"] for r in rows),
        "quick": quick,
        "settings": rows,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
