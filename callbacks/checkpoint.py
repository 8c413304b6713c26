"""Saves checkpoints every N steps, at epoch ends, at the end, and when a run is interrupted or stopped.

A checkpoint of step n is written when everything of step n is: its archive, its metrics, and the evaluation that may
follow. What it keeps besides the weights is taken when the step ends, so that an interruption in the middle of the next
one changes nothing.
"""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import Callback

from draco.core.distributed import broadcast, gather, rank, saving, world_size
from draco.core.errors import ConfigError
from draco.module import GRPOModule
from draco.policy.sharding import is_sharded
from draco.run import checkpoint

__all__ = ["Checkpoints"]

log = logging.getLogger("draco")


class Checkpoints(Callback):
    """Keeps the last few, every epoch end and, if wanted, every so many steps.

    Args:
        run: run folder.
        save_every: batches between checkpoints.
        keep_last: newest ones kept; epoch-end ones stay in any case.
        keep_every: multiples of it stay too; 0 = none.
        resume: folder of the checkpoint to load before training, or None.
    """

    def __init__(
        self, run: str, save_every: int = 1, keep_last: int = 3, keep_every: int = 0, resume: str | None = None
    ) -> None:
        if save_every < 1 or keep_last < 1:
            raise ConfigError(f"checkpoint.save_every and keep_last must be ≥ 1, got {save_every} and {keep_last}")
        if keep_every < 0:
            raise ConfigError(f"checkpoint.keep_every must be ≥ 0, got {keep_every}")
        self.run, self.save_every, self.keep_last, self.keep_every = Path(run), save_every, keep_last, keep_every
        self.resume = Path(resume) if resume else None
        self._started, self._wall_before = time.time(), 0.0
        #: step, state, random streams, and the (stage states, random streams) of the other ranks
        self._taken: tuple[int, dict[str, Any], dict[str, Any], list[Any]] | None = None

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
        own = saved[rank()] if len(saved) == world_size() else _united(saved)
        for stage in pl_module.stages:
            stage.load_state_dict(own.get(type(stage).__name__, {}))
        # Evaluations come at multiples of eval.every over the whole run, not from here on.
        trainer.fit_loop.epoch_loop.batch_progress.total.ready = state["step"]
        if not checkpoint.restore_rng(self.resume, rank()):
            seed_everything(1000003 * rank() + state["step"], workers=False, verbose=False)  # a rank that was not there
        log.info("resumed from %s", self.resume)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._take(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        done = pl_module.batches_done
        if batch_idx:  # not before the first batch of this process
            self._take(trainer, pl_module)
            if done % self.save_every == 0 or done in _epoch_ends(trainer):
                self._save(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._save(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        if not isinstance(pl_module, GRPOModule) or self._taken is None or rank():
            return  # nothing new since the start, or not the rank that saves
        if is_sharded(pl_module.policy.model):
            return  # to gather the parts takes all ranks, and each may be somewhere else now
        name, done = type(exception).__name__, pl_module.batches_done
        if not pl_module.recorded:
            log.warning("%s in the middle of step %d, which is lost: resume goes on before it", name, done)
            return
        try:
            saved = self._save(trainer, pl_module)
            log.warning("%s after %d steps: saved %s", name, done, saved)
        except OSError as error:
            log.error("%s after %d steps, and the checkpoint could not be written: %s", name, done, error)

    def _take(self, trainer: Trainer, module: GRPOModule) -> None:
        """What the checkpoint of this step will hold besides weights and optimizer."""
        loader: Any = trainer.train_dataloader
        state = {
            "bad_steps": module.bad_steps,
            "world_size": trainer.world_size,
            "tasks": checkpoint.digest(loader.tasks),
            "wall_s": round(self._wall_before + time.time() - self._started, 1),
            "loader": {**loader.state_dict(), "position": module.batches_done},
            "stages": {type(s).__name__: s.state_dict() for s in module.stages},
        }
        _, *others = gather((state["stages"], checkpoint.rng_state())) if world_size() > 1 else (None,)
        self._taken = (module.batches_done, state, checkpoint.rng_state(), others)

    def _save(self, trainer: Trainer, module: GRPOModule) -> Path:
        folder = checkpoint.folder_of(self.run, module.batches_done)
        sharded = is_sharded(module.policy.model)
        if self._taken is None or (not sharded and rank()):
            return folder
        if broadcast(folder.is_dir()) if sharded else folder.is_dir():
            return folder
        step, state, rng, others = self._taken
        assert step == module.batches_done
        with nullcontext() if sharded else saving():
            checkpoint.save(self.run, step, module.policy, trainer.optimizers[0], state, rng, others)
        if rank():
            return folder
        checkpoint.prune(self.run, self.keep_last, _epoch_ends(trainer), self.keep_every)
        return folder


def _united(saved: list[dict[str, Any]]) -> dict[str, Any]:
    """States of another number of ranks as one: what is kept by name (the proposals of tasks) is put together."""
    whole: dict[str, Any] = {}
    for state in reversed(saved):
        for key, value in state.items():
            old = whole.get(key)
            whole[key] = _united([value, old]) if isinstance(value, dict) and isinstance(old, dict) else value
    return whole


def _epoch_ends(trainer: Trainer) -> frozenset[int]:
    loader: Any = trainer.train_dataloader
    return frozenset(range(loader.steps_per_epoch, loader.steps + 1, loader.steps_per_epoch)) if loader else frozenset()
