"""The order of a run: check, build, evaluate, train, evaluate, summary, report.

A configuration that cannot work is refused before the first rollout.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from contextlib import closing, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from omegaconf import DictConfig

from draco.config.compose import instantiate
from draco.config.rules import check
from draco.core.distributed import barrier, broadcast, check_shared, joined, local_rank, main_only, rank, world_size
from draco.core.errors import ConfigError
from draco.core.files import read_json, write_json
from draco.core.signals import listening
from draco.run import checkpoint
from draco.run.build import Parts, build, check_optimizer
from draco.run.conformance import settle
from draco.run.disk import check_disk
from draco.run.evaluation import evaluate, evaluation_trainer, quiet_lightning
from draco.run.folder import discard_empty, locked, prepare, set_aside, write_config
from draco.run.launch import fetch_weights, on_gpu, place, sharded, warn_uneven
from draco.run.loader import EvalLoader, TaskLoader
from draco.run.loggers import MetricsCsv, WandbMetrics, finish
from draco.run.preflight import preflight
from draco.run.summary import evaluation_file, evaluation_metrics, final_summary, scalars, train_success

__all__ = ["train"]

log = logging.getLogger("draco")


def train(
    config: DictConfig,
    started: float | None = None,
    made: Path | None = None,
    report: Callable[[Path], None] | None = None,
) -> dict[str, Any]:
    """Run the job and return the content of summary.json.

    Args:
        config: composed configuration.
        started: `time.time()` at the start of the job, so that `wall_s` includes imports.
        made: folder that Hydra created for this process. All processes use the folder of rank 0.
        report: makes report.html in the folder of a finished run.

    Raises:
        ConfigError: something cannot work, or another process uses the run folder.
        TrainingStopped: a limit ended the run; its state is saved.
        Interrupted: a signal ended the run.

    With `preflight=true` nothing is trained: everything is tried once, and an empty result is returned.
    """
    started = time.time() if started is None else started
    check(config)
    place(config)
    try:
        with listening(), joined(config.distributed.timeout_s, gpu=on_gpu(config)):
            run = Path(broadcast(config.run))
            config.run = str(run)
            if made is not None and made.resolve() not in (run.resolve(), Path.cwd()):
                # Not earlier: another rank's Hydra would fail if its folder vanished while it is created.
                with suppress(OSError):
                    made.rmdir()
            with locked(run) if rank() == 0 else nullcontext():
                try:
                    quiet_lightning()
                    if not config.get("preflight"):
                        return _train(config, run, started, report)
                    preflight(config, run)
                except ConfigError:
                    if not config.resume and rank() == 0:
                        discard_empty(run)
                    raise
    except ConfigError:
        with suppress(OSError):
            Path(config.run).rmdir()  # only if it is empty
        raise
    with suppress(OSError):  # a preflight leaves no folder behind
        run.rmdir()
    return {}


def _train(config: DictConfig, run: Path, started: float, report: Callable[[Path], None] | None) -> dict[str, Any]:
    resume, state, past = main_only(lambda: _open(config, run))
    check_shared(run)
    if past is not None:
        return {} if rank() else past  # rank 0 prints it
    if config.resume and config.callbacks.get("checkpoint"):
        config.callbacks.checkpoint.resume = str(resume) if resume else None
    fetch_weights(config)
    if rank() == 0:
        write_config(config, run)
    # Generation (this thread) and judging (the background loop) share the interpreter. A small tensor operation
    # releases it and may wait one switch interval to get it back. The default of 5 ms slows generation down.
    sys.setswitchinterval(5e-4)
    seed_everything(config.seed, workers=False, verbose=False)
    with closing(build(config, sharded=sharded(config))) as parts:
        parts.open(run)
        if state["step"] < config.steps:
            parts.check()
        loader, held_out = _load(parts, run, resume, state)
        loggers = _loggers(config, run)
        try:
            _make_steps(parts, run, loader, held_out, loggers, resume)
            if rank():
                return {}
            wall_s = state["wall_s"] + time.time() - started
            return _finish(parts, run, loggers, wall_s, report if config.get("report", True) else None)
        finally:
            finish(loggers)


def _load(parts: Parts, run: Path, resume: Path | None, state: dict[str, Any]) -> tuple[TaskLoader, EvalLoader]:
    """Load weights, tasks and the checkpoint to resume from, and make the last checks."""
    config, module = parts.config, parts.module
    module.configure_model()
    device = torch.device("cuda", local_rank()) if on_gpu(config) and not sharded(config) else None
    longest = config.limits.max_prompt_tokens + config.limits.max_response_tokens
    settle(module, engine=parts.engine.in_process, longest=longest, device=device)
    check_optimizer(module)
    loader, held_out = parts.load_tasks()
    if resume:
        _check_checkpoint(resume, state, loader)
        loader.load_state_dict(state["loader"])
        checkpoint.load(resume, module.policy)
        module.batches_done = state["step"]
        if parts.engine.staleness:
            log.info("engine.staleness=1: the first batch is sampled with the weights of the checkpoint")
    if rank() == 0:
        warn_uneven(config.tasks_per_step, world_size())
    refuse = config.checkpoint.check_disk
    main_only(lambda: check_disk(run, module.policy, loader, config.checkpoint, longest, refuse=refuse))
    log.info("run folder: %s", run)
    return loader, held_out


def _make_steps(
    parts: Parts, run: Path, loader: TaskLoader, held_out: EvalLoader, loggers: list[Any], resume: Path | None
) -> None:
    """Evaluate, train and evaluate, except what was done before a resume."""
    config, step = parts.config, parts.module.batches_done
    every = config.eval.every
    before, after = run / "evaluation_before.json", run / "evaluation_after.json"
    missed = bool(every and step and step % every == 0 and not evaluation_file(run, step).is_file())
    # Rank 0 decides for all: ranks that look for a file at different times may see different things.
    todo = broadcast(
        {
            "before": config.eval.before and step == 0 and not before.is_file(),
            "missed": missed,
            "after": step < config.steps or not after.is_file(),
        }
    )
    parts.ready()
    for logger in loggers:
        if isinstance(logger, WandbMetrics):
            logger.start(loggers[0].rows)
    if todo["before"]:
        _write(before, _evaluate(parts, held_out, run))
    if step < config.steps:
        if todo["missed"]:  # the evaluation at this checkpoint was interrupted
            content = {"step": step, **_evaluate(parts, held_out, run)}
            for logger in loggers:
                logger.log_metrics(evaluation_metrics(content), step=step)
            _write(evaluation_file(run, step), content)
        if not resume:
            seed_everything(config.seed, workers=False, verbose=False)  # independent of what ran before
        barrier()  # Lightning's own collectives have a time-out
        _trainer(parts, run, loggers).fit(parts.module, loader, held_out if every else None)
    if todo["after"]:
        _write(after, _evaluate(parts, held_out, run))


def _finish(
    parts: Parts, run: Path, loggers: list[Any], wall_s: float, report: Callable[[Path], None] | None
) -> dict[str, Any]:
    """Write success on training tasks, the summary and the report. On rank 0 only."""
    before, after = run / "evaluation_before.json", run / "evaluation_after.json"
    train_success(run, parts.evaluator)
    base = read_json(before) if before.is_file() else None
    summary = final_summary(run, parts.config, base, read_json(after), wall_s=wall_s)
    for logger in loggers:
        logger.log_metrics(scalars(summary), step=parts.module.batches_done)
        if isinstance(logger, WandbMetrics):
            logger.flush()
    write_json(run / "summary.json", summary)  # last: a run with this file is finished
    if report is not None:
        try:
            report(run)
        except Exception as error:  # the run has finished: a missing page is no failure
            log.warning("report.html was not written (%s); draco report %s makes it", error, run)
    return summary


def _open(config: DictConfig, run: Path) -> tuple[Path | None, dict[str, Any], dict[str, Any] | None]:
    """Prepare the run folder.

    Returns:
        the checkpoint to resume from, its state, and the summary if the run is already complete.

    Raises:
        ConfigError: the folder cannot be used.
    """
    resume, state = _position(config, run)
    step: int = state["step"]
    if not config.resume:
        prepare(run, overwrite=config.overwrite)
        return resume, state, None
    past = read_json(run / "summary.json") if (run / "summary.json").is_file() else {}
    if past and step >= config.steps:
        log.info("%s has already run its %d steps; raise steps= to go on", run, config.steps)
        return resume, state, past
    if step > config.steps:
        raise ConfigError(f"{run} has already made {step} steps; use steps={step} or more, not {config.steps}")
    state["wall_s"] = max(state["wall_s"], past.get("wall_s", 0.0))
    set_aside(run, step, goes_on=step < config.steps)
    return resume, state, None


def _position(config: DictConfig, run: Path) -> tuple[Path | None, dict[str, Any]]:
    """The checkpoint to resume from and its state; None and step 0 if there is none."""
    found = checkpoint.checkpoints(run) if config.resume else []
    if found:
        return found[-1], checkpoint.read_state(found[-1])
    if config.resume:
        log.info("%s has no checkpoint yet: it starts from step 0 with its own configuration", run)
    return None, {"step": 0, "wall_s": 0.0}


def _check_checkpoint(resume: Path, state: dict[str, Any], loader: TaskLoader) -> None:
    if state["world_size"] != world_size():
        log.info(
            "%s was saved by %d process(es) and this job has %d: same tasks and samples, but sums in another order",
            resume, state["world_size"], world_size(),
        )  # fmt: skip
    if state["tasks"] != checkpoint.digest(loader.tasks):
        raise ConfigError(
            f"the training tasks are no longer those of {resume}: the environment or its data has changed; resume "
            "with the data of the start of the run"
        )


def _write(file: Path, content: dict[str, Any]) -> None:
    if rank() == 0:
        write_json(file, content)


def _loggers(config: DictConfig, run: Path) -> list[Any]:
    """The loggers, metrics.csv first; none on other ranks than 0."""
    return [] if rank() else [MetricsCsv(str(run)), *(instantiate(entry) for entry in config.logger.values() if entry)]


def _trainer(parts: Parts, run: Path, loggers: list[Any]) -> Trainer:
    every = parts.config.eval.every
    trainer: Trainer = instantiate(
        parts.config.trainer,
        callbacks=parts.callbacks,
        logger=loggers or False,
        max_epochs=1,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        val_check_interval=every or 1.0,
        check_val_every_n_epoch=None if every else 1,  # None: count batches of the whole run
        limit_val_batches=1 if every else 0,
        default_root_dir=str(run),
    )
    return trainer


def _evaluate(parts: Parts, held_out: EvalLoader, run: Path) -> dict[str, Any]:
    make = partial(instantiate, parts.config.trainer)
    return evaluate(parts, evaluation_trainer(make, parts, run), held_out, parts.config.eval.split)
