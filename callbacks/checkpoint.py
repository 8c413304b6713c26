"""Saves checkpoints every N steps, at the end, and when a run is interrupted or stopped."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback

from draco import checkpoint
from draco.errors import ConfigError
from draco.module import GRPOModule

__all__ = ["Checkpoints"]

log = logging.getLogger("draco")


class Checkpoints(Callback):
    """Keeps the last few and every epoch end.

    Args:
        run: run folder.
        save_every: batches between checkpoints.
        keep_last: newest ones kept; epoch-end ones stay in any case.
        resume: folder of the checkpoint to load before training, or None.
    """

    def __init__(self, run: str, save_every: int = 10, keep_last: int = 3, resume: str | None = None) -> None:
        if save_every < 1 or keep_last < 1:
            raise ConfigError(f"checkpoint.save_every and keep_last must be ≥ 1, got {save_every} and {keep_last}")
        self.run, self.save_every, self.keep_last = Path(run), save_every, keep_last
        self.resume = Path(resume) if resume else None

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        if self.resume is None:
            return
        assert isinstance(pl_module, GRPOModule)
        state = checkpoint.read_state(self.resume)
        checkpoint.load(self.resume, pl_module.policy)
        checkpoint.load_optimizer(self.resume, pl_module.policy, trainer.optimizers[0])
        pl_module.batches_done = state["step"]
        for stage in (pl_module.rollout, pl_module.rubric, pl_module.credit):
            stage.load_state_dict(state["stages"].get(type(stage).__name__, {}))
        log.info("resumed from %s", self.resume)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert isinstance(pl_module, GRPOModule)
        done = pl_module.batches_done
        if done % self.save_every == 0 or done in self._epoch_ends(trainer):
            self._save(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._save(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        if isinstance(pl_module, GRPOModule) and hasattr(pl_module, "policy") and trainer.optimizers:
            folder = self._save(trainer, pl_module)
            log.warning("%s after %d steps: saved %s", type(exception).__name__, pl_module.batches_done, folder)

    def _save(self, trainer: Trainer, module: GRPOModule) -> Path:
        folder = checkpoint.folder_of(self.run, module.batches_done)
        if folder.is_dir():
            return folder
        stages = (module.rollout, module.rubric, module.credit)
        state = {"stages": {type(s).__name__: s.state_dict() for s in stages}}
        checkpoint.save(self.run, module.batches_done, module.policy, trainer.optimizers[0], state)
        checkpoint.prune(self.run, self.keep_last, self._epoch_ends(trainer))
        return folder

    @staticmethod
    def _epoch_ends(trainer: Trainer) -> frozenset[int]:
        loader = trainer.train_dataloader
        return (
            frozenset(range(loader.steps_per_epoch, loader.steps + 1, loader.steps_per_epoch))
            if loader
            else frozenset()
        )
