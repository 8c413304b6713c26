"""`draco author`: a static set of criteria from rollouts of the untrained policy."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from draco.config.arguments import Command, needed, option, passed_on
from draco.config.options import Count, Share
from draco.core.errors import ConfigError, JudgeReplyError
from draco.core.table import Cell, Table

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from rich.console import Console

    from draco.core.types import Criterion, Group
    from draco.judge.pipeline import JudgePipeline
    from draco.study.authoring import Rated

__all__ = ["COMMAND", "main"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is sampled and what is kept."""

    out: Path = needed("YAML file to write; it must not exist")
    tasks: Count | None = option(None, "the first so many training tasks", shown="all")
    samples: Count = option(8, "rollouts a task")
    most: Count = option(21, "criteria at most")
    applicable: Share = option(0.05, "least share of rollouts on which a criterion applies")
    discriminative: Share = option(0.02, "least share of tasks whose rollouts it tells apart")
    config: tuple[str, ...] = passed_on("options of draco train: env=…, policy=…, judge=… judge.KEY=…")


COMMAND = Command(
    "draco author",
    "write a static set of criteria from rollouts of the untrained policy",
    Options,
    """
    Samples rollouts of each training task, has criteria proposed for every task as rubric=dynamic would,
    reduces them to one general set, scores all rollouts by it, drops what rarely applies or rarely tells
    rollouts of a task apart, and writes what is left, most failed first: the YAML for rubric=static
    rubric.criteria=FILE, and a table beside it.
    """,
    (
        "draco author out=rubric.yaml tasks=12            # desk, the tiny policy, the scripted judge",
        "draco author out=rubric.yaml judge=litellm judge.model=openai/gpt-5.4 env=appworld policy=qwen36_27b",
    ),
)


async def author(
    pipeline: JudgePipeline, groups: Sequence[Group], log: Console
) -> tuple[list[Rated], tuple[Criterion, ...]]:
    """Criteria of all tasks reduced to one set and rated, and what was proposed."""
    from draco.study.authoring import rate, reduce_to_one

    found = await asyncio.gather(*(pipeline.propose_group(g) for g in groups))
    proposed = [c for criteria in found for c in criteria]
    log.print(f"{len(proposed)} criteria proposed for {len(groups)} tasks")
    if without := sum(not criteria for criteria in found):
        log.print(f"{without} of the tasks gave none (calls failed, fewer than two rollouts, or nothing was proposed)")
    general = await reduce_to_one(pipeline, proposed)
    log.print(f"reduced to {len(general)}")
    judged = await asyncio.gather(*(pipeline.judge_group(g, general, citations=False) for g in groups))
    lost = sum(len(j.failures) for j in judged)
    if not any(j.verdicts for j in judged):
        raise JudgeReplyError("no group has a verdict: there is nothing to rate by")
    if lost:
        log.print(f"{lost} rollouts have no verdict and count nowhere")
    return rate(general, judged), tuple(proposed)


def write(out: Path, kept: Sequence[Rated], config: DictConfig, counts: str) -> None:
    """The YAML and, beside it, the table."""
    from omegaconf import OmegaConf

    rows = [{k: getattr(r.criterion, k) for k in ("title", "description", "evaluator_instruction")} for r in kept]
    head = f"# Authored by draco author with {config.judge.model}: {counts}. Most failed first.\n"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(head + OmegaConf.to_yaml(OmegaConf.create({"criteria": rows})), encoding="utf-8")
    table = Table(out.stem, "", _COLUMNS, tuple(map(_cells, kept)))
    out.with_suffix(".md").write_text(table.markdown(), encoding="utf-8")


#: of a table of criteria
_COLUMNS = ("criterion", "failure rate", "applicable", "discriminative")


def _cells(r: Rated) -> tuple[Cell, ...]:
    return r.criterion.title, r.failure_rate, r.applicable, r.discriminative


def main(arguments: list[str]) -> None:
    """Author a set."""
    given = COMMAND.parse(arguments)
    from rich.console import Console

    from draco.config.compose import instantiate, with_judge
    from draco.judge.pipeline import JudgePipeline
    from draco.study.authoring import prune
    from draco.study.base_rollouts import sample_groups

    with COMMAND.beside_the_configuration():
        config = with_judge(given.config)
    if given.out.exists():
        raise ConfigError(f"{given.out} exists; name a new file")
    console = Console()
    client = instantiate(config.judge)  # a wrong key or model should not cost a rollout
    pipeline = JudgePipeline(client, instantiate(config.env.environment).caveats, os.urandom(32))
    groups = sample_groups(config, given.tasks, given.samples)

    async def run() -> tuple[list[Rated], tuple[Criterion, ...]]:
        async with aclosing(client):
            return await author(pipeline, groups, console)

    rated, proposed = asyncio.run(run())
    kept = prune(rated, given.applicable, given.discriminative, given.most)
    show(rated, kept, console)
    if not kept:
        raise ConfigError("no criterion is left after pruning; lower applicable= and discriminative=, or sample more")
    rollouts = sum(len(g.trajectories) for g in groups)
    write(given.out, kept, config, f"{len(proposed)} proposed from {rollouts} rollouts of {len(groups)} tasks")
    console.print(f"{len(kept)} criteria: {given.out}, table: {given.out.with_suffix('.md')}")


def show(rated: Sequence[Rated], kept: Sequence[Rated], console: Console) -> None:
    """A row a criterion."""
    ordered = sorted(rated, key=lambda r: -r.failure_rate)
    rows = tuple((*_cells(r), "" if r in kept else "pruned") for r in ordered)
    console.print(Table("criteria", "criteria by failure rate", (*_COLUMNS, ""), rows).terminal())
