"""The run folder: created once, never overwritten by accident, secrets redacted."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from draco.errors import ConfigError

__all__ = ["prepare", "redacted", "resume_config"]

_SECRET = re.compile(r"(key|token|secret|password|credential)s?$", re.IGNORECASE)
#: what a resume may change: length and placement
RESUMABLE = ("steps", "trainer", "logger", "callbacks.checkpoint.save_every", "callbacks.checkpoint.keep_last")


def prepare(run: Path, *, overwrite: bool) -> None:
    """Make an empty run folder.

    Raises:
        ConfigError: it holds something and `overwrite` is not set.
    """
    if run.is_dir() and any(run.iterdir()):
        if not overwrite:
            raise ConfigError(
                f"the run folder {run} exists and is not empty; continue it with resume={run}, replace it with "
                "overwrite=true, or choose another run="
            )
        if not (run / "config.yaml").is_file():
            raise ConfigError(f"{run} holds no draco run (no config.yaml), so overwrite=true will not delete it")
        shutil.rmtree(run)
    run.mkdir(parents=True, exist_ok=True)


def redacted(config: DictConfig) -> Any:
    """The resolved configuration as plain containers, secret-looking values replaced."""
    return _redact(OmegaConf.to_container(config, resolve=True))


def _redact(node: Any) -> Any:
    if isinstance(node, dict):
        return {
            k: "<redacted>" if _SECRET.search(str(k)) and isinstance(v, str) and v else _redact(v)
            for k, v in node.items()
        }
    return [_redact(v) for v in node] if isinstance(node, list) else node


def resume_config(folder: Path, given: DictConfig, overrides: list[str]) -> DictConfig:
    """Configuration of the run to resume, with only `steps` and placement taken from the command line.

    Raises:
        ConfigError: no such run, or an override that a resume may not change.
    """
    file = folder / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"resume={folder}: no run there (config.yaml not found); pass the run folder")
    names = [o.split("=", 1)[0].lstrip("+~") for o in overrides]
    wrong = [n for n in names if n not in {"resume", "run"} and not n.startswith(RESUMABLE)]
    if wrong:
        raise ConfigError(
            f"resume={folder} goes on with the run's own configuration; {', '.join(wrong)} cannot change "
            f"(only {', '.join(RESUMABLE)} can): start a new run instead"
        )
    config = OmegaConf.load(file)
    assert isinstance(config, DictConfig)
    for name in names:
        if name not in {"resume", "run"}:
            key = name.split("@")[0]
            OmegaConf.update(config, key, OmegaConf.select(given, key), force_add=True)
    config.run, config.resume, config.overwrite = str(folder), str(folder), False
    return config
