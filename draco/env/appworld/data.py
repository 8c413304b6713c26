"""The data roots as the trainer sees them: task lists and task specifications, never a ground truth."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draco.core.errors import ConfigError
from draco.core.types import Task
from draco.env.appworld.inside.data_roots import INDEX

__all__ = ["SETUP", "Roots"]

SETUP = (
    "run scripts/setup_appworld.sh --data download (or --data mini) of the repository and set env.data to the folder "
    "that it names"
)


@dataclass(frozen=True, slots=True)
class Roots:
    """The two folders below `env.data`."""

    rollout: Path  #: the folder `data` without ground truth
    full: Path  #: the folder `data` with it: for the evaluator's process

    @classmethod
    def at(cls, folder: str) -> Roots:
        """The roots in a folder that scripts/setup_appworld.sh made.

        Raises:
            ConfigError: they are not there.
        """
        base = Path(folder).expanduser().absolute()
        roots = cls(base / "rollout" / "data", base / "full" / "data")
        if not (roots.rollout / "datasets").is_dir() or not (roots.rollout / INDEX).is_file():
            raise ConfigError(f"env.data={folder}: no AppWorld data there; {SETUP}")
        if "memory" in str(base):
            raise ConfigError(f"env.data={folder}: AppWorld cannot use a path that holds the word 'memory'; move it")
        return roots

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the task lists."""
        return tuple(sorted(p.stem for p in (self.rollout / "datasets").glob("*.txt")))

    def tasks(self, split: str) -> tuple[Task, ...]:
        """Tasks of a split, in the order of its list.

        Raises:
            ConfigError: no such split, or a listed task is missing.
        """
        listed = self.rollout / "datasets" / f"{split}.txt"
        if split not in self.splits:
            raise ConfigError(f"env=appworld has no split {split!r}; expected one of {', '.join(self.splits)}")
        index = json.loads((self.rollout / INDEX).read_text(encoding="utf-8"))
        ids = [line.strip() for line in listed.read_text(encoding="utf-8").splitlines() if line.strip()]
        return tuple(self._task(i, split, index.get(i, {})) for i in ids)

    def _task(self, task_id: str, split: str, known: dict[str, Any]) -> Task:
        if task_id.count("_") != 1:
            raise ConfigError(f"{split}.txt names {task_id!r}; an AppWorld task id is SCENARIO_NUMBER; {SETUP}")
        path = self.rollout / "tasks" / task_id / "specs.json"
        if not path.is_file():
            raise ConfigError(f"{path} is missing though {split}.txt names the task; {SETUP}")
        specs = json.loads(path.read_text(encoding="utf-8"))
        return Task(
            id=task_id,
            instruction=specs["instruction"],
            split=split,
            scenario_id=task_id.split("_")[0],
            difficulty=known.get("difficulty", 0),
            metadata={"supervisor": specs["supervisor"], "datetime": specs["datetime"]},
        )
