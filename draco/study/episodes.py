"""The episodes that an evaluation has paid for, on the disk as they end: a JSONL file beside the result.

{"evaluation": {"agent": …, "split": …, …}}       first line: what was evaluated
{"record": {…}}                                   one line an episode
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from draco.core import files
from draco.core.errors import ConfigError
from draco.core.types import Task, Termination
from draco.env.records import EvalRecord

__all__ = ["EpisodeFile"]


class EpisodeFile:
    """The episodes of one evaluation, those of earlier processes included.

    An episode that ended in `engine_error` because the provider was down or out of quota is played again. One that the
    provider refused for good is not.

    Args:
        file: where; made when the first episode is added.
        evaluation: what is evaluated, JSON-able. Its `split` and so on must be those of the file.

    Raises:
        ConfigError: the file holds another evaluation, or is none.
    """

    def __init__(self, file: Path, evaluation: Mapping[str, Any]) -> None:
        self.file, self.evaluation = file, json.loads(json.dumps(evaluation))
        self.episodes: dict[tuple[str, int], EvalRecord] = {}
        self._begun = False  #: something was appended by this process
        self._read()

    def _read(self) -> None:
        lines = files.read_lines(self.file)
        try:
            past = lines[0]["evaluation"] if lines else self.evaluation
            for line in lines[1:]:
                self._keep(_record(line["record"]))
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"{self.file} is no list of evaluated episodes ({type(error).__name__}: {error}); delete it, or give "
                "another out="
            ) from None
        for name in sorted(past.keys() | self.evaluation.keys()):
            if past.get(name) != self.evaluation.get(name):
                raise ConfigError(
                    f"{self.file} holds episodes with {name}={past.get(name)}, not {self.evaluation.get(name)}; give "
                    "another out=, or what it began with"
                )

    def _keep(self, record: EvalRecord) -> None:
        self.episodes[record.task_id, record.sample] = record

    def missing(self, episodes: Iterable[tuple[Task, int]]) -> list[tuple[Task, int]]:
        """Those of (task, sample) that must be played."""
        return [(task, sample) for task, sample in episodes if not self._final(task.id, sample)]

    def _final(self, task_id: str, sample: int) -> bool:
        found = self.episodes.get((task_id, sample))
        return found is not None and (found.termination != Termination.ENGINE_ERROR or ": refused: " in found.error)

    def add(self, record: EvalRecord) -> None:
        """Append one episode; it has left the process when this returns."""
        if not self._begun:
            files.mend_lines(self.file)
            if not self.file.is_file() or not self.file.stat().st_size:
                files.append_line(self.file, {"evaluation": self.evaluation})
            self._begun = True
        files.append_line(self.file, {"record": record.as_dict()})
        self._keep(record)


def _record(content: Mapping[str, Any]) -> EvalRecord:
    lists = {f.name for f in fields(EvalRecord) if str(f.type).startswith("tuple")}
    values: dict[str, Any] = {k: tuple(v) if k in lists else v for k, v in content.items()}
    return EvalRecord(**values)
