"""The disk space that a run needs, checked before its first rollout."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draco.core.errors import ConfigError
from draco.policy.policy import Policy
from draco.run.archive import step_folders
from draco.run.checkpoint import checkpoints, kept, size_of
from draco.run.loader import TaskLoader

__all__ = ["check_disk"]

log = logging.getLogger("draco")

#: Bytes in the archive for a token of the longest allowed trajectory: ids, spans and log-probs, and the text, once in
#: the transcript and about four times in judge calls, compressed. Measured on `desk`: 32.
_BYTES_PER_TOKEN = 45


def check_disk(
    run: Path, policy: Policy, loader: TaskLoader, options: Mapping[str, Any], max_tokens: int, *, refuse: bool
) -> str:
    """Log in one line what the run will need, and refuse a run that would fill the disk.

    The size of checkpoints is exact. The size of the archive is measured on existing steps; before the first step it is
    an upper bound, for which no run is refused.

    Args:
        run: run folder.
        policy: its adapter is saved.
        loader: steps, epochs and sizes of the run.
        options: `checkpoint` of the configuration.
        max_tokens: of the longest possible trajectory.
        refuse: raise if the disk is too small; otherwise only warn.

    Returns:
        the line.

    Raises:
        ConfigError: the free disk is too small.
    """
    size, left = size_of(policy), loader.steps - loader.position
    keep = {name: options[name] for name in ("save_every", "keep_last", "keep_every")}
    steps = kept(loader.steps, epoch=loader.steps_per_epoch, **keep)
    count = max(len(steps) + 1 - len(checkpoints(run)), 1)  # one more exists until the oldest is deleted
    folders = step_folders(run)
    if folders:
        each = sum(f.stat().st_size for folder in folders for f in folder.iterdir()) / len(folders)
    else:
        each = float(loader.tasks_per_step * loader.group_size * max_tokens * _BYTES_PER_TOKEN)
    free = shutil.disk_usage(run).free
    about = "" if folders else "at most "
    line = (
        f"disk: a checkpoint is {_size(size)}, {len(steps)} are kept = {_size(size * len(steps))}; archive {about}"
        f"{_size(each)} a step, {left} steps to go = {_size(each * left)}; {_size(free)} free in {run}"
    )
    log.info("%s", line)
    needed = size * count + each * left
    if refuse and (needed if folders else size * count) > free:
        raise ConfigError(
            f"{line}: too small; free some, choose another run=, keep fewer checkpoints (checkpoint.save_every, "
            "keep_last, keep_every), or set checkpoint.check_disk=false"
        )
    if needed > free:
        log.warning("the disk may be too small for this run; if it fills up, free some and resume")
    return line


def _size(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"
