"""Files and folders that are complete or not there, after a kill and after a power cut.

What is written goes to a name that ends in ``.tmp``, reaches the disk, and is renamed. Readers ignore such names.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

__all__ = ["publish", "remove", "sync", "write_text"]


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
