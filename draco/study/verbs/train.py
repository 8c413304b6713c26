"""`draco train`: one run, or a sweep. Hydra reads the options; conf/train.yaml names them all."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draco.config.arguments import Command, passed_on, say
from draco.core.errors import ConfigError, DracoError, TrainingStopped

if TYPE_CHECKING:
    from pathlib import Path

    from omegaconf import DictConfig

__all__ = ["COMMAND", "main"]

log = logging.getLogger("draco")


@dataclass(frozen=True, kw_only=True)
class Options:
    """All of the training configuration."""

    config: tuple[str, ...] = passed_on("any option of the configuration")


COMMAND = Command("draco train", "a run, or a sweep: train a policy; resume=FOLDER goes on with one", Options)


def main(arguments: list[str]) -> None:
    """Train. The process may end here: by `sys.exit`, or replaced by torchrun."""
    command = sys.argv
    log.setLevel(logging.INFO)
    try:
        sys.argv = [command[0], *arguments]  # Hydra reads its options there
        _compose(arguments, command)
    except KeyboardInterrupt:  # while libraries load or the configuration composes; later see draco.core.signals
        log.warning("interrupted before the run began")
        sys.exit(130)
    finally:
        sys.argv = command


def _compose(arguments: list[str], command: list[str]) -> None:
    """Let Hydra compose the configuration and run the job, or the jobs of a sweep. What it refuses is one line."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from draco.config.choices import explained

    def job(config: DictConfig) -> dict[str, Any]:
        sys.argv = command  # `launch_processes` starts the same command again
        return _main(config)

    detailed = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises then what it would print by itself, with exit status 1
    try:
        hydra.main(version_base="1.3", config_path="pkg://conf", config_name="train")(job)()
    except (HydraException, OmegaConfBaseException) as error:
        if detailed:
            raise
        say(explained(error, arguments))
        sys.exit(2)
    except ValueError as error:  # of Hydra, which takes no null for a group: those of a job have been answered too
        if detailed or "Config group override" not in str(error):
            raise
        nulls = [a.split("=", 1)[0] for a in arguments if a.endswith("=null") and "." not in a]
        say(f"{error}; leave a group out with ~GROUP{''.join(f', here perhaps ~{n}' for n in nulls)}")
        sys.exit(2)
    except OSError as error:  # of Hydra, which makes the run folder: those of a job have been answered by `_main`
        if detailed:
            raise
        where = error.filename or "the run folder"
        say(f"{where} cannot be made: {error.strerror or error}; give run=FOLDER (of a sweep: hydra.sweep.dir=FOLDER)")
        sys.exit(2)


def _main(config: DictConfig) -> dict[str, Any]:
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf.errors import OmegaConfBaseException

    from draco.config.choices import one_line, refuse_beside_self_judge, refuse_unread

    hydra_config = HydraConfig.get()
    sweeping = hydra_config.mode is RunMode.MULTIRUN
    overrides = list(hydra_config.overrides.task)
    try:
        try:
            refuse_unread(config, overrides, set(hydra_config.runtime.choices))
            if not sweeping:
                refuse_beside_self_judge(config, overrides)
            return _job(config, overrides, hydra_config.runtime.output_dir, sweeping)
        except OmegaConfBaseException as error:
            raise ConfigError(one_line(error)) from error
    except DracoError as error:
        say(str(error))
        if isinstance(error, ConfigError):
            with contextlib.suppress(OSError):
                os.rmdir(hydra_config.runtime.output_dir)  # made by Hydra, and nothing came to be in it
        if sweeping:  # Hydra would end a sweep at an exception, and without the table
            return {"error": str(error)}
        sys.exit(2 if isinstance(error, ConfigError) else 3)
    except Exception as error:
        if sweeping:
            log.exception("job failed")
            return {"error": f"{type(error).__name__}: {error}"}
        traceback.print_exc()
        sys.exit(1)


def _job(config: DictConfig, overrides: list[str], output_dir: str, sweeping: bool) -> dict[str, Any]:
    started = time.time()
    from pathlib import Path

    from lightning.pytorch.utilities.exceptions import SIGTERMException
    from rich.console import Console

    from draco.core.distributed import launched
    from draco.core.signals import EXIT_REQUEUE, Interrupted
    from draco.run.folder import resume_config
    from draco.run.launch import launch_processes
    from draco.run.summary import closing_table
    from draco.run.train import train  # torch and lightning load here, after the configuration has composed

    named = [o for o in overrides if o.split("=", 1)[0] in {"run", "resume"}]
    if sweeping and named:
        raise ConfigError(f"{named[0]} names one folder for all jobs of a sweep; set hydra.sweep.dir=FOLDER instead")
    if sweeping and launched() > 1:
        raise ConfigError("a sweep runs its jobs one after another in one process; start one torchrun a job instead")
    if sweeping:
        config.run = os.path.relpath(output_dir)
        wandb = config.logger.get("wandb")
        if wandb and "group" in wandb and wandb.group is None:
            wandb.group = Path(output_dir).parent.name  # a sweep is a group
    if config.resume:
        if launched() == 1 and Path(output_dir).resolve() != Path(config.resume).resolve():
            with contextlib.suppress(OSError):  # Hydra made the folder that a new run would have had
                Path(output_dir).rmdir()
        config = resume_config(Path(config.resume), config, overrides)
    launch_processes(config, overrides, sweeping=sweeping)  # does not return where the trainer wants several
    go_on = f"go on with: draco train resume={config.run}"
    try:
        summary = train(config, started, Path(output_dir), report=_write_report)
    except Interrupted as stop:
        log.warning("%s: stopped; %s", stop, go_on)
        raise SystemExit(stop.status) from None
    except SIGTERMException:  # Lightning's own, where another rank or its handler was faster
        log.warning("SIGTERM: stopped; %s", go_on)
        raise SystemExit(EXIT_REQUEUE) from None
    except TrainingStopped as error:
        from draco.run.checkpoint import checkpoints  # torch: not before signals are listened to

        saved = checkpoints(Path(config.run))
        kept = f"saved up to {saved[-1].name}" if saved else "no step was complete, so nothing is saved yet"
        raise TrainingStopped(f"{error}; {kept}, {go_on}") from error
    if summary:
        closing_table(summary, Console())
    return summary


def _write_report(run: Path) -> None:
    from draco.run.numbers import archive_numbers
    from draco.study.page import write_page
    from draco.study.runs import open_run

    write_page(open_run(run), archive_numbers(run))
