"""The run folder: its lock, its config.yaml, overwriting it, and going on with it (resume)."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from draco.config.compose import stored_config
from draco.core import files
from draco.core.errors import ConfigError
from draco.run.archive import step_folders
from draco.run.loggers import read_metrics, write_metrics

__all__ = [
    "check_free", "discard_empty", "locked", "prepare", "redacted", "resume_config", "set_aside", "write_config",
]  # fmt: skip

log = logging.getLogger("draco")

_REDACTED = "<redacted>"
_SECRET = re.compile(r"(key|token|secret|password|credential)s?$", re.IGNORECASE)  #: names of options with a secret
_PASSWORD = re.compile(r"(?<=://)[^/\s@]+(?=@)")  #: user:password of a URL
#: judge options that change no reply, only how calls are sent and what they may cost
_JUDGE = (
    "api_base", "concurrency", "requests_per_min", "tokens_per_min", "timeout_s", "max_retries", "max_usd",
    "max_tokens_total", "on_model_change", "max_failed_share", "prices", "deadline_s", "group_deadline_s", "fallbacks",
    "fallback_s",
)  # fmt: skip
#: options that a resume may change
RESUMABLE = (
    "steps", "trainer", "distributed", "logger", "checkpoint", "preflight", *(f"judge.{name}" for name in _JUDGE),
)  # fmt: skip
_LOCK = "lock"
#: what a run creates before it loads anything
_CREATED_FIRST = frozenset({_LOCK, "config.yaml", "transcript_secret", "judge"})


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """This job alone uses the run folder within. The lock of a dead process is taken over.

    The kernel frees the lock when its process ends; the lock file names the process, for the error message.

    Raises:
        ConfigError: a live process uses the folder.
    """
    path = run / _LOCK
    descriptor = _acquire(run, path)
    try:
        before = os.pread(descriptor, 4096, 0)
        if before:
            log.info("took over the lock of process %s, which is gone", _owner(before))
        mine = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(mine).encode(), 0)
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _acquire(run: Path, path: Path) -> int:
    while True:
        run.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # the job before has just removed its empty folder
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _owner(os.pread(descriptor, 4096, 0))
            os.close(descriptor)
            raise ConfigError(f"{run} is in use by process {owner}; wait for it to end, or stop it") from None
        except OSError as error:  # a file system that cannot lock
            log.warning("%s cannot be locked (%s): do not start a second job on it", run, error.strerror)
        with suppress(FileNotFoundError):  # the last owner may have removed the file after we opened it
            if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        os.close(descriptor)


def _owner(content: bytes) -> str:
    try:
        owner = json.loads(content)
        return f"{owner['pid']} on {owner['host']} since {owner['since']}"
    except (ValueError, KeyError, TypeError):
        return "(unknown)"


def _holds_something(run: Path) -> bool:
    """Whether there is more than what a job leaves that ended at its very start."""
    return any(p.name not in _CREATED_FIRST and p.suffix != ".tmp" for p in run.iterdir())


def discard_empty(run: Path) -> None:
    """Remove what a run wrote before its configuration was refused. A folder that holds more is left alone."""
    if run.is_dir() and not _holds_something(run):
        for path in run.iterdir():
            _delete(path)


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    elif path.name != _LOCK:
        path.unlink()


def check_free(run: Path, *, overwrite: bool) -> bool:
    """Whether the folder holds something, which `overwrite` may delete.

    Raises:
        ConfigError: it holds something and may not be overwritten.
    """
    if not run.is_dir() or not _holds_something(run):
        return False
    if not overwrite:
        raise ConfigError(
            f"the run folder {run} exists and is not empty; continue it with resume={run}, replace it with "
            "overwrite=true, or choose another run="
        )
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"{run} holds no draco run (no config.yaml), so overwrite=true will not delete it")
    return True


def prepare(run: Path, *, overwrite: bool) -> None:
    """Create an empty run folder.

    Raises:
        ConfigError: see `check_free`.
    """
    if check_free(run, overwrite=overwrite):
        for path in sorted(run.iterdir(), key=lambda p: p.name == "config.yaml"):  # config.yaml last
            _delete(path)
    run.mkdir(parents=True, exist_ok=True)


def write_config(config: DictConfig, run: Path) -> None:
    """Write config.yaml: resolved, without secrets."""
    content = OmegaConf.create(redacted(config))
    OmegaConf.update(content, "resume", None)
    files.write_text(run / "config.yaml", OmegaConf.to_yaml(content))


def redacted(config: DictConfig) -> Any:
    """The resolved configuration as plain containers, without secrets."""

    def redact(name: str, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return _REDACTED if _SECRET.search(name) and value else _PASSWORD.sub(_REDACTED, value)

    return _mapped(OmegaConf.to_container(config, resolve=True), redact)


def _mapped(node: Any, change: Callable[[str, Any], Any], name: str = "") -> Any:
    """A copy of nested containers with every value replaced by `change(its key, value)`; list items have no key."""
    if isinstance(node, dict):
        return {key: _mapped(value, change, str(key)) for key, value in node.items()}
    return [_mapped(value, change) for value in node] if isinstance(node, list) else change(name, node)


def resume_config(folder: Path, given: DictConfig, overrides: list[str]) -> DictConfig:
    """The configuration of the run to resume, changed by the overrides that a resume may have.

    Args:
        folder: of the run.
        given: configuration composed from the overrides.
        overrides: of the command line.

    Raises:
        ConfigError: no such run, an override that a resume may not change, or a secret is missing.
    """
    config = stored_config(folder, "resume")
    names = [o.split("=", 1)[0].lstrip("+~") for o in overrides]
    secrets = {n.rsplit(".", 1)[-1]: OmegaConf.select(given, n) for n in names if _SECRET.search(n)}
    changes = [n for n in names if n not in {"resume", "run"} and not _SECRET.search(n)]
    if wrong := [n for n in changes if not n.startswith(RESUMABLE)]:
        raise ConfigError(
            f"resume={folder} goes on with the run's own configuration; {', '.join(wrong)} cannot change "
            f"(only {', '.join(RESUMABLE)} can): start a new run instead"
        )
    for name in changes:
        key = name.split("@")[0]
        _change(config, key, OmegaConf.select(given, key))
    old, missing = config.run, set[str]()

    def restore(name: str, value: Any) -> Any:
        if value == _REDACTED:
            missing.update({name} - secrets.keys())
            return secrets.get(name, value)
        if isinstance(value, str) and (value == old or value.startswith(f"{old}/")):  # the folder may have moved
            return str(folder) + value.removeprefix(old)
        return value

    restored = _mapped(OmegaConf.to_container(config), restore)
    if missing:
        raise ConfigError(f"resume={folder}: {', '.join(sorted(missing))} is not kept in a run folder; give it again")
    return DictConfig({**restored, "run": str(folder), "resume": str(folder), "overwrite": False})


def _change(config: DictConfig, key: str, value: Any) -> None:
    """Set an option, and the copies of it in other sections: a stored configuration has no interpolations."""
    OmegaConf.update(config, key, value, merge=False, force_add=True)  # replaces a whole section such as `trainer`
    for copy in (f"callbacks.{key}", f"rubric.{key}"):
        if OmegaConf.select(config, copy.rpartition(".")[0]) is not None and (
            key.startswith("judge.") or OmegaConf.select(config, copy) is not None
        ):
            OmegaConf.update(config, copy, value, force_add=True)
    share = "rubric.max_failed_share"  # a rubric may have this option itself
    if key == "judge.max_failed_share" and OmegaConf.select(config, share) is not None:
        OmegaConf.update(config, share, value)


def set_aside(run: Path, step: int, *, goes_on: bool) -> None:
    """Move everything later than the checkpoint to ``aside/TIME/``, because the run will write it again.

    These are archive steps, rows of metrics.csv, evaluations of later steps, and what a run writes at its end.
    Half-written files are deleted.

    Args:
        run: run folder.
        step: number of batches done at the checkpoint.
        goes_on: more steps follow, so the evaluation after the last step is out of date.
    """
    for pattern in ("archive/*.tmp", "checkpoints/*.tmp", "*.tmp"):
        for path in run.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    aside = run / "aside" / time.strftime("%Y%m%d-%H%M%S")
    number = 1
    while aside.exists():
        number += 1
        aside = aside.with_name(f"{aside.name.split('.')[0]}.{number}")
    moved: list[str] = []
    archived = [f for f in step_folders(run) if files.step_of(f) >= step]
    evaluations = [f for f in run.glob("evaluations/step=*.json") if files.step_of(f) > step]
    ends = [run / name for name in ("summary.json", "train_success.csv", "report.html")]
    if goes_on:
        ends.append(run / "evaluation_after.json")
    for path in (*archived, *evaluations, *(p for p in ends if p.is_file())):
        target = aside / path.relative_to(run)
        target.parent.mkdir(parents=True, exist_ok=True)
        moved.append(str(path.relative_to(run)))
        path.rename(target)
    if rows := _cut_metrics(run / "metrics.csv", step, aside):
        moved.append(rows)
    if moved:
        log.info("set aside in %s: %s", aside, ", ".join(moved))


def _cut_metrics(path: Path, step: int, aside: Path) -> str:
    """Remove later rows and the final figures (`summary/`) from metrics.csv; the old file is copied to `aside`.

    Returns:
        what was removed, in words; empty if nothing was.
    """
    columns, rows = read_metrics(path)
    kept = [
        {k: "" if k.startswith("summary/") else v for k, v in row.items()} for row in rows if int(row["step"]) <= step
    ]
    filled = [c for c in columns if c == "step" or any(row[c] != "" for row in kept)]
    if len(kept) == len(rows) and filled == columns:
        return ""
    aside.mkdir(parents=True, exist_ok=True)
    shutil.copy2(path, aside / path.name)
    write_metrics(path, filled, [{c: row[c] for c in filled} for row in kept])
    later = [int(row["step"]) for row in rows if int(row["step"]) > step]
    return f"metrics of steps {later[0]} to {later[-1]}" if later else "the closing figures in metrics.csv"
