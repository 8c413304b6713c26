"""What a run refuses before anything expensive: options, stages that cannot work together, tasks that do not fit."""

from __future__ import annotations

import logging

from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from draco.config.checks import number, switch, whole
from draco.config.choices import one_line
from draco.core.errors import ConfigError
from draco.module import GRPOModule

__all__ = [
    "check",
    "check_optimizer",
    "check_scripted_criteria",
    "scripted",
]

log = logging.getLogger("draco")

MAX_LR = 1.0  #: a larger learning rate is a slip of the pen


def check(config: DictConfig) -> None:
    """Check what can be checked without building anything: references, missing values, top-level options.

    Raises:
        ConfigError: one line that names the option.
    """
    try:
        missing = set(OmegaConf.missing_keys(config))
        stage = config.rubric.get("stage") or {}
        if "judge" not in stage or not OmegaConf.is_interpolation(stage, "judge"):
            missing = {k for k in missing if not k.startswith("judge.")}  # no rubric asks that judge
        if not missing:
            OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(one_line(error)) from error
    if needed := {k.removeprefix("rubric.stage.") for k in missing}:
        name = min(needed)
        raise ConfigError(f"{name} is not set, and this configuration needs it: add {name}=VALUE")
    engine = config.engine
    if "servers" in engine and not engine.servers and not engine.get("launch"):  # a ??? would not survive composition
        raise ConfigError(
            "engine.servers is not set, and this configuration launches none: add engine.servers=[http://HOST:8000,…], "
            "or choose placement=colocated, placement=split or engine=vllm alone, which start their own"
        )
    if engine.get("staleness") and config.loss.tis_cap is None:
        raise ConfigError(
            "engine.staleness=1 trains on what the weights of a step ago sampled, and loss.tis_cap is not set: add the "
            "importance weights that correct for it, such as loss.tis_cap=2.0"
        )
    whole("steps", config.steps, 0)
    whole("tasks_per_step", config.tasks_per_step, 1)
    whole("group_size", config.group_size, 2)  # GRPO compares the rollouts of a group
    whole("seed", config.seed, 0, 2**32 - 1)
    number("lr", config.lr, 0, MAX_LR)
    whole("lr_decay_steps", config.get("lr_decay_steps", 0), 0)  # older runs have none
    number("temperature", config.temperature, 0, above=True)  # log-probs are taken at it
    whole("eval.tasks", config.eval.tasks, 1, optional=True)
    whole("eval.n", config.eval.n, 1)
    whole("eval.every", config.eval.every, 0)
    number("eval.temperature", config.eval.temperature, 0)  # 0 is greedy
    switch("eval.before", config.eval.before)
    switch("overwrite", config.overwrite)
    switch("checkpoint.check_disk", config.checkpoint.check_disk)
    for name, minimum in (("save_every", 1), ("keep_last", 1), ("keep_every", 0)):
        whole(f"checkpoint.{name}", config.checkpoint[name], minimum)


def check_optimizer(module: GRPOModule) -> None:
    """Build the optimizer once: it keeps no state yet, and refuses its options now instead of after an evaluation.

    Raises:
        ConfigError: it does, or its learning rate is out of range.
    """
    try:
        optimizer = module.configure_optimizers()
    except (TypeError, ValueError, InstantiationException) as error:
        raise ConfigError(f"the optimizer refuses its options: {' '.join(str(error).split())}") from error
    for group in optimizer.param_groups:
        number("optimizer.lr", group["lr"], 0, MAX_LR)


def scripted(config: DictConfig) -> bool:
    """Whether the rubric's own judge, which need not be `judge`, is the scripted one."""
    judge = (config.rubric.get("stage") or {}).get("judge")
    return judge is not None and "scripted" in str(judge.get("model", ""))


def check_scripted_criteria(titles: list[str]) -> None:
    """The scripted judge finds what it has no rule for not applicable: no reward would ever come of it.

    Raises:
        ConfigError: it has a rule for none of the titles.
    """
    from draco.env.desk.judge.general import GENERAL

    unknown = [t for t in titles if t not in GENERAL]
    if len(unknown) == len(titles):
        raise ConfigError(
            "judge=scripted has a rule for none of the static rubric's criteria and would reward nothing; use "
            "judge=litellm judge.model=PROVIDER/MODEL, or titles of its own set (rubric.stage.criteria=desk)"
        )
    if unknown:
        log.warning("judge=scripted has no rule for %s: never applicable", ", ".join(unknown))
