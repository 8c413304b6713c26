"""The four settings and the two references over several seeds, as one table.

    python scripts/ablation.py                       # 6 settings × 3 seeds of the default run
    python scripts/ablation.py seeds=0,1 jobs=2 out=runs/ablation steps=50 …

Every cell is `python train.py rubric=… credit=… seed=… run=OUT/CELL` with the same further options and no others.
Finished cells are kept, interrupted ones go on. Options of this script (key=value): seeds, jobs (cells at a time), out;
everything else is passed to train.py. OUT/options.json keeps what was passed: cells of other options are never mixed
into one table, they need another out=.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console

from draco.core.errors import ConfigError
from draco.core.files import read_json, write_json
from draco.core.table import Table
from draco.study.statistics import mean_std

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = (
    ("static", "uniform"), ("static", "step"), ("dynamic", "uniform"), ("dynamic", "step"),
    ("outcome", "uniform"), ("random", "uniform"),
)  # fmt: skip
OWN = {"seeds", "jobs", "out"}
CELLS = {"rubric", "credit", "seed", "run", "resume", "overwrite"}  #: what this script sets in every cell


def options(arguments: list[str]) -> tuple[list[int], int, Path, dict[str, str]]:
    """Seeds, jobs, out, and what goes to train.py.

    Raises:
        ConfigError: a word that is no option, a bad value, or an option that belongs to the cells.
    """
    given: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not key or (not equals and not key.startswith("~")) or key.startswith("-"):
            raise ConfigError(f"{argument!r} is no option; expected key=value (--help explains)")
        if key.lstrip("+~").split("@")[0] in CELLS:
            raise ConfigError(
                f"{argument} would override every cell, whose {', '.join(sorted(CELLS))} this script sets itself; "
                "choose seeds with seeds=0,1,2 and the folder with out=FOLDER"
            )
        given[key] = value
    words = given.get("seeds", "0,1,2").split(",")
    jobs = given.get("jobs", "2")
    if not all(w.strip().isdecimal() for w in words) or len({int(w) for w in words}) < len(words):
        raise ConfigError(f"seeds={given['seeds']}: expected different integers ≥ 0, for example seeds=0,1,2")
    if not jobs.isdecimal() or int(jobs) < 1:
        raise ConfigError(f"jobs={jobs}: expected an integer ≥ 1")
    further = {k: v for k, v in given.items() if k not in OWN}
    return [int(w) for w in words], int(jobs), Path(given.get("out", "runs/ablation")), further


def keep_options(out: Path, further: dict[str, str]) -> None:
    """Write down what the cells of a folder are made with, or compare with what was written.

    Raises:
        ConfigError: the folder holds cells of other options, or of unknown ones.
    """
    file = out / "options.json"
    shown = " ".join(_words(further)) or "(none)"
    if not file.is_file():
        if old := sorted(p.parent.name for p in out.glob("*/config.yaml")):
            raise ConfigError(
                f"{out} holds cells ({old[0]}, …) of unknown options: there is no options.json; use another out=, or "
                f"write their options into {file} as an object, {{}} for none"
            )
        out.mkdir(parents=True, exist_ok=True)
        write_json(file, further)
        return
    kept = {str(k): str(v) for k, v in read_json(file).items()}
    if kept != further:
        raise ConfigError(
            f"the cells of {out} are made with {' '.join(_words(kept)) or '(none)'}, this call asks for {shown}; one "
            "table needs the same options: repeat them, or use another out="
        )


def _words(further: dict[str, str]) -> list[str]:
    return [k if k.startswith("~") and not v else f"{k}={v}" for k, v in further.items()]


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
    """Mean ± sample standard deviation in percent; one value has no deviation."""
    found = mean_std(values)
    return found.shown(100) if found else "–"


def percent(value: float | None) -> str:
    """One value; null where nothing could be evaluated."""
    return "–" if value is None else f"{value:.1%}"


def third(values: list[float | None]) -> float | None:
    """pass^3, where the cells ran every task three times or more."""
    return values[2] if len(values) > 2 else None


COLUMNS: dict[str, Callable[[dict[str, Any]], float | None]] = {
    "TGC": lambda s: s["final_success"],
    "SGC": lambda s: s["final_sgc"],
    "TGC pass^3": lambda s: third(s["final_tgc_pass_hat"]),
    "SGC pass^3": lambda s: third(s["final_sgc_pass_hat"]),
    "inert": lambda s: s["inert_share"],
    "rubric pass": lambda s: s["rubric_pass_rate"],
}


def main(arguments: list[str]) -> int:
    """Run all cells and print the table, also as Markdown into OUT/ablation.md.

    Returns:
        Exit status: 0, 1 a cell failed, 2 the options cannot work.
    """
    if {"--help", "-h"} & set(arguments):
        print(__doc__)
        return 0
    try:
        seeds, jobs, out, passed = options(arguments)
        keep_options(out, passed)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    further = _words(passed)
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
            console.print(f"{rubric}+{credit} seed {seed}: TGC {percent(summary['final_success'])}", highlight=False)
    rows = [["base", *base_row(found)]]
    rows += [
        [f"{r}+{c}", *(spread([get(s) for s in cell]) for get in COLUMNS.values())] for (r, c), cell in found.items()
    ]
    title = f"mean ± std over {len(seeds)} seeds, percent"
    table = Table("ablation", title, ("setting", *COLUMNS), tuple(map(tuple, rows)))
    console.print(table.terminal())
    if failures:
        console.print("\n".join(failures), markup=False)
        return 1
    out.mkdir(parents=True, exist_ok=True)
    (out / "ablation.md").write_text(table.markdown(), encoding="utf-8")
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
