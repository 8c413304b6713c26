"""`draco replay`: rewards and credits again from the archive; with judge=, the archived calls to another judge."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from draco.config.arguments import Command
from draco.core.errors import ConfigError
from draco.study.verbs.replay_judge import Options, replay_judge

if TYPE_CHECKING:
    from draco.core.types import Judgement
    from draco.study.replay import RewardOf
    from draco.study.runs import Run

__all__ = ["COMMAND", "main"]

SHOWN = 20  #: mismatches printed


COMMAND = Command(
    "draco replay",
    "recompute rewards and credits from the archive, or send its judge calls to another judge",
    Options,
    """
    Without judge= nothing is sent. Rewards come from the archived verdicts, credits from the run's own credit
    rule; exit status 1 unless every one is equal to the bit. A random reward is tossed again from its key. The
    outcome reference's rewards are the environment's success, which no archive holds: they are taken as given
    (and counted), and the credits that follow from them are recomputed.

    With judge= (or judge.KEY= alone: the run's own judge, changed) the archived calls go out again, byte for
    byte. Written to RUN/judge_replay/MODEL: calls.jsonl, a line a call (it can be interrupted and goes on), and
    summary.json: agreement beside that of a judge that passes everything, false passes and fails (the archived
    verdicts are the reference), Cohen's κ, Gwet's AC1, recall and precision of the criteria and, with
    phases=attribute, of the cited steps, over all and by window. Figure F9 of the report is drawn from it.
    Criteria are matched by their texts, for which paraphrases are different ones, and, with matcher=, by a
    model too; its answers are kept in matches-MODEL.jsonl.
    """,
    (
        "draco replay runs/NAME",
        "draco replay runs/NAME judge=litellm judge.model=openai/gpt-5.4 max_usd=20",
        "draco replay runs/NAME judge=litellm judge.model=… matcher=litellm matcher.model=openai/gpt-5.4",
    ),
)


def main(arguments: list[str]) -> int:
    """Replay every run; 1 if anything differs."""
    given = COMMAND.parse(arguments)
    if given.judge is not None or any(p.startswith("judge.") for p in given.passed):
        replay_judge(given)
        return 0
    if given != Options(run=given.run):
        raise ConfigError(
            "without judge= nothing is sent, and only run folders are read; add judge=litellm judge.model=…"
        )
    return max([replay(path) for path in given.run])


def replay(path: Path) -> int:
    """Replay one run and print the result."""
    from omegaconf import OmegaConf

    from draco.config.compose import instantiate_group
    from draco.study.replay import replay_step
    from draco.study.runs import open_run

    run = open_run(path)
    if not run.steps:
        raise ConfigError(f"{path}: no archived step to replay")
    rule = instantiate_group(OmegaConf.create(run.config["credit"]))
    overridden = run.config["rubric"].get("attribution_overrides") == "apply"
    reward_of = _reward_without_criteria(run)
    groups = members = given = wrong = 0
    for step in run.steps:
        result = replay_step(path, step, rule, reward_of=reward_of, overridden=overridden)
        groups, members, given = groups + result.groups, members + result.trajectories, given + result.given
        for m in result.mismatches:
            wrong += 1
            if wrong <= SHOWN:
                print(f"step {m.step}, group {m.group}, sample {m.sample}: {m.what} is {m.archived!r} in the archive, "
                      f"recomputed {m.recomputed!r}")  # fmt: skip
    verdict = f"{wrong} values differ" if wrong else "every reward and credit is equal to the bit"
    note = f"; {given} rewards are the environment's and were taken as given" if given else ""
    print(f"{path}: {len(run.steps)} steps, {groups} groups, {members} trajectories: {verdict}{note}")
    return 1 if wrong else 0


def _reward_without_criteria(run: Run) -> RewardOf | None:
    """The reward of a member of a group that has no criteria; None: the environment's, which no archive holds."""
    name = run.config["rubric"]["name"]
    if name == "outcome":
        return None
    if name != "random":
        return lambda judgement, member: 0.0
    from omegaconf import OmegaConf

    from draco.config.compose import instantiate_group

    rubric = instantiate_group(OmegaConf.create(run.config["rubric"]))

    def tossed(judgement: Judgement, member: int) -> float:
        (again,) = rubric.judge([judgement.group])
        samples = [t.sample for t in again.group.trajectories]
        reward: float = again.rewards[samples.index(judgement.group.trajectories[member].sample)]
        return reward

    return tossed
