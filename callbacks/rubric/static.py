"""Static rubric: one fixed set of criteria for all tasks; nothing is proposed or merged (Appendix C).

    score → dropout
    R_i = (p_i − f_i) / (p_i + f_i) over the criteria that survive

Why: the baseline for dynamic rubrics. Prompts, dropout and rewards are the same; only the source of the criteria
differs. A checkpoint need not save any state: the set is a file, which the configuration names.
"""

from __future__ import annotations

import logging
from importlib.resources import files
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from draco.core.errors import ConfigError
from draco.core.types import Criterion, Group
from draco.judge.client import JudgeClient
from draco.judge.stage import JudgedRubric

__all__ = ["StaticRubric", "load_criteria"]

log = logging.getLogger("draco")

_FIELDS = ("title", "description", "evaluator_instruction")


class StaticRubric(JudgedRubric):
    """Judges every group by the same criteria."""

    def __init__(self, judge: JudgeClient, criteria: str = "desk", **options: Any) -> None:
        """Set up the stage.

        Args:
            judge: makes the calls.
            criteria: path of a YAML file, or the name of a packaged set.
            options: see `JudgedRubric`.
        """
        super().__init__(judge, **options)
        self.static_criteria = load_criteria(criteria)

    def check(self) -> None:
        """A rule-based judge finds a criterion that it has no rule for not applicable.

        Raises:
            ConfigError: it has no rule for any of the criteria, so that no reward would ever differ from 0.
        """
        known = self.client.known_titles()
        unknown = [] if known is None else [c.title for c in self.static_criteria if c.title not in known]
        if len(unknown) == len(self.static_criteria):
            raise ConfigError(
                f"judge.model={self.client.model} has a rule for none of the static rubric's criteria and would reward "
                "nothing; use judge=litellm judge.model=PROVIDER/MODEL, or titles of its own set (rubric.criteria=desk)"
            )
        if unknown:
            log.warning("judge.model=%s has no rule for %s: never applicable", self.client.model, ", ".join(unknown))
        super().check()

    def criteria(self, group: Group) -> tuple[Criterion, ...]:
        """The fixed set."""
        return self.static_criteria


def load_criteria(source: str) -> tuple[Criterion, ...]:
    """Read a set of criteria: `criteria:` with a list of title, description and evaluator_instruction.

    Raises:
        ConfigError: no such file or packaged set, no such list, a missing field, or a repeated title.
    """
    packaged = files("draco.env")
    names = sorted(p.name for p in packaged.iterdir() if (p / "rubric.yaml").is_file())
    if source in names:
        text = (packaged / source / "rubric.yaml").read_text(encoding="utf-8")
    elif Path(source).is_file():
        text = Path(source).read_text(encoding="utf-8")
    else:
        raise ConfigError(f"no static rubric {source!r}: neither a file nor a packaged set ({', '.join(names)})")
    try:
        data = OmegaConf.to_container(OmegaConf.create(text))
    except (OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(f"static rubric {source!r} is no valid YAML: {error}") from error
    rows = data.get("criteria") if isinstance(data, dict) else None
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f"static rubric {source!r} must hold a list under `criteria:`")
    for row in rows:
        if not isinstance(row, dict) or not all(isinstance(row.get(f), str) and row[f].strip() for f in _FIELDS):
            raise ConfigError(f"static rubric {source!r}: every criterion needs the texts {', '.join(_FIELDS)}: {row}")
    texts = [[" ".join(row[f].split()) for f in _FIELDS] for row in rows]
    found = tuple(Criterion(title, description, instruction) for title, description, instruction in texts)
    if len({c.title for c in found}) < len(found):
        raise ConfigError(f"static rubric {source!r}: titles must be unique")
    return found
