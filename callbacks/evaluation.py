"""Writes the evaluations during training (`eval.every`) to files and loggers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback

from draco.core.files import write_json
from draco.env.success import summarise
from draco.module import GRPOModule
from draco.run.summary import evaluation_file, evaluation_metrics

__all__ = ["Evaluations"]


class Evaluations(Callback):
    """Writes ``evaluations/step=000010.json``.

    Args:
        run: run folder.
        split: evaluated split, for the record.
    """

    def __init__(self, run: str, split: str) -> None:
        self.run, self.split = Path(run), split

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        assert isinstance(pl_module, GRPOModule)
        if not trainer.is_global_zero:
            return
        records, step = pl_module.validation_records, pl_module.batches_done
        content = {"step": step, "split": self.split, **summarise(records), "records": [r.as_dict() for r in records]}
        pl_module.log_at(step, evaluation_metrics(content))
        write_json(evaluation_file(self.run, step), content)
