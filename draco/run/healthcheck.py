"""`python -m draco.run.healthcheck`, for the container: is a draco process running, and the working folder writable?

Fast: it imports neither torch nor litellm.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

__all__ = ["healthy"]


def healthy(proc: Path = Path("/proc"), folder: Path = Path()) -> str:
    """What is wrong; empty if nothing is."""
    names = ("draco", "train.py")
    running = False
    for entry in proc.iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            words = (entry / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
        except OSError:
            continue
        running |= any(Path(w).name in names for w in words)
    if not running:
        return "no draco process is running"
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return f"{folder.resolve()} takes no files: {error.strerror}"
    return ""


if __name__ == "__main__":
    fault = healthy()
    print(fault or "ok")
    sys.exit(bool(fault))
