"""Write a static set of criteria from rollouts of the untrained policy.

    python scripts/author_static_rubric.py out=rubric.yaml judge=litellm judge.model=openai/gpt-5.4 env=… policy=…
    python scripts/author_static_rubric.py out=rubric.yaml tasks=12                # desk, tiny policy, scripted judge

Samples `samples` rollouts of each training task, has criteria proposed for every task as rubric=dynamic would, reduces
them to one general set, scores all rollouts by it, drops what rarely applies or rarely tells rollouts of a task apart,
and writes what is left, most failed first: the YAML for rubric=static rubric.criteria=FILE, and a table beside
it.

Options (key=value; everything else is an option of train.py):
    out             YAML to write; must not exist
    tasks           the first so many training tasks (default all)
    samples         rollouts a task (default 8)
    most            criteria at most (default 21)
    applicable      least share of rollouts on which a criterion applies (default 0.05)
    discriminative  least share of tasks whose rollouts it tells apart (default 0.02)
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from draco.config.arguments import run_main, share, split, whole
from draco.config.compose import with_judge
from draco.core.errors import ConfigError, JudgeReplyError
from draco.core.types import Criterion, Group
from draco.judge.pipeline import JudgePipeline
from draco.study.authoring import Rated, prune, rate, reduce_to_one
from draco.study.base_rollouts import sample_groups

OWN = {"out", "tasks", "samples", "most", "applicable", "discriminative"}


async def author(
    pipeline: JudgePipeline, groups: Sequence[Group], log: Console
) -> tuple[list[Rated], tuple[Criterion, ...]]:
    """Criteria of all tasks reduced to one set and rated, and what was proposed."""
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
    rows = [
        {
            "title": r.criterion.title,
            "description": r.criterion.description,
            "evaluator_instruction": r.criterion.evaluator_instruction,
        }
        for r in kept
    ]
    head = f"# Authored by scripts/author_static_rubric.py with {config.judge.model}: {counts}. Most failed first.\n"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(head + OmegaConf.to_yaml(OmegaConf.create({"criteria": rows})), encoding="utf-8")
    lines = ["| criterion | failure rate | applicable | discriminative |", "|---|---|---|---|"]
    lines += [
        f"| {r.criterion.title} | {r.failure_rate:.1%} | {r.applicable:.1%} | {r.discriminative:.1%} |" for r in kept
    ]
    out.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Author a set."""
    given, overrides = split(arguments, OWN)
    config = with_judge(overrides)
    tasks = whole(given, "tasks", 1, least=1) if "tasks" in given else None
    samples, most = whole(given, "samples", 8, least=1), whole(given, "most", 21, least=1)
    applicable, discriminative = share(given, "applicable", 0.05), share(given, "discriminative", 0.02)
    if "out" not in given:
        raise ConfigError("out=FILE.yaml is missing: where to write the set")
    out = Path(given["out"])
    if out.exists():
        raise ConfigError(f"{out} exists; name a new file")
    from draco.config.compose import instantiate

    console = Console()
    client = instantiate(config.judge)  # a wrong key or model should not cost a rollout
    caveats = instantiate(config.env.environment).caveats
    pipeline = JudgePipeline(client, caveats, os.urandom(32))
    groups = sample_groups(config, tasks, samples)

    async def run() -> tuple[list[Rated], tuple[Criterion, ...]]:
        try:
            return await author(pipeline, groups, console)
        finally:
            await client.aclose()

    rated, proposed = asyncio.run(run())
    kept = prune(rated, applicable, discriminative, most)
    table = Table(title="criteria by failure rate", title_justify="left")
    for name in ("criterion", "failure rate", "applicable", "discriminative", ""):
        table.add_column(name, justify="left" if name == "criterion" else "right")
    for r in sorted(rated, key=lambda r: -r.failure_rate):
        shares = (f"{value:.1%}" for value in (r.failure_rate, r.applicable, r.discriminative))
        table.add_row(r.criterion.title, *shares, "" if r in kept else "pruned")
    console.print(table)
    if not kept:
        raise ConfigError("no criterion is left after pruning; lower applicable= and discriminative=, or sample more")
    rollouts = sum(len(g.trajectories) for g in groups)
    write(out, kept, config, f"{len(proposed)} proposed from {rollouts} rollouts of {len(groups)} tasks")
    console.print(f"{len(kept)} criteria: {out}, table: {out.with_suffix('.md')}")
    return 0


if __name__ == "__main__":
    run_main(main)
