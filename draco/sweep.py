"""A Hydra callback that ends a sweep with a comparison table; one failed job does not end the sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from draco.summary import read_json

__all__ = ["Comparison"]


class Comparison(Callback):
    """Collects the jobs of a sweep."""

    def __init__(self) -> None:
        self._jobs: list[tuple[str, Path, str]] = []

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        failed = job_return.status is JobStatus.FAILED
        # The private field holds the exception; reading `return_value` would raise it.
        error = str(job_return._return_value) if failed else ""
        overrides = " ".join(job_return.overrides or [])
        self._jobs.append((overrides, Path(config.hydra.runtime.output_dir), error))

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        table = Table(title="sweep", title_justify="left")
        for name in ("job", "setting", "base TGC", "TGC", "SGC", "inert", "wall s"):
            table.add_column(name, justify="left" if name in ("job", "setting") else "right")
        for overrides, folder, error in self._jobs:
            file = folder / "summary.json"
            if error or not file.is_file():
                table.add_row(overrides, f"failed: {error.splitlines()[0] if error else 'no summary'}")
                continue
            s = read_json(file)
            cells = [s["base_success"], s["final_success"], s["final_sgc"], s["inert_share"]]
            shown = ["–" if v is None else f"{v:.1%}" for v in cells]
            table.add_row(overrides, s["setting"], *shown, f"{s['wall_s']:.0f}")
        Console().print(table)
