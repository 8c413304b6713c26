"""Writes the archive of every training step (`draco.run.archive`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback

from draco.module import GRPOModule
from draco.run.archive import write_step

__all__ = ["ArchiveWriter"]


class ArchiveWriter(Callback):
    """Writes one folder for each step; a resumed run writes the steps after its checkpoint again.

    Args:
        run: run folder.
    """

    def __init__(self, run: str) -> None:
        self.run = Path(run)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert isinstance(pl_module, GRPOModule)
        record = pl_module.record
        assert record is not None
        if not trainer.is_global_zero:  # its record has those of all ranks
            return
        write_step(self.run, record.step, record.groups, record.credits, record.calls)
