"""Checks of a configuration before anything is built: options out of range, and options that cannot work together."""

from __future__ import annotations

from typing import Annotated, Any

from annotated_types import Ge, Le
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from draco.config.choices import one_line
from draco.config.options import Count, Index, NonNegative, Positive, check_option
from draco.core.errors import ConfigError

__all__ = ["LearningRate", "check"]

#: a larger value is a mistake
LearningRate = Annotated[float, Ge(0), Le(1)]

#: options that no class checks
_OPTIONS: dict[str, Any] = {
    "steps": Index,
    "tasks_per_step": Count,
    "group_size": Annotated[int, Ge(2)],  # GRPO compares the rollouts of a group
    "seed": Annotated[int, Ge(0), Le(2**32 - 1)],
    "lr": LearningRate,
    "lr_decay_steps": Index,
    "temperature": Positive,  # log-probs are divided by it
    "overwrite": bool,
    "eval.tasks": Count | None,
    "eval.n": Count,
    "eval.every": Index,
    "eval.temperature": NonNegative,  # 0 is greedy
    "eval.before": bool,
    "checkpoint.check_disk": bool,
    "checkpoint.save_every": Count,
    "checkpoint.keep_last": Count,
    "checkpoint.keep_every": Index,
}


def check(config: DictConfig) -> None:
    """Check interpolations, missing values, and options that no class checks.

    Raises:
        ConfigError: one line that names the option.
    """
    _check_references(config)
    _check_engine(config)
    _check_judge(config)
    for name, annotation in _OPTIONS.items():
        check_option(name, OmegaConf.select(config, name), annotation)


def _check_references(config: DictConfig) -> None:
    rubric = config.get("rubric") or {}
    try:
        missing = set(OmegaConf.missing_keys(config))
        if "judge" not in rubric or not OmegaConf.is_interpolation(rubric, "judge"):
            missing = {k for k in missing if not k.startswith("judge.")}  # no rubric uses this judge
        if not missing:
            OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(one_line(error)) from error
    if needed := {k.removeprefix("rubric.") for k in missing}:
        name = min(needed)
        raise ConfigError(f"{name} is not set, and this configuration needs it: add {name}=VALUE")


def _check_engine(config: DictConfig) -> None:
    engine = config.engine
    # `servers: ???` would not survive composition, so an empty list is refused here.
    if "servers" in engine and not engine.servers and not engine.get("launch"):
        raise ConfigError(
            "engine.servers is not set, and this configuration launches none: add engine.servers=[http://HOST:8000,…], "
            "or choose placement=colocated, placement=split or engine=vllm alone, which start their own"
        )
    if engine.get("staleness") and config.loss.tis_cap is None:
        raise ConfigError(
            "engine.staleness=1 trains on rollouts that the previous weights sampled, and loss.tis_cap is not set: "
            "add the importance weights that correct for it, such as loss.tis_cap=2.0"
        )


def _check_judge(config: DictConfig) -> None:
    """A judge may be limited to some environments."""
    judge = (config.get("rubric") or {}).get("judge") or {}
    known = judge.get("environments")
    if known and config.env.name not in known:
        raise ConfigError(
            f"judge.model={judge['model']} knows env={'|'.join(known)} alone, not env={config.env.name}; "
            "use judge=litellm judge.model=PROVIDER/MODEL"
        )
