"""Prompt tokens of judge.plan=lean against judge.plan=paper on the same archived groups.

    python scripts/bench_judge.py [quick=true] [run=runs/NAME] [steps=2] [tasks=16] [samples=6] [judge=… judge.model=…]

Without run= it rolls out the default policy first (`tasks` tasks of the training split, `samples` rollouts each, one
archived step after another) and reads them back from the archive that it wrote. Both plans judge them with
judge=scripted (or the judge given). Tokens are counted with the o200k tokenizer that litellm carries.

The cache model (prefix_cache.py): a prompt hits the longest common prefix with the prompts of calls that
were completed before it started, in blocks of 128 tokens, from 1,024 tokens on; a step's calls of one kind start
together over all its groups, and nothing is kept from one step to the next.

`agreement` is the share of verdicts (criterion × rollout, over the criteria of either plan) on which both plans have
the same score and cite the same steps. Under the scripted judge it shows that the plumbing loses nothing. What a real
judge makes of digests and of a joint call may differ. Exit status 1: ratio above 0.5 or agreement below 0.98.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from omegaconf import DictConfig
from prefix_cache import PromptTokens, prompt_tokens
from rich.console import Console

from draco.config.arguments import Command, end, option, passed_on
from draco.config.compose import instantiate, with_judge
from draco.config.options import Count
from draco.core.errors import ConfigError
from draco.core.table import Cell, Table
from draco.core.types import Group, Judgement
from draco.judge.pipeline import JudgePipeline
from draco.judge.prompts import CALLS
from draco.judge.records import CallRecord
from draco.run.archive import write_step
from draco.study.base_rollouts import archived_groups, sample_groups

RATIO, AGREEMENT = 0.5, 0.98  #: targets


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which groups are judged."""

    run: Path | None = option(
        None, "run folder whose archived groups are judged", shown="rollouts of the default policy"
    )
    quick: bool = option(False, "8 tasks of one step")
    steps: Count | None = option(None, "archived steps", shown="2; with quick=true 1; with run= all")
    tasks: Count | None = option(None, "training tasks a step", shown="16; with quick=true 8")
    samples: Count = option(6, "rollouts a task")
    config: tuple[str, ...] = passed_on("options of draco train: the judge, as judge=… judge.KEY=…")


COMMAND = Command(
    "python scripts/bench_judge.py", "prompt tokens of judge.plan=lean against judge.plan=paper", Options, __doc__ or ""
)


def groups_of(config: DictConfig, given: Options) -> list[Group]:
    """Archived groups: of a run, or of the untrained policy."""
    if given.run is not None:
        return archived_groups(given.run, given.steps or (1 if given.quick else None))
    tasks, steps = given.tasks or (8 if given.quick else 16), given.steps or (1 if given.quick else 2)
    with tempfile.TemporaryDirectory() as folder:
        groups = sample_groups(config, tasks * steps, given.samples)
        for step in range(steps):
            share = groups[step * tasks : (step + 1) * tasks]
            write_step(Path(folder), step, [Group(g.task, g.trajectories, g.index, step) for g in share], [])
        return archived_groups(Path(folder))


def judged(config: DictConfig, groups: Sequence[Group], plan: str) -> tuple[list[Judgement], list[CallRecord]]:
    """Judge all groups by one plan."""
    records: list[CallRecord] = []
    client = instantiate(config.judge, plan=plan)
    pipeline = JudgePipeline(client, secret=b"\0" * 32, sink=records.append)

    async def all_of_them() -> list[Judgement]:
        async with aclosing(client):
            return list(await asyncio.gather(*(pipeline.judge_group(g) for g in groups)))

    return asyncio.run(all_of_them()), records


def cells(judgement: Judgement) -> dict[tuple[str, int], tuple[int, tuple[int, ...]]]:
    """(criterion, sample) → (score, cited steps)."""
    return {
        (criterion.title, t.sample): (verdict.score, verdict.steps)
        for criterion, row in zip(judgement.criteria, judgement.verdicts, strict=True)
        for t, verdict in zip(judgement.group.trajectories, row, strict=True)
    }


def agreement(paper: Sequence[Judgement], lean: Sequence[Judgement]) -> tuple[int, int]:
    """Verdicts that are alike in both plans, and all."""
    alike = total = 0
    for one, other in zip(paper, lean, strict=True):
        mine, theirs = cells(one), cells(other)
        alike += sum(mine[key] == theirs.get(key) for key in mine)
        total += len(mine.keys() | theirs.keys())
    return alike, total


def main(arguments: list[str]) -> int:
    """Judge twice, count, print a table and one line of JSON."""
    given = COMMAND.parse(arguments)
    with COMMAND.beside_the_configuration():
        config = with_judge(given.config)
    import litellm

    groups = groups_of(config, given)
    found = {plan: judged(config, groups, plan) for plan in ("paper", "lean")}
    usage = {
        plan: prompt_tokens(records, lambda text: litellm.encode(model="gpt-4o", text=text))
        for plan, (_, records) in found.items()
    }
    rollouts = sum(len(g.trajectories) for g in groups)
    totals = {plan: sum(by_call.values(), PromptTokens()) for plan, by_call in usage.items()}
    rows: list[tuple[Cell, ...]] = []
    for plan, by_call in usage.items():
        counted = {call: by_call[call] for call in CALLS if call in by_call} | {"all": totals[plan]}
        rows += [(plan, call, u.calls, u.tokens, u.cached, u.uncached) for call, u in counted.items()]
    title = f"prompt tokens, {len(groups)} groups, {rollouts} rollouts"
    columns = ("plan", "call", "calls", "tokens", "cached", "uncached")
    Console().print(Table("prompt_tokens", title, columns, tuple(rows), "{:,}").terminal())
    alike, total = agreement(found["paper"][0], found["lean"][0])
    if not total:
        raise ConfigError("neither plan gave a verdict: nothing was compared; judge more tasks or rollouts")
    result = {
        "uncached_token_ratio": round(totals["lean"].uncached / totals["paper"].uncached, 4),
        "agreement": round(alike / total, 4),
        "token_ratio": round(totals["lean"].tokens / totals["paper"].tokens, 4),
        "verdicts": total,
        "groups": len(groups),
    }
    print(json.dumps(result))
    return 0 if result["uncached_token_ratio"] <= RATIO and result["agreement"] >= AGREEMENT else 1


if __name__ == "__main__":
    end(main, COMMAND)
