"""Metrics in metrics.csv and in Weights & Biases. Steps are our own batch counter, not Lightning's."""

from __future__ import annotations

import csv
import io
import json
import logging
import netrc
import os
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.loggers.logger import Logger
from omegaconf import OmegaConf

from draco.config.options import check_option
from draco.core import files

__all__ = ["MetricsCsv", "WandbMetrics", "finish", "read_metrics", "wandb_logger", "write_metrics"]

log = logging.getLogger("draco")


def read_metrics(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Columns and rows of a metrics file, without an incomplete last line."""
    if not path.is_file():
        return ["step"], []
    complete = path.read_bytes().rpartition(b"\n")[0].decode("utf-8")
    reader = csv.DictReader(io.StringIO(complete, newline=""))
    rows = [dict(row) for row in reader if None not in row and (row["step"] or "").isdigit()]
    return list(reader.fieldnames or ["step"]), [{k: v or "" for k, v in row.items()} for row in rows]


def write_metrics(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a metrics file atomically."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    files.write_text(path, text.getvalue())


class MetricsCsv(Logger):
    """``metrics.csv``: a row for each step, a column for each metric; always written, beside any other logger.

    A metric that first appears in a later step gets a new column, which is empty in earlier rows. A row is flushed to
    disk before the checkpoint of its step is written. An existing file is continued.

    Args:
        run: run folder.
    """

    def __init__(self, run: str) -> None:
        super().__init__()
        self.path = Path(run) / "metrics.csv"
        self._columns, rows = read_metrics(self.path)
        self.rows: list[dict[str, Any]] = list(rows)
        if self.path.is_file():
            write_metrics(self.path, self._columns, self.rows)  # without an incomplete last line

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Does nothing: config.yaml has them."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        row = {"step": step, **metrics}
        new = sorted(row.keys() - set(self._columns))
        # One step may be logged in several calls (training, then validation).
        if self.rows and str(self.rows[-1]["step"]) == str(step):
            self.rows[-1] |= row
            rewrite = True
        else:
            self.rows.append(row)
            rewrite = bool(new)
        self._columns += new
        if rewrite or not self.path.is_file():
            write_metrics(self.path, self._columns, self.rows)
            return
        with open(self.path, "a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, self._columns).writerow(row)
            file.flush()
            os.fsync(file.fileno())


class WandbMetrics(Logger):
    """Weights & Biases, with our batch counter as its step.

    W&B accepts each step once and in order. So the metrics of a step are collected and sent as one row when the next
    step begins. The number of the last step sent is stored in the run folder: after a resume, steps that were sent
    before are not sent again, and steps that are missing are sent from ``metrics.csv``.

    Every `tables_every` steps two tables are sent with the row: sampled rollouts and criteria, of this step and of all
    earlier such steps (W&B shows only the latest table). At the end the summary is sent, and report.html as an
    artifact.

    Args:
        run: run folder.
        options: of `wandb.init`.
        tables_every: steps between tables; 0 = none.
        table_rollouts: rollouts of a step in the table.
    """

    def __init__(self, run: Path, options: Mapping[str, Any], tables_every: int = 0, table_rollouts: int = 4) -> None:
        super().__init__()
        self._run = run
        self._tables_every, self._table_rollouts = tables_every, table_rollouts
        self._samples: dict[int, dict[str, list[list[Any]]]] = {}
        self._mark = run / "wandb_step"
        self._options = dict(options)
        self._sent = int(self._mark.read_text(encoding="utf-8")) if self._mark.is_file() else -1
        self._row: dict[str, float] = {}
        self._step = -1
        self._experiment: Any = None

    @property
    def name(self) -> str:
        return "wandb"

    @property
    def version(self) -> str:
        return str(self._options["id"])

    @property
    def experiment(self) -> Any:
        """The W&B run."""
        if self._experiment is None:
            import wandb

            config = self._run / "config.yaml"  # redacted already
            if config.is_file():
                self._options.setdefault("config", OmegaConf.to_container(OmegaConf.load(config)))
            self._experiment = wandb.init(**self._options)
        return self._experiment

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Does nothing: config.yaml has them."""

    def start(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Open the run and send the rows up to the checkpoint that it does not have yet."""
        _ = self.experiment
        last = 0
        for row in rows:
            last = int(row["step"])
            self.log_metrics({k: float(v) for k, v in row.items() if k != "step" and v != ""}, last)
        if self._sent > last:
            log.info("wandb already has steps %d to %d; they are not sent again", last + 1, self._sent)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        step = self._step if step is None else step
        if step <= self._sent or step < self._step:
            return
        if step > self._step:
            self.flush()
        self._step = step
        self._row |= metrics

    def flush(self) -> None:
        """Send the collected row."""
        if self._row:
            self.experiment.log(self._row | self._tables(), step=self._step, commit=True)
            self._sent, self._row = self._step, {}
            files.write_text(self._mark, str(self._sent))

    def _tables(self) -> dict[str, Any]:
        """The tables that are sent with the row of this step, whose archive is written by now."""
        if not self._tables_every or self._step < 1 or self._step % self._tables_every:
            return {}
        import wandb

        from draco.run.samples import COLUMNS, sample_rows

        for step in range(self._tables_every, self._step + 1, self._tables_every):
            if step not in self._samples:  # after a resume: read earlier ones again
                self._samples[step] = sample_rows(self._run, step, self._table_rollouts)
        return {
            name: wandb.Table(
                columns=list(columns), data=[r for s in sorted(self._samples) for r in self._samples[s][name]]
            )
            for name, columns in COLUMNS.items()
        }

    def _finish(self) -> None:
        """Send the summary, and the report as an artifact, if they exist."""
        summary, report = self._run / "summary.json", self._run / "report.html"
        if summary.is_file():
            content = json.loads(summary.read_text(encoding="utf-8"))
            self._experiment.summary.update({f"summary/{k}": v for k, v in content.items() if v is not None})
        if report.is_file():
            import wandb

            artifact = wandb.Artifact(f"report-{self._options['id']}", type="report")
            artifact.add_file(str(report))
            self._experiment.log_artifact(artifact)

    def close(self) -> None:
        """Send the last row and end the run."""
        self.flush()
        if self._experiment is not None:
            self._finish()
            self._experiment.finish()
            self._experiment = None


def wandb_logger(
    run: str,
    *,
    project: str = "draco",
    group: str | None = None,
    mode: str = "auto",
    tables_every: int = 10,
    table_rollouts: int = 4,
    **options: Any,
) -> WandbMetrics:
    """A W&B logger. Its files, and its run id for a resume, are in the run folder.

    Args:
        run: run folder.
        project, group: as in W&B; a sweep is a group.
        mode: online | offline | disabled | auto: online when a key is configured (WANDB_API_KEY or netrc), offline
            otherwise.
        tables_every, table_rollouts: see `WandbMetrics`.
        options: further arguments of `wandb.init`.

    Raises:
        ConfigError: no such mode.
    """
    check_option("logger.wandb.mode", mode, Literal["online", "offline", "disabled", "auto"])
    folder = Path(run)
    if mode == "auto":
        mode = "online" if _has_key() else "offline"
    print(f"wandb: {'offline, files under ' + str(folder / 'wandb') if mode == 'offline' else mode}")
    id_file = folder / "wandb_run_id"
    if not id_file.is_file():
        files.write_text(id_file, os.urandom(8).hex())
    return WandbMetrics(
        folder,
        {
            "name": folder.name,
            "dir": str(folder),
            "id": id_file.read_text(encoding="utf-8"),
            "project": project,
            "group": group,
            "mode": mode,
            "resume": "allow",
            "settings": {"x_disable_meta": True},  # the metadata include the command line, which may contain a key
            **options,
        },
        tables_every,
        table_rollouts,
    )


def finish(loggers: Iterable[Logger]) -> None:
    """Close every logger; otherwise W&B would continue the same run in the next job of a sweep."""
    for logger in loggers:
        logger.finalize("finished")
        if isinstance(logger, WandbMetrics):
            logger.close()


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1]
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
