"""Evaluate a run's policy on a split: pass^1..n, pass@1..n, TGC, SGC, turns, terminations.

    python scripts/evaluate.py run=runs/NAME split=test_normal n=3

Options (key=value):
    run          run folder
    split        split of the run's environment (several: a,b); default: the one the run was evaluated on
    n            independent runs a task (default 1)
    tasks        the first so many tasks; default all
    checkpoint   last (default), base (adapter off: the untrained policy), or a step number
    temperature  sampling temperature (default: the run's eval.temperature)
    seed         of sampling (default: the run's)
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from draco.errors import ConfigError, DracoError

OPTIONS = {"run", "split", "n", "tasks", "checkpoint", "temperature", "seed"}


def options(arguments: list[str]) -> dict[str, Any]:
    """Parse key=value arguments.

    Raises:
        ConfigError: an unknown option, or no run.
    """
    given = OmegaConf.to_container(OmegaConf.from_dotlist(arguments))
    assert isinstance(given, dict)
    if wrong := sorted(str(k) for k in given.keys() - OPTIONS):
        raise ConfigError(f"unknown option {', '.join(wrong)}; expected {', '.join(sorted(OPTIONS))}")
    if "run" not in given:
        raise ConfigError("run=FOLDER is missing: the run to evaluate")
    return {str(k): v for k, v in given.items()}


def run_config(run: Path) -> DictConfig:
    """config.yaml of a run."""
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"run={run}: no run there (config.yaml not found)")
    config = OmegaConf.load(run / "config.yaml")
    assert isinstance(config, DictConfig)
    return config


def main(arguments: list[str]) -> None:
    """Evaluate, print a table, write `evaluations/SPLIT-CHECKPOINT-nN.json` into the run folder."""
    if "env=tau_banking" in arguments:
        import evaluate_tau  # its options: scripts/evaluate_tau.py

        evaluate_tau.main(arguments)
        return
    given = options(arguments)
    run = Path(str(given["run"]))
    config = run_config(run)
    from draco.evaluation.evaluate import evaluate_checkpoint  # torch loads here
    from draco.summary import write_json

    splits = str(given.get("split", config.eval.split)).split(",")
    which, n = str(given.get("checkpoint", "last")), int(given.get("n", 1))
    for key in ("temperature",):
        if key in given:
            config.eval[key] = given[key]
    config.seed = given.get("seed", config.seed)
    for split in splits:
        config.eval.split, config.eval.n, config.eval.tasks = split, n, given.get("tasks")
        result = evaluate_checkpoint(config, run, which)
        folder = run / "evaluations"
        folder.mkdir(exist_ok=True)
        file = folder / f"{split}-{result['checkpoint']}-n{n}.json"
        write_json(file, result)
        show(result, Console())
        print(f"records: {file}")


def show(result: dict[str, Any], console: Console) -> None:
    """One table a split."""
    table = Table(title=f"{result['split']}, {result['tasks']} tasks × {result['n']} runs, {result['checkpoint']}")
    for name in (
        "",
        *(f"pass^{k}" for k in range(1, result["n"] + 1)),
        *(f"pass@{k}" for k in range(1, result["n"] + 1)),
    ):
        table.add_column(name, justify="right")
    for name in ("tgc", "sgc"):
        values = [*result[f"{name}_pass_hat"], *result[f"{name}_pass_at"]]
        table.add_row(name.upper(), *("–" if v is None else f"{v:.1%}" for v in values))
    console.print(table)
    levels = "  ".join(f"level {k}: {'–' if v is None else f'{v:.1%}'}" for k, v in result["tgc_by_difficulty"].items())
    ends = "  ".join(f"{k} {v:.1%}" for k, v in result["terminations"].items())
    console.print(f"TGC by difficulty  {levels}", highlight=False)
    console.print(f"turns {result['turns']:.1f}   ended: {ends}", highlight=False)
    if result["unevaluated"] or result["quarantined"]:
        console.print(f"unevaluated {result['unevaluated']}   quarantined {result['quarantined']} (count as failed)")


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        main(sys.argv[1:])
    except DracoError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
