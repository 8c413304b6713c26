"""A Hydra callback that prints a comparison table at the end of a sweep.

A failed job does not end the sweep: the table shows its error, and the exit status of the sweep is 1.
Hydra imports this module at the start of every job, so nothing slow may be imported here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

__all__ = ["Comparison"]


class Comparison(Callback):
    """Collects the jobs of a sweep."""

    def __init__(self) -> None:
        self._jobs: list[tuple[str, Path, str]] = []

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        error = job_return.return_value.get("error", "")
        overrides = " ".join(job_return.overrides or [])
        self._jobs.append((overrides, Path(config.hydra.runtime.output_dir), error))

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        table = Table(title="sweep", title_justify="left")
        for name in ("job", "setting", "base TGC", "TGC", "SGC", "inert", "wall s"):
            table.add_column(name, justify="left" if name in ("job", "setting") else "right")
        for overrides, folder, error in self._jobs:
            if error:
                table.add_row(overrides, f"failed: {error.splitlines()[0]}")
                continue
            s = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
            cells = [s["base_success"], s["final_success"], s["final_sgc"], s["inert_share"]]
            shown = ["–" if v is None else f"{v:.1%}" for v in cells]
            table.add_row(overrides, s["setting"], *shown, f"{s['wall_s']:.0f}")
        Console().print(table)
        if any(error for _, _, error in self._jobs):
            sys.exit(1)
