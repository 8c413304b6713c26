"""Evaluate a checkpoint of a run: the run's own rollout stage on held-out tasks, then the environment's evaluator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from draco import checkpoint
from draco.errors import ConfigError
from draco.evaluation.metrics import summarise
from draco.evaluation.records import evaluate_groups
from draco.loader import EvalLoader
from draco.run import build, select_tasks
from draco.stages import RolloutStage, find_stage

__all__ = ["evaluate_checkpoint"]


def evaluate_checkpoint(config: DictConfig, run: Path, which: str) -> dict[str, Any]:
    """Metrics and records of one checkpoint on `config.eval`.

    Args:
        config: the run's configuration, with `eval` set to what is wanted.
        run: run folder.
        which: `last`, `base` (a fresh adapter is the identity), or a step number.

    Raises:
        ConfigError: no such checkpoint or split.
    """
    folder = None
    if which == "last":
        folder = checkpoint.latest(run)
    elif which != "base":
        folder = checkpoint.folder_of(run, int(which)) if which.isdigit() else None
        if folder is None or not folder.is_dir():
            kept = ", ".join(str(int(f.name.removeprefix("step="))) for f in checkpoint.checkpoints(run))
            raise ConfigError(f"checkpoint={which} is not there; kept steps: {kept}; or use last or base")
    parts = build(config)
    parts.module.configure_model()
    policy = parts.module.policy
    if folder is not None:
        checkpoint.load(folder, policy)
    tasks = select_tasks(
        parts.environment, policy, config.eval.split, config.eval.tasks, config.limits.max_prompt_tokens
    )
    rollout = find_stage(parts.callbacks, RolloutStage)  # type: ignore[type-abstract]
    (batch,) = EvalLoader(tasks, n=config.eval.n, temperature=config.eval.temperature)
    try:
        parts.engine.open(policy, run, temperature=config.eval.temperature)
        with torch.no_grad():
            records = evaluate_groups(rollout.generate(policy, batch), parts.evaluator)
    finally:
        parts.engine.close()
    name = "base" if folder is None else folder.name
    return {
        "run": str(run),
        "checkpoint": name,
        "split": config.eval.split,
        **summarise(records),
        "records": [r.as_dict() for r in records],
    }
