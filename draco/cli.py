"""The command line: `python train.py …` and `draco-train …`."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from rich.console import Console

from draco.errors import ConfigError, DracoError

__all__ = ["main"]

log = logging.getLogger("draco")


def main() -> None:
    """Entry point.

    Exit status: 0 done, 1 a fault, 2 the configuration cannot work, 3 a guard stopped the run, 130 interrupted.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # custom environments and strategies beside the user's own files
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    log.setLevel(logging.INFO)
    _main()


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
def _main(config: DictConfig) -> dict[str, Any]:
    hydra_config = HydraConfig.get()
    sweeping = hydra_config.mode is RunMode.MULTIRUN
    overrides = list(hydra_config.overrides.task)
    try:
        return _job(config, overrides, hydra_config.runtime.output_dir, sweeping)
    except DracoError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {_escape(str(error))}", highlight=False, soft_wrap=True)
        if sweeping:  # Hydra would end a sweep at an exception, and without the table
            return {"error": str(error)}
        sys.exit(2 if isinstance(error, ConfigError) else 3)
    except Exception as error:
        if not sweeping:
            raise
        log.exception("job failed")
        return {"error": f"{type(error).__name__}: {error}"}


def _job(config: DictConfig, overrides: list[str], output_dir: str, sweeping: bool) -> dict[str, Any]:
    from draco.run import train  # torch and lightning load here, after the configuration has composed
    from draco.runfolder import resume_config
    from draco.summary import closing_table

    named = [o for o in overrides if o.split("=", 1)[0] in {"run", "resume"}]
    if sweeping and named:
        raise ConfigError(f"{named[0]} names one folder for all jobs of a sweep; set hydra.sweep.dir=FOLDER instead")
    if sweeping:
        config.run = os.path.relpath(output_dir)
    if config.resume:
        from pathlib import Path

        config = resume_config(Path(config.resume), config, overrides)
    try:
        summary = train(config)
    except SystemExit as stop:  # Lightning ends an interrupted fit this way, after the callbacks have saved
        log.warning("interrupted; go on with: python train.py resume=%s", config.run)
        raise SystemExit(130) from stop
    except KeyboardInterrupt:
        log.warning("interrupted before training began; nothing to resume")
        raise SystemExit(130) from None
    if summary:
        closing_table(summary, Console())
    return summary


def _escape(text: str) -> str:
    return text.replace("[", "\\[")
