"""Evaluate checkpoints of a run: the run's own rollout stage on held-out tasks, then the environment's evaluator.

The model is loaded once; only adapters are exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from omegaconf import DictConfig

from draco.config.compose import instantiate
from draco.core.llm.money import Prices
from draco.core.types import Task
from draco.run import checkpoint
from draco.run.build import Parts, build
from draco.run.evaluation import evaluate, evaluation_trainer
from draco.run.loader import EvalLoader, select_tasks
from draco.stages import RunContext

__all__ = ["evaluate_checkpoints"]


def evaluate_checkpoints(
    config: DictConfig, run: Path, which: str, splits: Sequence[str], prices: Prices | None = None
) -> Iterator[dict[str, Any]]:
    """Metrics and records, split by split and checkpoint by checkpoint.

    Args:
        config: the run's configuration, with `eval` set to what is wanted.
        run: run folder.
        which: `last`, `base` (a fresh adapter is the identity), step numbers with commas, or `lastN`: the last N epoch
            ends.
        splits: splits of the run's environment.
        prices: of the policy's tokens.

    Raises:
        ConfigError: no such checkpoint or split.
    """
    folders = checkpoint.chosen(run, which)
    parts = build(config)
    rollout = parts.stages.rollout
    try:
        for split in splits:
            parts.environment.tasks(split)  # an unknown one is refused before anything is paid for
        rollout.open(RunContext(folder=run, temperature=config.eval.temperature))
        parts.environment.check()
        parts.module.configure_model()
        policy = parts.module.policy
        rollout.ready(policy)
        trainer = evaluation_trainer(partial(Trainer, accelerator="auto", devices=1), parts, run)
        for split in splits:
            tasks = _tasks(config, parts, split, config.eval.tasks)
            held_out = EvalLoader(tasks, n=config.eval.n, temperature=config.eval.temperature)
            for folder in folders:
                if folder is not None:
                    checkpoint.load(folder, policy)
                yield {
                    "run": str(run),
                    "checkpoint": "base" if folder is None else folder.name,
                    "limits": asdict(instantiate(config.limits)),
                    **evaluate(parts, trainer, held_out, split, prices),
                }
    finally:
        parts.close()


def _tasks(config: DictConfig, parts: Parts, split: str, limit: int | None) -> list[Task]:
    limits = config.limits
    return select_tasks(
        parts.environment, parts.module.policy, split, limit, limits.max_prompt_tokens, limits.max_response_tokens
    )
