"""Score a run's rollouts again on a fixed set of criteria (the dotted line of figure F4). Nothing is trained.

    python scripts/rescore.py runs/NAME --rubric static

Writes `rescored/SET/archive/step=…` into the run folder, a step at a time; finished steps are kept, so that it can be
interrupted. Options (key=value or --key value):
    rubric      static (the only kind that is fixed)
    criteria    a packaged set or a YAML file (default: the packaged set named after the environment)
    every       score every so many steps (default 1)
    judge, judge.KEY   another judge than the run's own
"""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf

from callbacks.credit.uniform import UniformCredit
from callbacks.rubric.static import StaticRubric
from draco.analysis.judgements import read_groups
from draco.analysis.judging import judge_config
from draco.analysis.runs import open_run
from draco.archive import step_folder, write_step
from draco.arguments import parse, run_main
from draco.errors import ConfigError
from draco.judge.stage import read_secret
from draco.run import instantiate


def main(arguments: list[str]) -> None:
    """Re-score every run that is named."""
    words, given = parse(arguments, {"rubric", "criteria", "every", "judge"}, ("judge.",))
    if not words:
        raise ConfigError("no run folder is given: python scripts/rescore.py runs/NAME --rubric static")
    if given.get("rubric", "static") != "static":
        raise ConfigError(f"rubric={given['rubric']}: only a static set is the same for every step; use rubric=static")
    for word in words:
        rescore(Path(word), given)


def rescore(path: Path, given: dict[str, str]) -> None:
    """Re-score one run and say what it cost."""
    run = open_run(path)
    criteria = given.get("criteria", run.env)
    stage = StaticRubric(instantiate(judge_config(given, run.config)), criteria)
    environment = run.config["env"].get("environment")  # trajectories that were judged from a file have none
    caveats = instantiate(OmegaConf.create(environment)).caveats if environment else ()
    stage.bind(caveats, read_secret(path / "transcript_secret"))
    stage.needs_citations = False
    out = path / "rescored" / Path(criteria).stem
    calls, cost = 0, 0.0
    unpriced = False
    try:
        for step in run.steps[:: int(given.get("every", 1))]:
            if step_folder(out, step).is_dir():
                continue
            rule = UniformCredit()
            credits = [rule.assign_one(j) for j in stage.judge(read_groups(path, step))]
            records = stage.take_records()
            write_step(out, step, [], credits, records)
            calls += len(records)
            cost += sum(r.cost_usd or 0.0 for r in records)
            unpriced |= any(r.cost_usd is None for r in records)
    finally:
        stage.close()
    bill = "at least " if unpriced else ""
    print(f"{out}: {calls} calls, {bill}${cost:.2f}")


if __name__ == "__main__":
    run_main(main)
