"""Score a run's rollouts again on a fixed set of criteria (the dotted line of figure F4). Nothing is trained.

    python scripts/rescore.py runs/NAME --rubric static

Writes `rescored/SET/archive/step=…` into the run folder, a step at a time; finished steps are kept, so that it can be
interrupted. `rescored/SET/made_of.json` says by which criteria and judge; others are refused there. Options (key=value
or --key value):
    rubric      static (the only kind that is fixed)
    criteria    a packaged set or a YAML file (default: the packaged set named after the environment)
    every       score every so many steps (default 1)
    judge, judge.KEY   another judge than the run's own
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from callbacks.credit.uniform import UniformCredit
from callbacks.rubric.static import StaticRubric
from draco.config.arguments import parse, run_main, whole
from draco.config.compose import instantiate, judge_config
from draco.core.errors import ConfigError
from draco.core.files import write_json
from draco.core.types import Criterion
from draco.judge.stage import read_secret
from draco.run.archive import step_folder, write_step
from draco.run.folder import RESUMABLE, redacted
from draco.stages import RunContext
from draco.study.judgements import read_groups
from draco.study.runs import open_run

#: judge options that only carry the calls: no score depends on them
_CARRIAGE = {n.removeprefix("judge.") for n in RESUMABLE} | {"cache", "backoff_s", "deadline_s", "group_deadline_s"}


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
    every = whole(given, "every", 1, least=1)
    run = open_run(path)
    criteria = given.get("criteria", run.env)
    judge = judge_config(given, run.config)
    stage = StaticRubric(instantiate(judge), criteria)
    environment = run.config["env"].get("environment")  # trajectories that were judged from a file have none
    caveats = instantiate(OmegaConf.create(environment)).caveats if environment else ()
    secret = read_secret(path / "transcript_secret")
    stage.open(RunContext(caveats=tuple(caveats), secret=secret, needs_citations=False))
    out = path / "rescored" / Path(criteria).stem
    claim(out, made_of(stage.static_criteria, judge))
    calls, cost = 0, 0.0
    unpriced = False
    try:
        for step in run.steps[::every]:
            if step_folder(out, step).is_dir():
                continue
            rule = UniformCredit()
            credits = [rule.assign_one(j) for j in stage.judge(read_groups(path, step))]
            records = stage.take().calls
            write_step(out, step, [], credits, records)
            calls += len(records)
            cost += sum(r.cost_usd or 0.0 for r in records)
            unpriced |= any(r.cost_usd is None for r in records)
    finally:
        stage.close()
    bill = "at least " if unpriced else ""
    print(f"{out}: {calls} calls, {bill}${cost:.2f}")


def made_of(criteria: Sequence[Criterion], judge: DictConfig) -> dict[str, Any]:
    """What the scores depend on beside the rollouts: a hash of the criteria's texts, and the judge's options."""
    texts = json.dumps([[c.title, c.description, c.evaluator_instruction] for c in criteria])
    options = redacted(OmegaConf.create({"judge": judge}))["judge"]
    return {
        "criteria": hashlib.sha256(texts.encode()).hexdigest()[:16],
        "judge": {k: v for k, v in options.items() if k not in _CARRIAGE},
    }


def claim(out: Path, made: dict[str, Any]) -> None:
    """Note what the scores in `out` are made of, or see that those there are made of the same.

    Raises:
        ConfigError: they are not, or nothing says what they are made of.
    """
    file = out / "made_of.json"
    if file.is_file():
        before = json.loads(file.read_text(encoding="utf-8"))
        other = [
            k for k in ("criteria", *sorted({*made["judge"], *before["judge"]})) if _part(before, k) != _part(made, k)
        ]
        if not other:
            return
        why = "were made with " + ", ".join(
            "other criteria" if k == "criteria" else f"judge.{k.lstrip('_')}={_part(before, k)}" for k in other
        )
    elif (out / "archive").is_dir():
        why = "do not say which criteria and judge made them (no made_of.json)"
    else:
        out.mkdir(parents=True, exist_ok=True)
        write_json(file, made)
        return
    raise ConfigError(
        f"the scores in {out} {why}. Rename that folder (figure F4 draws every folder beside it under its name) or "
        "delete it, or give the criteria file another name"
    )


def _part(made: dict[str, Any], name: str) -> Any:
    return made["criteria"] if name == "criteria" else made["judge"].get(name)


if __name__ == "__main__":
    run_main(main)
