"""The command line: `python train.py …` and `draco-train …`."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from rich.console import Console

from draco.errors import ConfigError, DracoError, TrainingStopped

__all__ = ["main"]

log = logging.getLogger("draco")


def main() -> None:
    """Entry point.

    Exit status: 0 done, 1 a fault, 2 the configuration cannot work, 3 a guard stopped the run, 75 stopped by SIGTERM,
    SIGUSR1 or SIGUSR2 with its state saved (EX_TEMPFAIL: a launcher may start it again with resume=), 130 Ctrl-C.
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
    from pathlib import Path

    from lightning.pytorch.utilities.exceptions import SIGTERMException

    from draco.distributed import launched
    from draco.interrupt import EXIT_INTERRUPTED, EXIT_REQUEUE, Interrupted
    from draco.placement import launch_processes
    from draco.run import train  # torch and lightning load here, after the configuration has composed
    from draco.runfolder import resume_config
    from draco.summary import closing_table

    named = [o for o in overrides if o.split("=", 1)[0] in {"run", "resume"}]
    if sweeping and named:
        raise ConfigError(f"{named[0]} names one folder for all jobs of a sweep; set hydra.sweep.dir=FOLDER instead")
    if sweeping and launched() > 1:
        raise ConfigError("a sweep runs its jobs one after another in one process; start one torchrun a job instead")
    if sweeping:
        config.run = os.path.relpath(output_dir)
    elif launched() > 1 and int(os.environ["RANK"]) and not config.resume:
        with contextlib.suppress(OSError):  # Hydra made a folder for every process; the run is rank 0's
            if Path(output_dir).resolve() != Path.cwd():
                Path(output_dir).rmdir()
    if config.resume:
        if Path(output_dir).resolve() != Path(config.resume).resolve():
            with contextlib.suppress(OSError):  # Hydra made the folder that a new run would have had
                Path(output_dir).rmdir()
        config = resume_config(Path(config.resume), config, overrides)
    launch_processes(config, overrides, sweeping=sweeping)  # does not return where the trainer wants several
    go_on = f"go on with: python train.py resume={config.run}"
    try:
        summary = train(config)
    except Interrupted as stop:
        log.warning("%s: stopped; %s", stop, go_on)
        raise SystemExit(stop.status) from None
    except SIGTERMException:  # Lightning's own, where another rank or its handler was faster
        log.warning("SIGTERM: stopped; %s", go_on)
        raise SystemExit(EXIT_REQUEUE) from None
    except KeyboardInterrupt:
        log.warning("interrupted before the run began")
        raise SystemExit(EXIT_INTERRUPTED) from None
    except TrainingStopped as error:
        raise TrainingStopped(f"{error}; its state is saved, {go_on}") from error
    if summary:
        closing_table(summary, Console())
    return summary


def _escape(text: str) -> str:
    return text.replace("[", "\\[")
