"""The evaluation loop: the rollout stage on held-out tasks, then the environment's evaluator on the end states."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer

from draco.core.distributed import barrier
from draco.core.llm.money import Prices
from draco.env.success import summarise
from draco.run.build import Parts
from draco.run.loader import EvalLoader

__all__ = ["evaluate", "evaluation_trainer", "quiet_lightning"]


def evaluate(
    parts: Parts, trainer: Trainer, held_out: EvalLoader, split: str, prices: Prices | None = None
) -> dict[str, Any]:
    """Success metrics and records of the current weights.

    Args:
        parts: of the run; its rollout stage is ready.
        trainer: see `evaluation_trainer`.
        held_out: the tasks.
        split: name of their split, for the record.
        prices: of the policy's tokens; None: the cost is unknown.

    Returns:
        split, scaffold, the figures of `draco.env.success.summarise`, and one record a rollout under `records`.
    """
    barrier()  # Lightning's own collectives have a time-out
    with torch.no_grad():
        trainer.validate(parts.module, dataloaders=held_out, verbose=False)
    records = [r.priced(prices) for r in parts.module.validation_records]
    return {
        "split": split,
        "scaffold": parts.environment.scaffold,
        **summarise(records),
        "records": [r.as_dict() for r in records],
    }


def evaluation_trainer(make: Any, parts: Parts, run: Path) -> Trainer:
    """A trainer that only evaluates.

    Args:
        make: `lightning.pytorch.Trainer`, or a partial of it with devices and strategy.
        parts: of the run.
        run: its folder.
    """
    quiet_lightning()
    trainer: Trainer = make(
        callbacks=list(parts.stages),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(run),
    )
    return trainer


def quiet_lightning() -> None:
    """Silence messages of Lightning that do not apply to this loop."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for text in (
        ".*does not have many workers.*", ".*Starting from v.*", ".*no `val_dataloader`.*", ".*LeafSpec.*",
        ".*in eval mode at the start of training.*",  # the base model: see `draco.policy.mode`
    ):  # fmt: skip
        warnings.filterwarnings("ignore", message=text)
