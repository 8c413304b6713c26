"""What AppWorld episodes take on this machine: memory of many live ones, opening, and our part of `execute`.

    python scripts/bench_appworld.py                     96 episodes on the miniature tasks
    python scripts/bench_appworld.py episodes=24 data=.appworld split=train

Memory is PSS: shared pages count once over all processes, the fork server included. Wall times are those of this
machine at this moment; CPU times say more on a busy one.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

from draco.config.arguments import Command, end, option
from draco.config.options import Count
from draco.env.appworld.client import ServerOptions
from draco.env.appworld.data import Roots
from draco.env.appworld.pool import Pool, Slot

ROOT = Path(__file__).parents[1]
PYTHON = os.environ.get("DRACO_APPWORLD_PYTHON", str(ROOT / ".venv-appworld" / "bin" / "python"))
DATA = os.environ.get("DRACO_APPWORLD_DATA", str(ROOT / ".appworld-mini"))
CODE = "print(apis.supervisor.show_profile())"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured."""

    episodes: Count = option(96, "live at the same time")
    executes: Count = option(5, "calls an episode, for the first 20")
    at_once: Count = option(os.cpu_count() or 1, "openings at a time", shown="the number of cores")
    python: str = option(PYTHON, "interpreter that has AppWorld")
    data: str = option(DATA, "AppWorld's data")
    split: str = option("train", "split of the data")


COMMAND = Command(
    "python scripts/bench_appworld.py",
    "what AppWorld episodes take on this machine",
    Options,
    __doc__ or "",
    ("python scripts/bench_appworld.py", "python scripts/bench_appworld.py episodes=24 data=.appworld split=train"),
)


def pss(pid: int) -> float:
    """Proportional set size of a process, MiB."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0


def cpu(pid: int) -> float:
    """CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(roots: Roots, python: str, split: str, *, episodes: int, executes: int, at_once: int) -> None:
    tasks = [t.id for t in roots.tasks(split)]
    layers = ("limits", "landlock", "seccomp")
    pool = Pool(
        ServerOptions(python, str(roots.rollout), "rollout", require=layers), places=episodes, open_s=600, execute_s=600
    )
    started = perf_counter()
    first = await pool.open(tasks[0])  # starts the server
    print(f"server: {perf_counter() - started:.1f} s to start, {cpu(first.server.pid):.1f} s of CPU")
    await pool.close(first)
    turn = asyncio.Semaphore(at_once)

    async def open_one(task: str) -> tuple[Slot, float]:
        async with turn:
            started = perf_counter()
            slot = await pool.open(task)
            return slot, perf_counter() - started

    names = [tasks[i % len(tasks)] for i in range(episodes)]
    opened = await asyncio.gather(*(open_one(name) for name in names))
    slots = [slot for slot, _ in opened]
    pids = (await slots[0].server.request("ping"))["pids"]
    print(
        f"fork + initialise: {median(s for _, s in opened):.3f} s median, "
        f"{median(cpu(p) for p in pids.values()):.3f} s of CPU, {at_once} at a time"
    )
    ours, whole = [], []
    for slot in slots[:20]:
        for _ in range(executes):
            started = perf_counter()
            done = await pool.execute(slot, CODE)
            whole.append(perf_counter() - started)
            ours.append(whole[-1] - done.engine_s)
    print(f"execute: {1000 * median(whole):.1f} ms median, of which ours {1000 * median(ours):.1f} ms")
    for slot in slots[20:]:
        await pool.execute(slot, CODE)
    sizes = [pss(p) for p in pids.values()]
    total = sum(sizes) + pss(slots[0].server.pid)
    print(f"memory: {len(slots)} live episodes and server, {total / 1024:.2f} GiB PSS ({median(sizes):.0f} MiB each)")
    for slot in slots:
        await pool.close(slot)
    await pool.stop()


def main(arguments: list[str]) -> None:
    given = COMMAND.parse(arguments)
    asyncio.run(
        measure(
            Roots.at(given.data), given.python, given.split, episodes=given.episodes, executes=given.executes,
            at_once=given.at_once,
        )
    )  # fmt: skip


if __name__ == "__main__":
    end(main, COMMAND)
