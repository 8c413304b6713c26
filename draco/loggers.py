"""Where metrics go. Both loggers take our own batch counter as x."""

from __future__ import annotations

import csv
import netrc
import os
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.loggers.logger import Logger

__all__ = ["MetricsCsv", "finish", "wandb_logger"]


class MetricsCsv(Logger):
    """``metrics.csv``: one row a step, a column a metric; always written, whatever other logger runs.

    A metric that first appears later gets a column, and earlier rows stay empty there. On resume the rows after the
    checkpoint are dropped.

    Args:
        run: run folder.
        resume_step: keep rows up to this step only; None starts a new file.
    """

    def __init__(self, run: str, resume_step: int | None = None) -> None:
        super().__init__()
        self.path = Path(run) / "metrics.csv"
        self._columns: list[str] = ["step"]
        self._rows: list[dict[str, Any]] = []
        if resume_step is not None and self.path.is_file():
            with open(self.path, encoding="utf-8", newline="") as file:
                reader = csv.DictReader(file)
                self._columns = list(reader.fieldnames or ["step"])
                self._rows = [row for row in reader if int(row["step"]) <= resume_step]
            self._rewrite()

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing: config.yaml holds them."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        row = {"step": step, **metrics}
        new = sorted(row.keys() - set(self._columns))
        # Metrics of one step may come in several calls (training, then validation).
        if self._rows and str(self._rows[-1]["step"]) == str(step):
            self._rows[-1] |= row
            rewrite = True
        else:
            self._rows.append(row)
            rewrite = bool(new)
        self._columns += new
        if rewrite or not self.path.is_file():
            self._rewrite()
        else:
            with open(self.path, "a", encoding="utf-8", newline="") as file:
                csv.DictWriter(file, self._columns).writerow(row)

    def _rewrite(self) -> None:
        temporary = self.path.with_suffix(".tmp")
        with open(temporary, "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(self._rows)
        temporary.rename(self.path)


def wandb_logger(
    run: str, *, project: str = "draco", group: str | None = None, mode: str = "auto", **options: Any
) -> WandbLogger:
    """A W&B logger whose files lie inside the run folder and whose run id is kept there for resumes.

    Args:
        run: run folder.
        project, group: as in W&B; a sweep is a group.
        mode: online | offline | auto: online when a key is configured (WANDB_API_KEY or netrc), offline otherwise.
    """
    folder = Path(run)
    offline = mode == "offline" or (mode == "auto" and not _has_key())
    print(f"wandb: {'offline, files under ' + str(folder / 'wandb') if offline else 'online'}")
    id_file = folder / "wandb_run_id"
    if not id_file.is_file():
        id_file.write_text(os.urandom(8).hex(), encoding="utf-8")
    return WandbLogger(
        name=folder.name,
        save_dir=str(folder),
        id=id_file.read_text(encoding="utf-8"),
        project=project,
        group=group,
        offline=offline,
        resume="allow",
        **options,
    )


def finish(loggers: Iterable[Logger]) -> None:
    """Close every logger; W&B would otherwise go on with the same run in the next job of a sweep."""
    for logger in loggers:
        logger.finalize("finished")
        if isinstance(logger, WandbLogger):
            logger.experiment.finish()


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1]
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
