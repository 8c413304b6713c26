"""The run folder: created once, never overwritten by accident, used by one job at a time, secrets redacted."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from draco.config.compose import stored_config
from draco.core import files
from draco.core.errors import ConfigError
from draco.run.archive import step_folders
from draco.run.loggers import read_metrics, write_metrics

__all__ = [
    "check_free", "discard_empty", "locked", "prepare", "redacted", "resume_config", "set_aside", "write_config",
]  # fmt: skip

log = logging.getLogger("draco")

_SECRET = re.compile(r"(key|token|secret|password|credential)s?$", re.IGNORECASE)
#: of a URL: user:password@
_PASSWORD = re.compile(r"(?<=://)[^/\s@]+(?=@)")
#: how judge calls are carried and what they may cost: a resume may change it, for no reply depends on it
_JUDGE = (
    "api_base", "concurrency", "requests_per_min", "tokens_per_min", "timeout_s", "max_retries", "max_usd",
    "max_tokens_total", "on_model_change", "max_failed_share", "prices", "deadline_s", "group_deadline_s", "fallbacks",
    "fallback_s",
)  # fmt: skip
#: what a resume may change: length and placement
RESUMABLE = (
    "steps",
    "trainer",
    "distributed",
    "logger",
    "checkpoint",
    "preflight",
    *(f"judge.{name}" for name in _JUDGE),
)
_LOCK = "lock"
#: what a run makes before it loads anything
_MADE_FIRST = frozenset({_LOCK, "config.yaml", "transcript_secret", "judge"})
_REDACTED = "<redacted>"


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Keep a run folder to this job. The lock of a dead process is taken over.

    The kernel frees the lock when its process ends, however it ends; the file names the process for the error message.

    Raises:
        ConfigError: a live process has it.
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
        except FileNotFoundError:  # the job before has just taken its empty folder away
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _owner(os.pread(descriptor, 4096, 0))
            os.close(descriptor)
            raise ConfigError(f"{run} is in use by process {owner}; wait for it to end, or stop it") from None
        except OSError as error:  # a file system without locks
            log.warning("%s cannot be locked (%s): do not start a second job on it", run, error.strerror)
        with suppress(FileNotFoundError):  # its last owner may have removed the file between our open and our lock
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
    """Other than what a job leaves that ended before it had made anything."""
    return any(p.name not in _MADE_FIRST and p.suffix != ".tmp" for p in run.iterdir())


def discard_empty(run: Path) -> None:
    """Remove what a run made before its configuration was refused; a folder that holds more stays as it is."""
    if run.is_dir() and not _holds_something(run):
        for path in run.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != _LOCK:
                path.unlink()


def check_free(run: Path, *, overwrite: bool) -> bool:
    """Whether the folder holds something that `overwrite` may delete.

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
    """Make an empty run folder.

    Raises:
        ConfigError: see `check_free`.
    """
    if check_free(run, overwrite=overwrite):
        for path in sorted(run.iterdir(), key=lambda p: p.name == "config.yaml"):  # last: it marks a run
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != _LOCK:
                path.unlink()
    run.mkdir(parents=True, exist_ok=True)


def write_config(config: DictConfig, run: Path) -> None:
    """config.yaml: resolved, secrets redacted."""
    content = OmegaConf.create(redacted(config))
    OmegaConf.update(content, "resume", None)
    files.write_text(run / "config.yaml", OmegaConf.to_yaml(content))


def redacted(config: DictConfig) -> Any:
    """The resolved configuration as plain containers, secret-looking values replaced."""
    return _redact(OmegaConf.to_container(config, resolve=True))


def _redact(node: Any) -> Any:
    if isinstance(node, str):
        return _PASSWORD.sub(_REDACTED, node)
    if isinstance(node, dict):
        return {
            k: _REDACTED if _SECRET.search(str(k)) and isinstance(v, str) and v else _redact(v) for k, v in node.items()
        }
    return [_redact(v) for v in node] if isinstance(node, list) else node


def resume_config(folder: Path, given: DictConfig, overrides: list[str]) -> DictConfig:
    """Configuration of the run to resume, with only `steps` and placement taken from the command line.

    Raises:
        ConfigError: no such run, or an override that a resume may not change.
    """
    config = stored_config(folder, "resume")
    names = [o.split("=", 1)[0].lstrip("+~") for o in overrides]
    secret = [n for n in names if _SECRET.search(n)]
    wrong = [n for n in names if n not in {"resume", "run", *secret} and not n.startswith(RESUMABLE)]
    if wrong:
        raise ConfigError(
            f"resume={folder} goes on with the run's own configuration; {', '.join(wrong)} cannot change "
            f"(only {', '.join(RESUMABLE)} can): start a new run instead"
        )
    if "distributed" not in config and "distributed" in given:  # of a run that an older version began
        config.distributed = given.distributed
    for name in names:
        if name in {"resume", "run", *secret}:
            continue
        key = name.split("@")[0]
        value = OmegaConf.select(given, key)
        OmegaConf.update(config, key, value, merge=False, force_add=True)  # a trainer replaces the other as a whole
        for copy in (f"callbacks.{key}", f"rubric.{key}"):  # stored resolved: the parts have copies of their own
            if OmegaConf.select(config, copy.rpartition(".")[0]) is not None and (
                key.startswith("judge.") or OmegaConf.select(config, copy) is not None
            ):
                OmegaConf.update(config, copy, value, force_add=True)
        guard = "rubric.max_failed_share"  # a copy of the judge's, or in place of it
        if key == "judge.max_failed_share" and OmegaConf.select(config, guard) is not None:
            OmegaConf.update(config, guard, value)
    again = {n.rsplit(".", 1)[-1]: OmegaConf.select(given, n) for n in secret}
    config = DictConfig(_restored(OmegaConf.to_container(config), again))
    if missing := sorted({n for n in _redacted_names(config) if n not in again}):
        raise ConfigError(f"resume={folder}: {', '.join(missing)} is not kept in a run folder; give it again")
    moved = _moved(OmegaConf.to_container(config), config.run, str(folder))
    return DictConfig({**moved, "run": str(folder), "resume": str(folder), "overwrite": False})


def _moved(node: Any, old: str, new: str) -> Any:
    """`node` with the path of the run folder, which its parts have stored resolved, replaced by where it is now."""
    if isinstance(node, dict):
        return {k: _moved(v, old, new) for k, v in node.items()}
    if isinstance(node, list):
        return [_moved(v, old, new) for v in node]
    if isinstance(node, str) and (node == old or node.startswith(f"{old}/")):
        return new + node.removeprefix(old)
    return node


def _restored(node: Any, secrets: dict[str, Any]) -> Any:
    """`node` with the redacted values that were given again, by the last part of their name."""
    if isinstance(node, dict):
        return {k: secrets.get(k, v) if v == _REDACTED else _restored(v, secrets) for k, v in node.items()}
    return [_restored(v, secrets) for v in node] if isinstance(node, list) else node


def _redacted_names(node: Any, name: str = "") -> Iterator[str]:
    if isinstance(node, DictConfig):
        for key, value in node.items():
            yield from _redacted_names(value, str(key))
    elif isinstance(node, ListConfig):
        for value in node:
            yield from _redacted_names(value, name)
    elif node == _REDACTED:
        yield name


def set_aside(run: Path, step: int, *, goes_on: bool) -> None:
    """Move what lies beyond the checkpoint to ``aside/TIME/``, so that the step is made and recorded anew.

    Archive steps, rows of metrics.csv and evaluations of later steps; what a run writes at its end; a half-written file
    is deleted.

    Args:
        run: run folder.
        step: batches behind the checkpoint.
        goes_on: more steps follow, so that an evaluation after the last one is out of date.
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
    archived = [f for f in step_folders(run) if int(f.name.removeprefix("step=")) >= step]
    evaluations = [f for f in run.glob("evaluations/step=*.json") if int(f.stem.removeprefix("step=")) > step]
    ends = [run / name for name in ("summary.json", "train_success.csv", "report.html")]
    if goes_on:
        ends.append(run / "evaluation_after.json")
    for path in (*archived, *evaluations, *(p for p in ends if p.is_file())):
        target = aside / path.relative_to(run)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
        moved.append(str(path.relative_to(run)))
    if rows := _cut_metrics(run / "metrics.csv", step, aside):
        moved.append(rows)
    if moved:
        log.info("set aside in %s: %s", aside, ", ".join(moved))


def _cut_metrics(path: Path, step: int, aside: Path) -> str:
    """Drop later rows, and the closing figures, which the last step gets again; the old file is kept."""
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
