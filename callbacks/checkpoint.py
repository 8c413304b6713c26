"""Saves checkpoints every N steps, at epoch ends, at the end, and when a run is interrupted or stopped.

A checkpoint of a step is written after the step's archive, its metrics, and the evaluation that may follow it. The
state other than weights and optimizer is copied at the end of the step, so an interruption in the middle of the next
step does not change it.
"""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import Callback

from draco.config.options import Count, Index, checked
from draco.core.distributed import broadcast, gather, rank, saving, world_size
from draco.module import GRPOModule
from draco.policy.sharding import is_sharded
from draco.run import checkpoint
from draco.run.loader import TaskLoader

__all__ = ["Checkpoints"]

log = logging.getLogger("draco")


@checked("checkpoint")
class Checkpoints(Callback):
    """Saves and deletes checkpoints during training, and loads the one to resume from.

    Args:
        run: run folder.
        save_every: batches between checkpoints.
        keep_last: number of newest checkpoints to keep; those of epoch ends are always kept.
        keep_every: multiples of it are kept too; 0 = none.
        resume: folder of the checkpoint to load before training, or None.
    """

    def __init__(
        self, run: str, save_every: Count = 1, keep_last: Count = 3, keep_every: Index = 0, resume: str | None = None
    ) -> None:
        self.run, self.save_every, self.keep_last, self.keep_every = Path(run), save_every, keep_last, keep_every
        self.resume = Path(resume) if resume else None
        self._started, self._wall_before = time.time(), 0.0
        #: of the last step: its number, state, random streams, and (stage states, random streams) of the other ranks
        self._copied: tuple[int, dict[str, Any], dict[str, Any], list[Any]] | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        if self.resume is None:
            return
        assert isinstance(pl_module, GRPOModule)
        state = checkpoint.read_state(self.resume)
        checkpoint.load(self.resume, pl_module.policy)
        checkpoint.load_optimizer(self.resume, pl_module.policy, trainer.optimizers[0])
        pl_module.batches_done, pl_module.bad_steps = state["step"], state["bad_steps"]
        self._wall_before = state["wall_s"]
        saved = checkpoint.read_stages(self.resume)
        own = saved[rank()] if len(saved) == world_size() else _merged(saved)
        for stage in pl_module.stages:
            stage.load_state_dict(own.get(type(stage).__name__, {}))
        # Lightning evaluates every eval.every batches: let it count from the start of the run, not from the resume.
        trainer.fit_loop.epoch_loop.batch_progress.total.ready = state["step"]
        if not checkpoint.restore_rng(self.resume, rank()):
            seed_everything(1000003 * rank() + state["step"], workers=False, verbose=False)  # this rank is new
        log.info("resumed from %s", self.resume)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._copy(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        done = pl_module.batches_done
        if batch_idx:  # not before the first batch of this process
            self._copy(trainer, pl_module)
            if done % self.save_every == 0 or done % _loader(trainer).steps_per_epoch == 0:
                self._save(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._save(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        if not isinstance(pl_module, GRPOModule) or self._copied is None or rank():
            return  # no step was completed, or this is not the rank that saves
        if is_sharded(pl_module.policy.model):
            return  # gathering the shards takes all ranks, and the others may be elsewhere in the program
        name, done = type(exception).__name__, pl_module.batches_done
        if not pl_module.recorded:
            log.warning("%s in the middle of step %d, which is lost: resume continues before it", name, done)
            return
        try:
            saved = self._save(trainer, pl_module)
            log.warning("%s after %d steps: saved %s", name, done, saved)
        except OSError as error:
            log.error("%s after %d steps, and the checkpoint could not be written: %s", name, done, error)

    def _copy(self, trainer: Trainer, module: GRPOModule) -> None:
        """Copy what the checkpoint of this step holds besides weights and optimizer."""
        loader = _loader(trainer)
        state = {
            "bad_steps": module.bad_steps,
            "world_size": trainer.world_size,
            "tasks": checkpoint.digest(loader.tasks),
            "wall_s": round(self._wall_before + time.time() - self._started, 1),
            "epoch_steps": loader.steps_per_epoch,
            "loader": {**loader.state_dict(), "position": module.batches_done},
            "stages": {type(s).__name__: s.state_dict() for s in module.stages},
        }
        _, *others = gather((state["stages"], checkpoint.rng_state())) if world_size() > 1 else (None,)
        self._copied = (module.batches_done, state, checkpoint.rng_state(), others)

    def _save(self, trainer: Trainer, module: GRPOModule) -> Path:
        folder = checkpoint.folder_of(self.run, module.batches_done)
        sharded = is_sharded(module.policy.model)
        if self._copied is None or (not sharded and rank()):
            return folder
        if broadcast(folder.is_dir()) if sharded else folder.is_dir():
            return folder
        step, state, rng, others = self._copied
        assert step == module.batches_done
        with nullcontext() if sharded else saving():
            checkpoint.save(self.run, step, module.policy, trainer.optimizers[0], state, rng, others)
        if rank():
            return folder
        epoch = _loader(trainer).steps_per_epoch
        checkpoint.prune(self.run, epoch=epoch, keep_last=self.keep_last, keep_every=self.keep_every)
        return folder


def _merged(saved: list[dict[str, Any]]) -> dict[str, Any]:
    """One state from those of another number of ranks: mappings (such as the proposals of tasks) are merged."""
    merged: dict[str, Any] = {}
    for state in reversed(saved):
        for key, value in state.items():
            old = merged.get(key)
            merged[key] = _merged([value, old]) if isinstance(value, dict) and isinstance(old, dict) else value
    return merged


def _loader(trainer: Trainer) -> TaskLoader:
    return trainer.train_dataloader  # type: ignore[return-value]
