"""Errors of Hydra in one line with the valid choices, and the refusal of overrides that nothing would read.

For an unknown key Hydra suggests to add it with +. Nothing would read such a key: a misspelt option would do nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from draco.config.arguments import did_you_mean
from draco.core.errors import ConfigError

__all__ = ["explained", "merge_known", "one_line", "refuse_beside_self_judge", "refuse_unread"]

_UNKNOWN_KEY = re.compile(r"Could not override '([^']+)'")
#: sections that are read by name; the others go to a class, which refuses unknown options
_READ_BY_NAME = ("advantage", "checkpoint", "eval")


def explained(error: Exception, arguments: Sequence[str]) -> str:
    """One line for an error of Hydra or omegaconf; for an unknown option, with the options of its section.

    Args:
        error: the exception.
        arguments: of the command line; without the unknown option they give the section.
    """
    for argument in arguments:
        if said := renamed(argument):
            return said
    unknown = next((m for e in _chain(error) if (m := _UNKNOWN_KEY.search(str(e)))), None)
    if unknown:
        key = unknown.group(1)
        others = [a for a in arguments if "=" in a and not a.startswith("-") and _key(a) != key]
        config = _composed([*others, *_search_path(arguments)]) or _composed([])
        return f"{unknown.group()}: no such option; " + (_valid(config, key) if config is not None else "see --cfg job")
    if isinstance(error, OmegaConfBaseException):
        return one_line(error)
    text = str(error) or (str(error.__cause__) if error.__cause__ else type(error).__name__)
    text = text.split("Config search path:")[0]
    text = " ".join(text.split())
    if isinstance(error.__cause__, OmegaConfBaseException) and str(error):
        text += f": {one_line(error.__cause__)}"
    return text


#: old start of an option's name → new start
_RENAMED = {"rubric.stage.": "rubric.", "credit.stage.": "credit."}


def renamed(override: str) -> str | None:
    """The message for an option whose name has changed; None for any other option.

    >>> renamed("credit.stage.unanimous=uniform")
    'credit.stage.unanimous=uniform: the option is now credit.unanimous; use credit.unanimous=uniform'
    """
    key = _key(override)
    for old, new in _RENAMED.items():
        if key.startswith(old):
            now = new + key.removeprefix(old)
            return f"{override}: the option is now {now}; use {override.replace(key, now, 1)}"
    return None


def one_line(error: OmegaConfBaseException) -> str:
    """The message of omegaconf, without its lines about node types."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    key = getattr(error, "full_key", None)
    return f"{key}: {text}" if key and key not in text else text


def merge_known(config: DictConfig, overrides: Iterable[str]) -> None:
    """Set `KEY.KEY=VALUE` in a composed configuration.

    Raises:
        ConfigError: an option does not exist; the message lists those of its section.
    """
    for override in overrides:
        key = _key(override)
        parent, _, name = key.rpartition(".")
        try:
            beside = OmegaConf.select(config, parent) if parent else config
            if not isinstance(beside, DictConfig) or name not in beside.keys():  # noqa: SIM118 - `in` is False for a missing value
                raise ConfigError(f"{override}: no such option; {_valid(config, key)}")
            config.merge_with_dotlist([override])
        except OmegaConfBaseException as error:
            raise ConfigError(f"{override}: {one_line(error)}") from error


def refuse_unread(config: DictConfig, overrides: Iterable[str], groups: Iterable[str]) -> None:
    """Refuse added options (`+name=…`) that nothing reads, at the top level or in a section that is read by name.

    An option that an interpolation reads is allowed, and so is one below a `_target_`: its class takes or refuses it.

    Args:
        config: composed configuration.
        overrides: of the command line.
        groups: chosen configuration groups.

    Raises:
        ConfigError: an option would be ignored; the message lists the existing ones.
    """
    known = _primary()
    top = _top(known) | {g.split("/")[0] for g in groups} - {"hydra"}
    text = OmegaConf.to_yaml(config)
    for override in overrides:
        if said := renamed(override):
            raise ConfigError(said)
        if not override.startswith("+"):
            continue
        key = _key(override)
        first, _, rest = key.partition(".")
        read_by = "${" + key
        if first not in top:
            ignored, choices = "${" + first not in text, top
        elif first in _READ_BY_NAME and rest:
            choices = {str(k) for k in known[first]}
            ignored = rest.split(".")[0] not in choices and read_by not in text
        else:
            continue
        if ignored:
            asked = first if first not in top else rest.split(".")[0]
            within = "" if first not in top else f"{first}."
            raise ConfigError(f"{override} adds an option that nothing reads; {_listed(asked, choices, within)}")


def refuse_beside_self_judge(config: DictConfig, overrides: Iterable[str]) -> None:
    """With rubric=self_judge, refuse all options of `judge` except `judge.plan`, because no other is read.

    Not called for jobs of a sweep, which give the options of all rubrics to every job.

    Raises:
        ConfigError: an option would be ignored; the message names the one to use.
    """
    if OmegaConf.select(config, "rubric.name") != "self_judge":
        return
    rubric = config.rubric
    for override in overrides:
        key = _key(override)
        if key.startswith("judge.") and key != "judge.plan":
            name = key.split(".")[1]
            own = f"rubric.{name}" if name in rubric else f"rubric.judge.{name}"
            added = "" if name in rubric or name in rubric.judge else "+"
            raise ConfigError(
                f"{override}: with rubric=self_judge the policy is the judge and reads judge.plan alone of these; its "
                f"own are in rubric and rubric.judge: {added}{own}=…"
            )


def _valid(config: DictConfig, key: str) -> str:
    """The options of the deepest existing section of `key`, and those similar to it."""
    node, within = config, ""
    parts = key.split(".")
    for part in parts:
        below: Any = OmegaConf.select(config, within + part)
        if not isinstance(below, DictConfig):
            break
        node, within = below, f"{within}{part}."
    asked = parts[min(within.count("."), len(parts) - 1)]
    choices = {str(k) for k in node if k != "_target_"}
    return _listed(asked, choices if within else choices | _top(_primary()), within)


def _primary() -> DictConfig:
    config = OmegaConf.load(str(files("conf") / "train.yaml"))
    assert isinstance(config, DictConfig)
    return config


def _top(primary: DictConfig) -> set[str]:
    """Options and configuration groups at the top level."""
    groups = {str(name) for entry in primary.defaults if isinstance(entry, DictConfig) for name in entry}
    return {str(k) for k in primary} - {"defaults", "hydra"} | {g for g in groups if " " not in g}


def _listed(asked: str, choices: Iterable[str], within: str) -> str:
    ordered = sorted(choices)
    meant = did_you_mean(asked, ordered, within)
    return f"{meant}Valid choices{f' in {within[:-1]}' if within else ''}: {', '.join(ordered)}"


def _key(override: str) -> str:
    return override.split("=", 1)[0].lstrip("+~").split("@")[0]


def _search_path(arguments: Sequence[str]) -> list[str]:
    """`--config-dir DIR` as an override: the groups of that folder exist, too."""
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, _, folder = word.partition("=")
        if name in ("--config-dir", "-cd") and (folder or following):
            return [f"hydra.searchpath=[file://{Path(folder or following).resolve()}]"]
    return []


def _composed(overrides: list[str]) -> DictConfig | None:
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module("conf", version_base="1.3"):
            return compose("train", overrides)
    except (HydraException, OmegaConfBaseException):
        return None


def _chain(error: BaseException | None) -> Iterable[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
