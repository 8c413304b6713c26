"""A run folder, or a folder of evaluation files, as a report reads it. Any part may be missing."""

from __future__ import annotations

import csv
import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from draco.core.errors import ConfigError
from draco.core.llm.money import Prices, Usage
from draco.run.archive import archived_steps
from draco.run.summary import metric_rows

__all__ = ["Evaluation", "Run", "open_run"]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation file."""

    split: str
    checkpoint: str  #: base | step=000060 | api …
    step: int | None  #: batches that the checkpoint was trained on; None: it is no checkpoint of a run
    n: int
    during_training: bool  #: a point of a curve; tables leave it out
    content: Mapping[str, Any]  #: of the file: see draco.env.success.summarise

    def figure(self, name: str) -> float | None:
        """A number of the summary, or None: the file lacks it or says null."""
        value = self.content.get(name)
        return float(value) if isinstance(value, int | float) else None

    def cost_usd(self, prices: Prices | None) -> float | None:
        """USD of one pass over the tasks: as recorded, else tokens × `prices` where the records count tokens.

        Args:
            prices: of the policy's tokens.
        """
        recorded = self.figure("cost_usd")
        if recorded is not None or prices is None:
            return recorded
        total = 0.0
        for record in self.content.get("records", ()):
            if not record.get("input_tokens"):
                return None
            again = record.get("cached_tokens", 0)
            total += prices.cost(Usage(record["input_tokens"] + again, record["step_tokens"], again))
        return total / self.n if total else None

    @property
    def size(self) -> tuple[int, int]:
        """Tasks and n. An evaluation of a part of the tasks does not stand for all."""
        return int(self.content.get("tasks") or 0), self.n


@dataclass(frozen=True, slots=True)
class Run:
    """What a folder holds."""

    path: Path
    config: Mapping[str, Any]  #: {} for a folder of evaluation files
    summary: Mapping[str, Any]
    metrics: tuple[Mapping[str, float], ...]  #: rows of metrics.csv; a cell that is empty there is not in its row
    evaluations: tuple[Evaluation, ...]
    train_success: Mapping[int, tuple[int, int]]  #: archive step → (successes, rollouts with a known success)
    steps: tuple[int, ...] = field(default=())  #: archived steps

    @property
    def setting(self) -> str:
        """`dynamic+step`, or the agent's name for a folder of evaluation files."""
        rubric, credit = (self.config.get(k, {}).get("name") for k in ("rubric", "credit"))
        if rubric and credit:
            variant = f" ({self._variant})" if self._variant else ""  # each variant of a self-judge is its own setting
            return f"{rubric}{variant}+{credit}"
        agents = {str(e.content["agent"]) for e in self.evaluations if "agent" in e.content}
        return agents.pop() if len(agents) == 1 else self.path.name

    @property
    def trained(self) -> bool:
        """Whether a run is here, and not only evaluation files."""
        return bool(self.config)

    @property
    def seed(self) -> int | None:
        given = self.config.get("seed")
        return None if given is None else int(given)

    @property
    def env(self) -> str:
        return str(self.config.get("env", {}).get("name", ""))

    @property
    def judge(self) -> str:
        """The judge's name for tables: its model, `self (…)` where the policy judges, or empty without a judge."""
        rubric = self.config.get("rubric", {})
        if rubric.get("name") in {"outcome", "random", None}:
            return ""
        return f"self ({self._variant})" if self._variant else str(self.config.get("judge", {}).get("model", ""))

    @property
    def _variant(self) -> str:
        """How the policy judges itself (votes, thinking); empty where another model judges."""
        rubric = self.config.get("rubric", {})
        if rubric.get("name") != "self_judge":
            return ""
        return f"k={rubric.get('k')}, {'thinking' if rubric.get('thinking') else 'no thinking'}"

    def final_evaluations(self, split: str) -> list[Evaluation]:
        """What a table averages: the last three checkpoints among those evaluated on most tasks with the largest n.

        Evaluations during training are not among them.
        """
        found = [e for e in self.evaluations if e.split == split and e.checkpoint != "base" and not e.during_training]
        most = max((e.size for e in found), default=(0, 0))
        kept: dict[str, Evaluation] = {e.checkpoint: e for e in found if e.size == most}
        return sorted(kept.values(), key=lambda e: e.step if e.step is not None else -1)[-3:]

    def base_evaluation(self, split: str) -> Evaluation | None:
        """The untrained policy, evaluated on most tasks, with the largest n."""
        found = [e for e in self.evaluations if e.split == split and e.checkpoint == "base"]
        return max(found, key=lambda e: e.size, default=None)


def open_run(path: Path) -> Run:
    """Read a folder.

    Raises:
        ConfigError: neither a run nor evaluation files are there, or a file is damaged.
    """
    config: Any = {}
    if (path / "config.yaml").is_file():
        config = OmegaConf.to_container(OmegaConf.load(path / "config.yaml"), resolve=False)
        for name in ("rubric", "credit"):  # older runs kept their options one level below
            group = config.setdefault(name, {})
            group |= group.pop("stage", None) or {}
    evaluations = _evaluations(path, int(config.get("steps") or 0))
    if not config and not evaluations:
        raise ConfigError(f"{path}: expected a run folder (config.yaml) or evaluation files (*.json), found neither")
    return Run(
        path=path,
        config=config,
        summary=_json(path / "summary.json") if (path / "summary.json").is_file() else {},
        metrics=tuple(metric_rows(path)),
        evaluations=tuple(evaluations),
        train_success=_train_success(path / "train_success.csv"),
        steps=tuple(archived_steps(path)),
    )


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is no JSON: {error}; delete it or make it again") from None
    return content if isinstance(content, dict) else {}


def _evaluations(path: Path, steps: int) -> list[Evaluation]:
    """Those before and after training (`steps` batches), then those of `evaluations/` and of a folder without a run."""
    named = {"before": ("base", 0), "after": (f"step={steps:06d}", steps)}
    files = {name: path / f"evaluation_{name}.json" for name in named}
    found = [_evaluation(_json(file), *named[name]) for name, file in files.items() if file.is_file()]
    for file in sorted([*path.glob("evaluations/*.json"), *path.glob("*-n*.json")]):
        content = _json(file)
        if "tgc_pass_hat" not in content or "checkpoints" in content:
            continue  # a leaderboard file, or means over checkpoints, which are computed anew
        during = re.fullmatch(r"step=(\d+)", file.stem)
        checkpoint = file.stem if during else str(content.get("checkpoint", file.stem))
        step = re.fullmatch(r"step=(\d+)", checkpoint)
        batches = 0 if checkpoint == "base" else int(step[1]) if step else None
        found.append(_evaluation(content, checkpoint, batches, during=bool(during)))
    return found


def _evaluation(content: Mapping[str, Any], checkpoint: str, step: int | None, *, during: bool = False) -> Evaluation:
    return Evaluation(str(content.get("split", "")), checkpoint, step, int(content.get("n", 1)), during, content)


def _train_success(file: Path) -> dict[int, tuple[int, int]]:
    counts: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    if file.is_file():
        with open(file, encoding="utf-8", newline="") as stream:
            for row in csv.DictReader(stream):
                if row["success"] != "":
                    counts[int(row["step"])][0] += int(row["success"])
                    counts[int(row["step"])][1] += 1
    return {step: (good, known) for step, (good, known) in sorted(counts.items())}
