"""`draco judge`: finished trajectories of any agent: rubric, verdicts, rewards, step credits, archive, report.html."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draco.config.arguments import Command, option, passed_on, words
from draco.config.options import Count
from draco.core.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from draco.core.types import Group
    from draco.stages import CreditStage
    from draco.study.outside import Outside

__all__ = ["COMMAND", "main"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The trajectories, and who judges them how."""

    input: Path = words("file of trajectories")
    out: Path | None = option(None, "run folder", shown="runs/judged-FILE")
    overwrite: bool = option(False, "delete what is in it first")
    judge: str = option("scripted", "litellm is any model; scripted knows desk alone; labels: the file's own labels")
    rubric: str = option("dynamic", "dynamic, or static with rubric.criteria=FILE.yaml")
    credit: str = option("step", "step or uniform")
    caveats: str = option("", "a text about the environment for the judge", shown="none")
    batch: Count = option(16, "groups a step of the archive")
    passed: tuple[str, ...] = passed_on("as in draco train", "judge.", "rubric.", "credit.", "advantage.")


COMMAND = Command(
    "draco judge",
    "judge finished trajectories of any agent; no training",
    Options,
    """
    Input, by its shape: JSON lines (or one JSON list) of objects with `task_id`, `messages` in OpenAI's chat
    format with tool calls and, where it is known, `sample`; τ-bench results (`task_id`, `trial`, `traj`, or
    `simulations`); AgentProcessBench rows. Trajectories of one task id are a group; a group needs two. A step
    is an assistant turn. Rows that are malformed are all listed with line and field, and nothing is judged.
    """,
    (
        "draco judge runs.jsonl judge=litellm judge.model=openai/gpt-5.4",
        "draco judge labelled.jsonl judge=labels out=runs/labelled",
    ),
)


def main(arguments: list[str]) -> None:
    """Judge a file."""
    given = COMMAND.parse(arguments)
    from draco.config.compose import instantiate_group
    from draco.run.archive import write_step
    from draco.run.folder import prepare, write_config
    from draco.study.outside import judge_by_labels, read_groups_of, too_few

    outside = read_groups_of(given.input)
    if all(too_few(g) is not None for g in outside.groups):
        total = sum(len(g.trajectories) for g in outside.groups)
        raise ConfigError(
            f"{given.input}: no task has two usable trajectories ({total} in {len(outside.groups)} tasks); rewards and "
            "credit compare trajectories of one task"
        )
    labels = given.judge == "labels"
    config = _composed(given)
    if labels:
        for _ in judge_by_labels(outside):  # a group without labels is refused before the folder is made
            pass
    run = given.out or Path("runs") / f"judged-{given.input.stem}"
    if not given.overwrite and run.is_dir() and any(run.iterdir()):
        raise ConfigError(f"the folder {run} exists and is not empty; choose another out=, or overwrite=true")
    prepare(run, overwrite=given.overwrite)
    write_config(_kept(config, outside, labels, given.input), run)
    rule: CreditStage = instantiate_group(config.credit)
    steps = [outside.groups[i : i + given.batch] for i in range(0, len(outside.groups), given.batch)]
    numbered = [[replace(g, step=s) for g in groups] for s, groups in enumerate(steps)]
    if labels:
        for s, groups in enumerate(numbered):
            write_step(run, s, groups, list(rule.assign(judge_by_labels(replace(outside, groups=tuple(groups))))), [])
    else:
        _judge(run, numbered, config, rule, given.caveats)
    show(run, outside)


def _composed(given: Options) -> DictConfig:
    """The configuration of rubric, credit and judge.

    Raises:
        ConfigError: no such option, or a judge that cannot judge what it does not know.
    """
    from draco.config.compose import with_judge

    groups = {"rubric": given.rubric, "credit": given.credit, "judge": given.judge}
    chosen = [f"{name}={choice}" for name, choice in groups.items() if choice != "labels"]
    config = with_judge([*chosen, *given.passed])
    if given.judge != "labels" and "scripted" in str(config.judge.get("model", "")):
        raise ConfigError(
            "judge=scripted knows the embedded environment alone; use judge=litellm judge.model=… or labels"
        )
    return config


def _judge(run: Path, numbered: list[list[Group]], config: DictConfig, rule: CreditStage, caveats: str) -> None:
    from draco.config.compose import instantiate_group
    from draco.judge.transcript import read_secret
    from draco.run.archive import write_step
    from draco.stages import RunContext
    from draco.study.outside import too_few

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
    """What the run folder says of itself: enough for replay, report and rescore."""
    from omegaconf import OmegaConf

    content: dict[str, Any] = {
        name: OmegaConf.to_container(config[name], resolve=True) for name in ("rubric", "credit", "judge", "advantage")
    }
    if labels:
        content |= {"rubric": {"name": "labels"}, "judge": {"model": "labels of the file"}}
    return OmegaConf.create({"steps": 0, "env": {"name": outside.form}, "input": str(source), **content})


def show(run: Path, outside: Outside) -> None:
    """Say what was judged and where it is."""
    from draco.run.numbers import archive_numbers
    from draco.study.page import write_page
    from draco.study.runs import open_run

    opened = open_run(run)
    numbers = archive_numbers(run)
    judged = sum(n.members for n in numbers)
    total = sum(len(g.trajectories) for g in outside.groups)
    reasons = Counter[str]()
    for n in numbers:
        reasons.update(n.reasons)
    write_page(opened, numbers)
    print(f"{outside.form}: {total} trajectories in {len(outside.groups)} groups; {judged} judged, "
          f"{total - judged} not (in the archive's table of failures, with reasons)")  # fmt: skip
    alone = sum(len(g.trajectories) == 1 for g in outside.groups)
    if alone:
        print(f"{alone} task{'s have' if alone > 1 else ' has'} one trajectory; a group needs two to be compared")
    print("credit: " + ", ".join(f"{k} {v}" for k, v in sorted(reasons.items())))
    print(f"archive: {run / 'archive'}\npage:    {run / 'report.html'}")
