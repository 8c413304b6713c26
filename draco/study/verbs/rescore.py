"""`draco rescore`: a run's rollouts on a fixed set of criteria. Nothing is trained."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from draco.config.arguments import Command, option, passed_on, words
from draco.config.options import Count
from draco.core.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from draco.core.types import Criterion

__all__ = ["COMMAND", "main"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """By what the rollouts are scored."""

    run: tuple[Path, ...] = words("run folders")
    rubric: Literal["static"] = option("static", "the only kind that is the same for every step")
    criteria: str | None = option(None, "a packaged set or a YAML file", shown="the set named after the environment")
    every: Count = option(1, "score every so many steps")
    judge: str | None = option(None, "another judge", shown="the run's own")
    passed: tuple[str, ...] = passed_on("options of the judge", "judge.")


COMMAND = Command(
    "draco rescore",
    "score a run's rollouts again on a fixed set of criteria",
    Options,
    """
    Writes RUN/rescored/SET/archive/step=…, a step at a time; finished steps are kept, so that it can be
    interrupted. RUN/rescored/SET/made_of.json says by which criteria and judge; others are refused there. The
    report draws it as the dotted line of figure F4.
    """,
    (
        "draco rescore runs/NAME",
        "draco rescore runs/NAME criteria=rubric.yaml every=5 judge=litellm judge.model=openai/gpt-5.4",
    ),
)


def main(arguments: list[str]) -> None:
    """Re-score every run that is named."""
    given = COMMAND.parse(arguments)
    for path in given.run:
        rescore(path, given)


def rescore(path: Path, given: Options) -> None:
    """Re-score one run and say what it cost."""
    from omegaconf import OmegaConf

    from draco.config.compose import compose_config, instantiate, instantiate_group, judge_config
    from draco.judge.transcript import read_secret
    from draco.run.archive import step_folder, write_step
    from draco.stages import RunContext
    from draco.study.judgements import read_groups
    from draco.study.runs import open_run

    run = open_run(path)
    criteria = given.criteria or run.env
    chosen = {"judge": given.judge} if given.judge else {}
    judge = judge_config({**chosen, **dict(p.split("=", 1) for p in given.passed)}, run.config)
    parts = compose_config(["rubric=static", "credit=uniform"])
    parts.rubric.criteria, parts.rubric.judge = criteria, judge
    stage = instantiate_group(parts.rubric)
    rule = instantiate_group(parts.credit)
    environment = run.config["env"].get("environment")  # trajectories that were judged from a file have none
    caveats = instantiate(OmegaConf.create(environment)).caveats if environment else ()
    secret = read_secret(path / "transcript_secret")
    stage.open(RunContext(caveats=tuple(caveats), secret=secret, needs_citations=False))
    out = path / "rescored" / Path(criteria).stem
    claim(out, made_of(stage.static_criteria, judge))
    costs: list[float | None] = []
    try:
        for step in run.steps[:: given.every]:
            if step_folder(out, step).is_dir():
                continue
            credits = list(rule.assign(stage.judge(read_groups(path, step))))
            records = stage.take().calls
            write_step(out, step, [], credits, records)
            costs += [r.cost_usd for r in records]
    finally:
        stage.close()
    least = "at least " if None in costs else ""
    print(f"{out}: {len(costs)} calls, {least}${sum(c or 0.0 for c in costs):.2f}")


def made_of(criteria: Sequence[Criterion], judge: DictConfig) -> dict[str, Any]:
    """What the scores depend on beside the rollouts: a hash of the criteria's texts, and the judge's options."""
    from omegaconf import OmegaConf

    from draco.run.folder import RESUMABLE, redacted

    #: options that only carry the calls: no score depends on them
    carriage = {n.removeprefix("judge.") for n in RESUMABLE} | {"cache", "backoff_s", "deadline_s", "group_deadline_s"}
    texts = json.dumps([[c.title, c.description, c.evaluator_instruction] for c in criteria])
    options = redacted(OmegaConf.create({"judge": judge}))["judge"]
    return {
        "criteria": hashlib.sha256(texts.encode()).hexdigest()[:16],
        "judge": {k: v for k, v in options.items() if k not in carriage},
    }


def claim(out: Path, made: dict[str, Any]) -> None:
    """Note what the scores in `out` are made of, or see that those there are made of the same.

    Raises:
        ConfigError: they are not, or nothing says what they are made of.
    """
    from draco.core.files import write_json

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
