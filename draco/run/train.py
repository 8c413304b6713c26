"""One run, from a composed configuration to `summary.json`: check, build, evaluate, train, evaluate, report.

Everything that can be wrong with the configuration is found before the first rollout.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import hydra.utils
import torch
from hydra.errors import InstantiationException
from lightning.pytorch import Trainer, seed_everything
from omegaconf import DictConfig

from draco.config.rules import check, check_optimizer, check_scripted_criteria, scripted
from draco.core.distributed import barrier, broadcast, check_shared, joined, main_only, rank, world_size
from draco.core.errors import ConfigError, DracoError
from draco.core.signals import listening
from draco.env.base import Environment, Evaluator
from draco.env.success import summarise
from draco.judge.stage import read_secret
from draco.module import GRPOModule
from draco.rollout.engines import Engine
from draco.run import checkpoint
from draco.run.disk import plan_disk
from draco.run.folder import discard_empty, locked, prepare, set_aside, write_config
from draco.run.launch import fetch_weights, on_gpu, place, say_shares, sharded
from draco.run.loader import EvalLoader, TaskLoader, select_tasks
from draco.run.loggers import MetricsCsv, WandbMetrics, finish
from draco.run.numbers import archive_numbers
from draco.run.preflight import check_judge, preflight
from draco.run.summary import (
    evaluation_file,
    evaluation_metrics,
    final_summary,
    read_json,
    scalars,
    train_success,
    write_json,
)
from draco.stages import CreditStage, RolloutStage, RubricStage, find_stage
from draco.study.page import write_page
from draco.study.runs import open_run

__all__ = ["Parts", "build", "instantiate", "train"]

log = logging.getLogger("draco")


def instantiate(node: Any, **options: Any) -> Any:
    """Hydra's instantiate, with our own errors as they were raised and any other as a ConfigError.

    Raises:
        ConfigError: the class cannot be imported or refuses its options.
    """
    try:
        return hydra.utils.instantiate(node, **options)
    except InstantiationException as error:
        if isinstance(error.__cause__, DracoError):
            raise error.__cause__ from None
        raise ConfigError(" ".join(str(error).split())) from error


@dataclass(slots=True)
class Parts:
    """What a configuration builds."""

    environment: Environment
    evaluator: Evaluator | None
    engine: Engine
    module: GRPOModule
    callbacks: list[Any]

    def close(self) -> None:
        """End the servers that engine and environment may have started."""
        self.engine.close()
        self.environment.close()
        if self.evaluator is not None:
            self.evaluator.close()


def build(config: DictConfig, *, sharded: bool = False) -> Parts:
    """Instantiate environment, stages and module; no weights are loaded yet.

    Args:
        config: of the run.
        sharded: the policy's weights are loaded in shards, by the trainer's strategy.

    Raises:
        ConfigError: a part refuses its options, or a stage is missing or double.
    """
    if config.env.name != "desk" and scripted(config):
        raise ConfigError(
            f"judge=scripted knows the embedded environment desk alone, not env={config.env.name}; "
            "use judge=litellm judge.model=PROVIDER/MODEL"
        )
    environment: Environment = instantiate(config.env.environment)
    evaluator: Evaluator | None = instantiate(config.env.get("evaluator"))
    # Called here and not by Hydra, which would turn the frozen limits into a configuration node, slow to read.
    engine: Engine = instantiate(config.engine)
    rollout = instantiate(config.rollout, _partial_=True)(
        environment=environment, engine=engine, limits=instantiate(config.limits)
    )
    rubric = instantiate(config.rubric.stage)
    if scripted(config) and hasattr(rubric, "static_criteria"):
        check_scripted_criteria([c.title for c in rubric.static_criteria])
    credit = instantiate(config.credit.stage)
    callbacks = [rollout, rubric, credit, *(instantiate(c) for c in config.callbacks.values() if c)]
    find_stage(callbacks, RolloutStage)  # type: ignore[type-abstract]
    find_stage(callbacks, RubricStage)  # type: ignore[type-abstract]
    find_stage(callbacks, CreditStage)  # type: ignore[type-abstract]
    if credit.needs_citations and not rubric.gives_citations:
        log.warning(
            "credit=%s needs cited steps, which rubric=%s does not give: every trajectory keeps its uniform advantage",
            config.credit.name,
            config.rubric.name,
        )
    module = GRPOModule(
        policy=instantiate(config.policy, _partial_=True, **({"sharded": True} if sharded else {})),
        optimizer=instantiate(config.optimizer),
        loss=instantiate(config.loss),
        update=instantiate(config["update"]),
        temperature=config.temperature,
        evaluator=evaluator,
        gather_for_rollouts=sharded and config.distributed.gather_for_rollouts,
    )
    return Parts(environment, evaluator, engine, module, callbacks)


def train(config: DictConfig, started: float | None = None, made: Path | None = None) -> dict[str, Any]:
    """Run the whole job and return the content of summary.json.

    Args:
        config: composed configuration.
        started: when the job began, `time.time()`; the caller's imports then count in `wall_s`.
        made: folder that Hydra has made for this process; of several processes the run is in rank 0's.

    Raises:
        ConfigError: something cannot work, or another process uses the run folder.
        TrainingStopped: a guard ended the run, its state saved.
        Interrupted: a signal did.

    With `preflight=true` nothing is trained: everything is tried once, and the result is empty.
    """
    started = time.time() if started is None else started
    check(config)
    place(config)
    try:
        with listening(), joined(config.distributed.timeout_s, gpu=on_gpu(config)):
            run = Path(broadcast(config.run))
            config.run = str(run)
            if made is not None and made.resolve() not in (run.resolve(), Path.cwd()):
                # Not before: to take a folder away while another rank's Hydra makes it would be an error there.
                with suppress(OSError):
                    made.rmdir()
            with locked(run) if rank() == 0 else nullcontext():
                try:
                    if not config.get("preflight"):
                        return _train(config, run, started)
                    _quiet_libraries()
                    preflight(config, run, build, _loaders)
                except ConfigError:
                    if not config.resume and rank() == 0:
                        discard_empty(run)
                    raise
    except ConfigError:
        with suppress(OSError):
            Path(config.run).rmdir()  # only if nothing is in it
        raise
    with suppress(OSError):  # a preflight leaves no folder of its own
        run.rmdir()
    return {}


def _train(config: DictConfig, run: Path, started: float) -> dict[str, Any]:
    resume, state, past = main_only(lambda: _open(config, run))
    check_shared(run)
    if past is not None:
        return {} if rank() else past  # rank 0 shows it
    if config.resume and config.callbacks.get("checkpoint"):
        config.callbacks.checkpoint.resume = str(resume) if resume else None
    fetch_weights(config)
    if rank() == 0:
        write_config(config, run)
    _quiet_libraries()
    # Generation (this thread) and judging (the loop's) share the interpreter. Every small tensor operation gives it up
    # and gets it back one switch interval later at worst: with the default of 5 ms a busy judge holds generation up.
    sys.setswitchinterval(5e-4)
    seed_everything(config.seed, workers=False, verbose=False)
    with closing(build(config, sharded=sharded(config))) as parts:
        return _with_parts(config, run, started, parts, resume, state)


def _with_parts(
    config: DictConfig, run: Path, started: float, parts: Parts, resume: Path | None, state: dict[str, Any]
) -> dict[str, Any]:
    """From the checks that need the parts to `summary.json`; the summary, empty on ranks other than 0."""
    step: int = state["step"]
    module = parts.module
    rubric = find_stage(parts.callbacks, RubricStage)  # type: ignore[type-abstract]
    if hasattr(rubric, "bind"):
        secret = main_only(lambda: read_secret(run / "transcript_secret"))
        rubric.bind(parts.environment.caveats, secret, run, config.seed, rank())
    if step < config.steps:
        main_only(parts.environment.check)  # before anything large is loaded
        main_only(parts.engine.check)
        main_only(lambda: check_judge(rubric))
    module.configure_model()
    check_optimizer(module)
    loader, held_out = _loaders(config, parts)
    trainer, loggers = _trainer(config, parts, run)
    if resume:
        _check(resume, state, loader)
        loader.load_state_dict(state["loader"])
        checkpoint.load(resume, module.policy)
        module.batches_done = step
        if parts.engine.staleness:
            log.info("engine.staleness=1: the first batch is sampled by the checkpoint's own weights, not those before")
    if rank() == 0:
        say_shares(config.tasks_per_step, world_size())
    longest = config.limits.max_prompt_tokens + config.limits.max_response_tokens
    check_disk = config.checkpoint.check_disk
    main_only(lambda: plan_disk(run, module.policy, loader, config.checkpoint, longest, refuse=check_disk))
    log.info("run folder: %s", run)
    files = [run / "evaluation_before.json", run / "evaluation_after.json"]
    every = config.eval.every
    missed = every and step and step % every == 0 and not evaluation_file(run, step).is_file()
    # What is left to do, decided once: ranks that look for a file at different times would see different things.
    to_do = broadcast({"before": config.eval.before and step == 0 and not files[0].is_file(), "missed": missed,
                       "after": step < config.steps or not files[1].is_file()})  # fmt: skip
    try:
        parts.engine.open(module.policy, run, temperature=config.temperature)
        for logger in loggers:
            if isinstance(logger, WandbMetrics):
                logger.start(loggers[0].rows)
        if to_do["before"]:
            _write(files[0], _evaluate(config, parts, held_out, run))
        if step < config.steps:
            if to_do["missed"]:
                _missed_evaluation(config, parts, held_out, run, loggers)
            if not resume:
                seed_everything(config.seed, workers=False, verbose=False)  # whatever came before
            barrier()  # Lightning's own collectives have a time-out
            trainer.fit(module, train_dataloaders=loader, val_dataloaders=held_out if config.eval.every else None)
        if to_do["after"]:
            _write(files[1], _evaluate(config, parts, held_out, run))
        if rank():
            return {}
        before, after = (read_json(f) if f.is_file() else None for f in files)
        assert after is not None
        train_success(run, parts.evaluator)
        wall = state["wall_s"] + time.time() - started
        summary = final_summary(run, config, before, after, wall_s=wall)
        for logger in loggers:
            logger.log_metrics(scalars(summary), step=module.batches_done)
            if isinstance(logger, WandbMetrics):
                logger.flush()
        write_json(run / "summary.json", summary)  # the last of all: a run that has it is finished
        if config.get("report", True) and trainer.is_global_zero:
            # The run is finished already; a page that cannot be made must not make it a failure.
            try:
                write_page(open_run(run), archive_numbers(run))
            except Exception as error:
                log.warning("report.html was not written (%s); scripts/report.py %s makes it", error, run)
    finally:
        finish(loggers)
    return summary


def _open(config: DictConfig, run: Path) -> tuple[Path | None, dict[str, Any], dict[str, Any] | None]:
    """Prepare the run folder: the checkpoint to go on from, its state, and the summary of a run that is complete.

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


def _write(file: Path, content: dict[str, Any]) -> None:
    if rank() == 0:
        write_json(file, content)


def _position(config: DictConfig, run: Path) -> tuple[Path | None, dict[str, Any]]:
    """The checkpoint to go on from and its state; none, and step 0, before the first one."""
    found = checkpoint.checkpoints(run) if config.resume else []
    if found:
        return found[-1], checkpoint.read_state(found[-1])
    if config.resume:
        log.info("%s has no checkpoint yet: it starts from step 0 with its own configuration", run)
    return None, {"step": 0, "wall_s": 0.0}


def _check(resume: Path, state: dict[str, Any], loader: TaskLoader) -> None:
    if state["world_size"] != world_size():
        log.info(
            "%s was saved by %d process(es) and this job has %d: the same tasks and samples, sums in another order",
            resume, state["world_size"], world_size(),
        )  # fmt: skip
    if state["tasks"] != checkpoint.digest(loader.tasks):
        raise ConfigError(
            f"the training tasks are no longer those of {resume}: the environment or its data has changed; resume "
            "with what the run began with"
        )


def _trainer(config: DictConfig, parts: Parts, run: Path) -> tuple[Trainer, list[Any]]:
    """The trainer of the run and its loggers, metrics.csv first."""
    loggers: list[Any] = []
    if rank() == 0:
        loggers = [MetricsCsv(str(run)), *(instantiate(entry) for entry in config.logger.values() if entry)]
    every = config.eval.every
    trainer: Trainer = instantiate(
        config.trainer,
        callbacks=parts.callbacks,
        logger=loggers or False,
        max_epochs=1,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        val_check_interval=every or 1.0,
        check_val_every_n_epoch=None if every else 1,  # None: counts batches of the whole run
        limit_val_batches=1 if every else 0,
        default_root_dir=str(run),
    )
    return trainer, loggers


def _loaders(config: DictConfig, parts: Parts) -> tuple[TaskLoader, EvalLoader]:
    select = partial(
        select_tasks, parts.environment, parts.module.policy, max_prompt=config.limits.max_prompt_tokens,
        max_response=config.limits.max_response_tokens, may_outgrow=bool(config.resume),
    )  # fmt: skip
    tasks = select(config.env.train_split, None)
    loader = TaskLoader(
        tasks,
        steps=config.steps,
        tasks_per_step=config.tasks_per_step,
        group_size=config.group_size,
        seed=config.seed,
        temperature=config.temperature,
    )
    held_out = select(config.eval.split, config.eval.tasks)
    return loader, EvalLoader(held_out, n=config.eval.n, temperature=config.eval.temperature)


def _evaluate(config: DictConfig, parts: Parts, held_out: EvalLoader, run: Path) -> dict[str, Any]:
    """Success metrics of the current weights on the held-out tasks."""
    trainer: Trainer = instantiate(
        config.trainer,
        callbacks=parts.callbacks[:3],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(run),
    )
    barrier()
    with torch.no_grad():
        trainer.validate(parts.module, dataloaders=held_out, verbose=False)
    records = parts.module.validation_records
    return {
        "split": config.eval.split,
        "scaffold": parts.environment.scaffold,
        **summarise(records),
        "records": [r.as_dict() for r in records],
    }


def _missed_evaluation(config: DictConfig, parts: Parts, held_out: EvalLoader, run: Path, loggers: list[Any]) -> None:
    """The evaluation that belongs to the checkpoint and was cut off."""
    step = parts.module.batches_done
    content = {"step": step, **_evaluate(config, parts, held_out, run)}
    for logger in loggers:
        logger.log_metrics(evaluation_metrics(content), step=step)
    _write(evaluation_file(run, step), content)


def _quiet_libraries() -> None:
    """Lightning's greetings and advice for loops that are not ours."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for text in (".*does not have many workers.*", ".*Starting from v.*", ".*no `val_dataloader`.*", ".*LeafSpec.*"):
        warnings.filterwarnings("ignore", message=text)
