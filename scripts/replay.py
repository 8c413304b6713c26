"""Recompute the rewards and credits of a run from its archive; exit status 1 unless every one is equal to the bit.

    python scripts/replay.py runs/NAME [runs/OTHER …]

Rewards come from the archived verdicts, credits from the run's own credit rule. A random reward is tossed again from
its key. The outcome reference's rewards are the environment's success, which no archive holds: they are taken as
given (and counted), and the credits that follow from them are recomputed.
"""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf

from callbacks.rubric.random import toss
from draco.config.arguments import parse, run_main
from draco.config.compose import instantiate_group
from draco.core.errors import ConfigError
from draco.core.types import Judgement
from draco.study.replay import RewardOf, replay_step
from draco.study.runs import open_run

SHOWN = 20  #: mismatches printed


def main(arguments: list[str]) -> int:
    """Replay every run; 1 if anything differs."""
    words, _ = parse(arguments, ())
    if not words:
        raise ConfigError("no run folder is given: python scripts/replay.py runs/NAME")
    return max([replay(Path(w)) for w in words])


def replay(path: Path) -> int:
    """Replay one run and print the result."""
    run = open_run(path)
    if not run.steps:
        raise ConfigError(f"{path}: no archived step to replay")
    rule = instantiate_group(OmegaConf.create(run.config["credit"]))
    stage = run.config["rubric"]
    overridden = stage.get("attribution_overrides") == "apply"
    reward_of: RewardOf | None = None
    if run.config["rubric"]["name"] != "outcome":

        def nothing_survives(judgement: Judgement, member: int) -> float:
            return 0.0

        reward_of = nothing_survives
    if run.config["rubric"]["name"] == "random":
        seed = int(stage.get("seed") or 0)

        def tossed(judgement: Judgement, member: int) -> float:
            group = judgement.group
            return toss(seed, group.step, group.task.id, group.trajectories[member].sample)

        reward_of = tossed
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


if __name__ == "__main__":
    run_main(main)
