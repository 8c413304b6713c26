"""Judge finished trajectories of any agent: rubric, verdicts, rewards, step credits, archive, report.html; no training.

    python scripts/judge_trajectories.py input=runs.jsonl judge=litellm judge.model=openai/gpt-5.4
    python scripts/judge_trajectories.py input=labelled.jsonl judge=labels

Input, by its shape: JSON lines (or one JSON list) of objects with `task_id`, `messages` in OpenAI's chat format with
tool calls and, where it is known, `sample`; τ-bench results (`task_id`, `trial`, `traj`, or `simulations`);
AgentProcessBench rows. Trajectories of one task id are a group; a group needs two. A step is an assistant turn. Rows
that are malformed are all listed with line and field, and nothing is judged.

Options (key=value); what train.py calls rubric.*, credit.*, judge.*, advantage.* works here too:
    input      the file
    out        run folder (default runs/judged-FILE)
    judge      scripted knows the embedded environment alone; litellm is any model; labels: the file's own labels
    rubric     dynamic (default) | static with rubric.criteria=FILE.yaml
    credit     step (default) | uniform
    caveats    a text about the environment for the judge
    batch      groups a step of the archive (default 16)
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from draco.config.arguments import parse, run_main, whole
from draco.config.compose import instantiate_group, with_judge
from draco.core.errors import ConfigError
from draco.core.types import Group
from draco.judge.stage import read_secret
from draco.run.archive import write_step
from draco.run.folder import prepare, write_config
from draco.run.numbers import archive_numbers
from draco.stages import CreditStage, RunContext
from draco.study.outside import Outside, judge_by_labels, read_groups_of, too_few
from draco.study.page import write_page
from draco.study.runs import open_run

OPTIONS = {"input", "out", "judge", "rubric", "credit", "caveats", "batch", "overwrite"}


def main(arguments: list[str]) -> None:
    """Judge a file."""
    _, given = parse(arguments, OPTIONS, ("judge.", "rubric.", "credit.", "advantage."))
    if "input" not in given:
        raise ConfigError("input=FILE is missing: the trajectories to judge")
    source = Path(given["input"])
    outside = read_groups_of(source)
    if all(too_few(g) is not None for g in outside.groups):
        raise ConfigError(
            f"{source}: no task has two usable trajectories ({sum(len(g.trajectories) for g in outside.groups)} in "
            f"{len(outside.groups)} tasks); rewards and credit compare trajectories of one task"
        )
    run = Path(given.get("out", f"runs/judged-{source.stem}"))
    labels = given.get("judge") == "labels"
    passed = [f"{k}={v}" for k, v in given.items() if k in {"rubric", "credit"} or "." in k]
    config = with_judge([*passed, *([] if labels or "judge" not in given else [f"judge={given['judge']}"])])
    if not labels and "scripted" in str(config.judge.get("model", "")):
        raise ConfigError(
            "judge=scripted knows the embedded environment alone; use judge=litellm judge.model=… or labels"
        )
    batch = whole(given, "batch", 16, least=1)
    if labels:
        for _ in judge_by_labels(outside):  # a group without labels is refused before the folder is made
            pass
    overwrite = given.get("overwrite", "false").lower() == "true"
    if not overwrite and run.is_dir() and any(run.iterdir()):
        raise ConfigError(f"the folder {run} exists and is not empty; choose another out=, or overwrite=true")
    prepare(run, overwrite=overwrite)
    write_config(_kept(config, outside, labels, source), run)
    rule: CreditStage = instantiate_group(config.credit)
    steps = [outside.groups[i : i + batch] for i in range(0, len(outside.groups), batch)]
    numbered = [[replace(g, step=s) for g in groups] for s, groups in enumerate(steps)]
    if labels:
        for s, groups in enumerate(numbered):
            write_step(run, s, groups, list(rule.assign(judge_by_labels(replace(outside, groups=tuple(groups))))), [])
    else:
        _judge(run, numbered, config, rule, given.get("caveats", ""))
    show(run, outside)


def _judge(run: Path, numbered: list[list[Group]], config: DictConfig, rule: CreditStage, caveats: str) -> None:
    stage = instantiate_group(config.rubric)
    secret = read_secret(run / "transcript_secret")
    stage.open(RunContext(caveats=(caveats,) if caveats else (), secret=secret, needs_citations=rule.needs_citations))
    try:
        for s, groups in enumerate(numbered):
            alone = [j for g in groups if (j := too_few(g)) is not None]
            judged = stage.judge([g for g in groups if too_few(g) is None])
            credits = list(rule.assign(chain(judged, alone)))
            write_step(run, s, groups, credits, stage.take().calls)
    finally:
        stage.close()


def _kept(config: DictConfig, outside: Outside, labels: bool, source: Path) -> DictConfig:
    """What the run folder says of itself: enough for replay.py, report.py and replay_judge.py."""
    content: dict[str, Any] = {
        name: OmegaConf.to_container(config[name], resolve=True) for name in ("rubric", "credit", "judge", "advantage")
    }
    if labels:
        content |= {"rubric": {"name": "labels"}, "judge": {"model": "labels of the file"}}
    return OmegaConf.create({"steps": 0, "env": {"name": outside.form}, "input": str(source), **content})


def show(run: Path, outside: Outside) -> None:
    """Say what was judged and where it is."""
    opened = open_run(run)
    numbers = archive_numbers(run)
    judged = sum(n.members for n in numbers)
    total = sum(len(g.trajectories) for g in outside.groups)
    reasons: dict[str, int] = {}
    for n in numbers:
        for reason, count in n.reasons.items():
            reasons[reason] = reasons.get(reason, 0) + count
    write_page(opened, numbers)
    print(f"{outside.form}: {total} trajectories in {len(outside.groups)} groups; {judged} judged, "
          f"{total - judged} not (in the archive's table of failures, with reasons)")  # fmt: skip
    alone = sum(len(g.trajectories) == 1 for g in outside.groups)
    if alone:
        print(f"{alone} task{'s have' if alone > 1 else ' has'} one trajectory; a group needs two to be compared")
    print("credit: " + ", ".join(f"{k} {v}" for k, v in sorted(reasons.items())))
    print(f"archive: {run / 'archive'}\npage:    {run / 'report.html'}")


if __name__ == "__main__":
    run_main(main)
