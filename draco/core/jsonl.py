"""JSON lines that are appended while something expensive goes on, and gone on with after a kill.

A kill may cut the last line: readers leave it out, and it is cut off before more is appended.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draco.core.errors import ConfigError

__all__ = ["append", "mend", "read"]


def read(file: Path) -> list[Any]:
    """The complete lines; none where there is no file.

    Raises:
        ConfigError: a complete line is no JSON.
    """
    if not file.is_file():
        return []
    content = file.read_bytes()
    rows = []
    for number, line in enumerate(content[: _complete(content)].split(b"\n")[:-1], start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ConfigError(f"{file}, line {number} is no JSON ({error}); delete the file to begin anew") from None
    return rows


def mend(file: Path) -> None:
    """Make the file's folder, and cut off a last line that is not complete."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.is_file():
        with file.open("r+b") as stream:
            stream.truncate(_complete(stream.read()))


def append(file: Path, row: Any) -> None:
    """Add one line; it has left the process when this returns."""
    with file.open("ab") as stream:
        stream.write(json.dumps(row).encode() + b"\n")


def _complete(content: bytes) -> int:
    """Bytes up to the end of the last complete line."""
    return content.rfind(b"\n") + 1
