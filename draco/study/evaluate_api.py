"""Evaluate a model behind an API on splits. An episode is on the disk once it has ended: nothing is paid for twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from draco.config.compose import instantiate
from draco.core.errors import ConfigError
from draco.core.llm.money import Prices
from draco.core.types import Task
from draco.env.base import Environment, Evaluator
from draco.env.records import record_of
from draco.env.success import summarise
from draco.rollout.engines.api import ApiEngine, TextRollout
from draco.rollout.loop import Limits
from draco.study.episodes import EpisodeFile

__all__ = ["evaluate_api"]

Episodes = Sequence[tuple[Task, int]]  #: task and sample of each


def evaluate_api(
    engine: ApiEngine,
    config: DictConfig,
    splits: Sequence[str],
    *,
    n: int,
    tasks: int | None,
    out: Path,
    options: Sequence[str] = (),
    prices: Prices | None = None,
) -> Iterator[dict[str, Any]]:
    """Metrics and records, split by split. Whether they can be had is checked before this returns.

    Args:
        engine: the model.
        config: environment, evaluator and limits.
        splits: splits of the environment.
        n: runs of each task.
        tasks: the first so many; None = all.
        out: folder of the files ``SPLIT-api-nN.jsonl``; episodes that are there are not played again.
        options: options of the environment; a file goes on only with those that it began with.
        prices: in place of what litellm says a request costs.

    Raises:
        ConfigError: no such split, files of another evaluation, or the model does not answer.
    """
    environment: Environment = instantiate(config.env.environment)
    evaluator: Evaluator | None = instantiate(config.env.get("evaluator"))
    limits: Limits = instantiate(config.limits)
    asked = {s: [(task, i) for task in environment.tasks(s)[:tasks] for i in range(n)] for s in splits}
    evaluation = {
        "agent": engine.model, "scaffold": environment.scaffold, "env": config.env.name, "n": n,
        "temperature": engine.temperature, "limits": asdict(limits), "options": sorted(options),
    }  # fmt: skip
    files = {s: EpisodeFile(out / f"{s}-api-n{n}.jsonl", {"split": s, **evaluation}) for s in splits}
    for split, file in files.items():
        if file.episodes:
            there = len(asked[split]) - len(file.missing(asked[split]))
            print(f"{split}: {there} episodes are in {file.file} already")
    if any(file.missing(asked[split]) for split, file in files.items()):
        environment.check()
        engine.check()
    return _results(engine, environment, evaluator, limits, asked, files, prices)


def _results(
    engine: ApiEngine,
    environment: Environment,
    evaluator: Evaluator | None,
    limits: Limits,
    asked: Mapping[str, Episodes],
    files: Mapping[str, EpisodeFile],
    prices: Prices | None,
) -> Iterator[dict[str, Any]]:
    try:
        for split, file in files.items():
            _play(engine, environment, evaluator, limits, file.missing(asked[split]), file)
            records = [file.episodes[task.id, i].priced(prices) for task, i in asked[split]]
            yield {
                "agent": engine.model,
                "scaffold": environment.scaffold,
                "checkpoint": "api",
                "split": split,
                "limits": asdict(limits),
                **summarise(records),
                "records": [r.as_dict() for r in records],
            }
    finally:
        engine.close()
        environment.close()
        if evaluator is not None:
            evaluator.close()


def _play(
    engine: ApiEngine,
    environment: Environment,
    evaluator: Evaluator | None,
    limits: Limits,
    episodes: Episodes,
    file: EpisodeFile,
) -> None:
    """Play episodes and keep each as it ends."""
    rollouts = [
        TextRollout(environment.open(task, seed=sample), limits, task=task, sample=sample, seed=sample)
        for task, sample in episodes
    ]
    try:
        for rollout in engine.run(None, rollouts, temperature=engine.temperature):
            file.add(record_of(rollout.trajectory(), evaluator, rollout.usage, rollout.cost_usd))
    except ConfigError as error:
        kept = f"; {len(file.episodes)} episodes are kept in {file.file}: the same command goes on"
        raise ConfigError(f"{error}{kept if file.episodes else ''}") from error
