"""Composes a configuration from files and overrides, and builds objects from a configuration, with Hydra."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra.utils
from hydra import compose, initialize_config_module
from hydra.errors import HydraException, InstantiationException
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from draco.config.choices import explained, refuse_unread
from draco.core.errors import ConfigError, DracoError

__all__ = [
    "class_of", "compose_config", "instantiate", "instantiate_group", "judge_config", "stored_config", "with_judge",
]  # fmt: skip


def compose_config(overrides: Sequence[str]) -> DictConfig:
    """The configuration of `draco train OVERRIDES`, for other commands.

    Raises:
        ConfigError: it does not compose, or an option would be ignored; one line with the valid choices.
    """
    try:
        with initialize_config_module("conf", version_base="1.3"):
            config = compose("train", list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explained(error, overrides)) from error
    except ValueError as error:  # Hydra accepts no null for a group
        raise ConfigError(f"{error}; leave a group out with ~GROUP") from error
    refuse_unread(config, overrides, ())
    return config


def stored_config(run: Path, option: str = "run") -> DictConfig:
    """config.yaml of a run folder.

    Args:
        run: the folder.
        option: which option named the folder, for messages.

    Raises:
        ConfigError: there is no config.yaml, or an older draco with other option names wrote it.
    """
    file = run / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"{option}={run}: no run there (config.yaml not found); pass the run folder")
    config = OmegaConf.load(file)
    assert isinstance(config, DictConfig)
    if OmegaConf.select(config, "rubric.stage") is not None:
        raise ConfigError(
            f"{option}={run}: an older draco wrote its config.yaml (it has rubric.stage, which is now rubric); reports "
            "read it, but to train or evaluate it, use that version"
        )
    return config


def with_judge(overrides: Sequence[str]) -> DictConfig:
    """As `compose_config`, for a command that asks the judge.

    Raises:
        ConfigError: no such option or choice, or no judge.
    """
    config = compose_config(overrides)
    if "judge" not in config:
        raise ConfigError("~judge leaves nobody to ask; choose one with judge=litellm judge.model=PROVIDER/MODEL")
    if OmegaConf.is_missing(config.judge, "model"):
        raise ConfigError("judge.model is missing: name the judge's model, such as judge.model=openai/gpt-5.4")
    return config


def judge_config(given: Mapping[str, str], run: Mapping[str, Any]) -> DictConfig:
    """The judge that `judge=… judge.KEY=…` describe; without `judge=` that of the run, with these options replaced.

    Raises:
        ConfigError: there is no judge, or an option is wrong.
    """
    keys = {k: v for k, v in given.items() if k.startswith("judge.")}
    if "judge" in given:
        return with_judge([f"judge={given['judge']}", *(f"{k}={v}" for k, v in keys.items())]).judge  # type: ignore[no-any-return]
    if not run.get("judge"):
        raise ConfigError("this folder names no judge; give judge=litellm judge.model=PROVIDER/MODEL")
    config = OmegaConf.create({"judge": run["judge"]})
    config.merge_with_dotlist([f"{k}={v}" for k, v in keys.items()])
    return config.judge  # type: ignore[no-any-return]


def instantiate(node: Any, **options: Any) -> Any:
    """Hydra's instantiate; a `DracoError` is raised as it is, any other exception as a ConfigError.

    Raises:
        ConfigError: the class cannot be imported or refuses its options.
    """
    try:
        return hydra.utils.instantiate(node, **options)
    except InstantiationException as error:
        if isinstance(error.__cause__, DracoError):
            raise error.__cause__ from None
        said = str(error).replace(", set env var HYDRA_FULL_ERROR=1 to see chained exception", "")
        raise ConfigError(" ".join(said.split())) from error


def class_of(node: DictConfig) -> Any:
    """The class that the `_target_` of a node names.

    Raises:
        ConfigError: no such class.
    """
    try:
        return hydra.utils.get_class(str(node.get("_target_")))
    except (ImportError, ValueError) as error:
        raise ConfigError(" ".join(str(error).split())) from error


def instantiate_group(node: DictConfig | None) -> Any:
    """The object of a configuration group such as `rubric`, without its `name`, which only labels runs."""
    if node is None:
        return None
    group = copy.copy(node)  # keeps its parent, so that interpolations still resolve
    with open_dict(group), read_write(group):
        group.pop("name", None)
    return instantiate(group)
