"""A judge for scripts: composed from the packaged configuration, or the one that a run had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from draco.config.choices import compose_config
from draco.core.errors import ConfigError

__all__ = ["composed", "judge_config"]


def composed(overrides: Sequence[str]) -> DictConfig:
    """The training configuration with overrides, as `python train.py` would compose it.

    Raises:
        ConfigError: no such option or choice.
    """
    config = compose_config(overrides)
    if "judge" not in config:
        raise ConfigError("~judge leaves nobody to ask; choose one with judge=litellm judge.model=PROVIDER/MODEL")
    if OmegaConf.is_missing(config.judge, "model"):
        raise ConfigError("judge.model is missing: name the judge's model, such as judge.model=openai/gpt-5.4")
    return config


def judge_config(given: Mapping[str, str], run: Mapping[str, Any]) -> DictConfig:
    """The judge that `judge=… judge.KEY=…` name; without `judge=` that of the run, with its keys replaced.

    Raises:
        ConfigError: neither names one, or an option is wrong.
    """
    keys = {k: v for k, v in given.items() if k.startswith("judge.")}
    if "judge" in given:
        return composed([f"judge={given['judge']}", *(f"{k}={v}" for k, v in keys.items())]).judge  # type: ignore[no-any-return]
    if not run.get("judge"):
        raise ConfigError("this folder names no judge; give judge=litellm judge.model=PROVIDER/MODEL")
    config = OmegaConf.create({"judge": run["judge"]})
    config.merge_with_dotlist([f"{k}={v}" for k, v in keys.items()])
    return config.judge  # type: ignore[no-any-return]
