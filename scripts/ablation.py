"""The four settings and the two references over several seeds, as one table.

    python scripts/ablation.py                       # 6 settings × 3 seeds of the default run
    python scripts/ablation.py seeds=0,1 jobs=2 out=runs/ablation steps=50 …

Every cell is `python train.py rubric=… credit=… seed=… run=OUT/CELL` with the same further options and no others.
Finished cells are kept, interrupted ones go on. Options of this script (key=value): seeds, jobs (cells at a time), out;
everything else is passed to train.py.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from draco.summary import read_json, write_json

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = (
    ("static", "uniform"), ("static", "step"), ("dynamic", "uniform"), ("dynamic", "step"),
    ("outcome", "uniform"), ("random", "uniform"),
)  # fmt: skip


def run_cell(rubric: str, credit: str, seed: int, out: Path, jobs: int, further: list[str]) -> dict[str, Any]:
    """Train one cell unless it is finished; return its summary.

    Raises:
        RuntimeError: training failed; the message ends with its last lines.
    """
    run = out / f"{rubric}-{credit}-s{seed}"
    if (run / "summary.json").is_file():
        return read_json(run / "summary.json")
    command = [sys.executable, str(ROOT / "train.py")]
    if any((run / "checkpoints").glob("step=*[0-9]")):
        command += [f"resume={run}"]
    else:
        command += [f"rubric={rubric}", f"credit={credit}", f"seed={seed}", f"run={run}", "eval.n=3", *further]
        command += ["overwrite=true"] if (run / "config.yaml").is_file() else []
    threads = max(1, (os.cpu_count() or 1) // jobs)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"{run.name} failed:\n" + "\n".join((done.stdout + done.stderr).splitlines()[-15:]))
    return read_json(run / "summary.json")


def spread(values: list[float | None]) -> str:
    """Mean ± sample standard deviation in percent."""
    present = [100 * v for v in values if v is not None]
    if not present:
        return "–"
    deviation = statistics.stdev(present) if len(present) > 1 else 0.0
    return f"{statistics.mean(present):.1f} ± {deviation:.1f}"


COLUMNS: dict[str, Callable[[dict[str, Any]], float | None]] = {
    "TGC": lambda s: s["final_success"],
    "SGC": lambda s: s["final_sgc"],
    "TGC pass^3": lambda s: s["final_tgc_pass_hat"][-1],
    "SGC pass^3": lambda s: s["final_sgc_pass_hat"][-1],
    "inert": lambda s: s["inert_share"],
    "rubric pass": lambda s: s["rubric_pass_rate"],
}


def main(arguments: list[str]) -> int:
    """Run all cells and print the table, also as Markdown into OUT/ablation.md."""
    given = dict(a.split("=", 1) for a in arguments if a.split("=", 1)[0] in {"seeds", "jobs", "out"})
    further = [a for a in arguments if a.split("=", 1)[0] not in {"seeds", "jobs", "out"}]
    seeds = [int(s) for s in given.get("seeds", "0,1,2").split(",")]
    jobs, out = int(given.get("jobs", 2)), Path(given.get("out", "runs/ablation"))
    console = Console()
    cells = [(r, c, s) for s in seeds for r, c in SETTINGS]
    console.print(f"{len(cells)} cells under {out}, {jobs} at a time; finished ones are kept")
    found: dict[tuple[str, str], list[dict[str, Any]]] = {setting: [] for setting in SETTINGS}
    failures = []
    with ThreadPoolExecutor(jobs) as pool:
        futures = {cell: pool.submit(run_cell, *cell, out, jobs, further) for cell in cells}
        for (rubric, credit, seed), future in futures.items():
            try:
                summary = future.result()
            except RuntimeError as error:
                failures.append(str(error))
                console.print(f"[red]{rubric}+{credit} seed {seed} failed")
                continue
            found[rubric, credit].append(summary)
            console.print(f"{rubric}+{credit} seed {seed}: TGC {summary['final_success']:.1%}", highlight=False)
    rows = [["base", *base_row(found)]]
    rows += [
        [f"{r}+{c}", *(spread([get(s) for s in cell]) for get in COLUMNS.values())] for (r, c), cell in found.items()
    ]
    lines = ["| setting | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    table = Table(title=f"mean ± std over {len(seeds)} seeds, percent", title_justify="left")
    for name in ("setting", *COLUMNS):
        table.add_column(name, justify="left" if name == "setting" else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if failures:
        console.print("\n".join(failures), markup=False)
        return 1
    out.mkdir(parents=True, exist_ok=True)
    (out / "ablation.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    write_json(out / "ablation.json", {f"{r}+{c}": cell for (r, c), cell in found.items()})
    console.print(f"table: {out / 'ablation.md'}")
    return 0


def base_row(found: dict[tuple[str, str], list[dict[str, Any]]]) -> list[str]:
    """The untrained policy, from every cell's evaluation before training."""
    summaries = [s for cell in found.values() for s in cell]
    shown = [spread([s["base_success"] for s in summaries]), spread([s["base_sgc"] for s in summaries])]
    return [*shown, *["–"] * (len(COLUMNS) - 2)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
