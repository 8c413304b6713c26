"""Adds speed and memory to the metrics of every step, and warns when engine and trainer disagree."""

from __future__ import annotations

import logging
import resource
import time
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback

from draco.module import GRPOModule
from draco.update.metrics import judge_speed

__all__ = ["Health"]

log = logging.getLogger("draco")


class Health(Callback):
    """Measures this process.

    Args:
        mismatch_warn: mean |Δ log-prob| between engine and trainer above which one warning is logged.
    """

    def __init__(self, mismatch_warn: float = 0.05) -> None:
        self.mismatch_warn = mismatch_warn
        self._warned = False
        self._started = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._started = time.perf_counter()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert isinstance(pl_module, GRPOModule)
        assert pl_module.record is not None
        metrics = pl_module.record.metrics
        total = time.perf_counter() - self._started
        update, waited = metrics["time/update_s"], metrics["time/wait_s"]
        rollout = min(metrics.get("time/rollout_s", 0.0), waited)
        parts = {"rollout": rollout, "judge": waited - rollout, "update": update, "other": total - waited - update}
        metrics |= {
            "time/step_s": total,
            **{f"time/{name}_share": max(seconds, 0.0) / total for name, seconds in parts.items()},
            **judge_speed(metrics),
            "update/tokens_per_s": metrics["update/model_tokens"] / update if update else 0.0,
            "health/peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        }
        if torch.cuda.is_available():
            metrics["health/peak_gpu_gib"] = torch.cuda.max_memory_allocated() / 2**30
        mismatch = metrics.get("engine/mismatch_abs", 0.0)  # absent if older weights sampled the batch
        if mismatch > self.mismatch_warn and not self._warned:
            self._warned = True
            log.warning(
                "engine and trainer disagree on log-probs by %.3g nats a token (warned above %.3g): wrong adapter, "
                "template or temperature in the engine?",
                mismatch,
                self.mismatch_warn,
            )
