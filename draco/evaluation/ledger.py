"""What an evaluation has paid for, on the disk as it comes: a JSONL file beside the result.

{"evaluation": {"agent": …, "split": …, …}}       first line: what was evaluated
{"record": {…}, "usage": {…}}                     one line an episode
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from draco.errors import ConfigError
from draco.evaluation.records import EvalRecord, Usage
from draco.types import Termination

__all__ = ["Ledger"]


class Ledger:
    """The episodes of one evaluation; those that an earlier process played are there already.

    Episodes that no model played (`engine_error` that could have passed: the provider was down, or out of quota) are
    not: they are played again. What a provider refused for good stays.

    Args:
        file: where; made when the first episode is added.
        evaluation: what is evaluated, JSON-able. Its `split` and so on must be those of the file.

    Raises:
        ConfigError: the file holds another evaluation, or is none.
    """

    def __init__(self, file: Path, evaluation: Mapping[str, Any]) -> None:
        self.file, self.evaluation = file, json.loads(json.dumps(evaluation))
        self.episodes: dict[tuple[str, int], tuple[EvalRecord, Usage]] = {}
        self._whole = 0  # bytes up to the end of the last complete line
        self._open: IO[bytes] | None = None
        if file.is_file():
            self._read()

    def _read(self) -> None:
        content = self.file.read_bytes()
        self._whole = content.rfind(b"\n") + 1  # a kill may have cut the last line
        try:
            lines = [json.loads(line) for line in content[: self._whole].splitlines()]
            past = lines[0]["evaluation"] if lines else self.evaluation
            for line in lines[1:]:
                self._keep(_record(line["record"]), Usage(**line["usage"]))
        except (ValueError, KeyError, TypeError) as error:
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

    def _keep(self, record: EvalRecord, usage: Usage) -> None:
        self.episodes[record.task_id, record.sample] = (record, usage)

    def played(self, task_id: str, sample: int) -> bool:
        """Whether this episode need not be played."""
        found = self.episodes.get((task_id, sample))
        return found is not None and (
            found[0].termination != Termination.ENGINE_ERROR or ": refused: " in found[0].error
        )

    def add(self, record: EvalRecord, usage: Usage) -> None:
        """Append one episode; it has left the process when this returns."""
        if self._open is None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._open = self.file.open("ab")
            self._open.truncate(self._whole)
            if not self._whole:
                self._write({"evaluation": self.evaluation})
        self._write({"record": record.as_dict(), "usage": asdict(usage)})
        self._keep(record, usage)

    def _write(self, line: Mapping[str, Any]) -> None:
        assert self._open is not None
        self._open.write(json.dumps(line).encode() + b"\n")
        self._open.flush()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


def _record(content: Mapping[str, Any]) -> EvalRecord:
    lists = {f.name for f in fields(EvalRecord) if str(f.type).startswith("tuple")}
    values: dict[str, Any] = {k: tuple(v) if k in lists else v for k, v in content.items()}
    return EvalRecord(**values)
