"""What AppWorld episodes take on this machine: memory of many live ones, opening, and our part of `execute`.

    python scripts/bench_appworld.py                     96 episodes on the miniature tasks
    python scripts/bench_appworld.py episodes=24 data=.appworld split=train

Options (key=value): episodes (96), executes (5 an episode for the first 20), python, data, split, at_once (openings at
a time: the number of cores). Memory is PSS: shared pages count once over all processes, the fork server included. Wall
times are those of this machine at this moment; CPU times say more on a busy one.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, cast

from omegaconf import OmegaConf

from draco.env.appworld.client import ServerOptions
from draco.env.appworld.data import Roots
from draco.env.appworld.pool import Pool, Slot
from draco.errors import DracoError

ROOT = Path(__file__).parents[1]
DEFAULTS = {
    "episodes": 96, "executes": 5, "split": "train", "at_once": os.cpu_count() or 1,
    "python": os.environ.get("DRACO_APPWORLD_PYTHON", str(ROOT / ".venv-appworld" / "bin" / "python")),
    "data": os.environ.get("DRACO_APPWORLD_DATA", str(ROOT / ".appworld-mini")),
}  # fmt: skip
CODE = "print(apis.supervisor.show_profile())"


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


async def measure(given: dict[str, Any]) -> None:
    roots = Roots.at(str(given["data"]))
    tasks = [t.id for t in roots.tasks(str(given["split"]))]
    layers = ("limits", "landlock", "seccomp")
    options = ServerOptions(str(given["python"]), str(roots.rollout), "rollout", require=layers)
    pool = Pool(options, places=int(given["episodes"]), open_s=600, execute_s=600)
    started = perf_counter()
    first = await pool.open(tasks[0])  # starts the server
    print(f"server: {perf_counter() - started:.1f} s to start, {cpu(first.server.pid):.1f} s of CPU")
    await pool.close(first)
    turn = asyncio.Semaphore(int(given["at_once"]))

    async def open_one(task: str) -> tuple[Slot, float]:
        async with turn:
            started = perf_counter()
            slot = await pool.open(task)
            return slot, perf_counter() - started

    names = [tasks[i % len(tasks)] for i in range(int(given["episodes"]))]
    opened = await asyncio.gather(*(open_one(name) for name in names))
    slots = [slot for slot, _ in opened]
    pids = (await slots[0].server.request("ping"))["pids"]
    print(
        f"fork + initialise: {median(s for _, s in opened):.3f} s median, "
        f"{median(cpu(p) for p in pids.values()):.3f} s of CPU, {given['at_once']} at a time"
    )
    ours, whole = [], []
    for slot in slots[:20]:
        for _ in range(int(given["executes"])):
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


if __name__ == "__main__":
    options: dict[str, Any] = DEFAULTS | cast(
        "dict[str, Any]", OmegaConf.to_container(OmegaConf.from_dotlist(sys.argv[1:]))
    )
    try:
        if wrong := sorted(options.keys() - DEFAULTS.keys()):
            raise SystemExit(f"error: unknown option {', '.join(wrong)}; expected {', '.join(sorted(DEFAULTS))}")
        asyncio.run(measure(options))
    except DracoError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
