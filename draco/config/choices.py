"""What a user could have meant: Hydra's refusals with the valid choices, and additions that nothing would read.

Hydra advises to add an unknown key with +, which composes and is then ignored: a misspelt option would do nothing.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from draco.core.errors import ConfigError

__all__ = ["explained", "merge_known", "one_line", "refuse_beside_self_judge", "refuse_unread"]

_UNKNOWN_KEY = re.compile(r"Could not override '([^']+)'")
#: sections that the trainer reads by name; the others go to a class, which refuses what it does not take
_READ_BY_NAME = ("advantage", "checkpoint", "eval")


def explained(error: Exception, arguments: Sequence[str]) -> str:
    """One line for an error of Hydra or omegaconf; for an unknown option, with the options that exist beside it.

    Args:
        error: what was raised.
        arguments: the command line, from which the configuration without that option is composed.
    """
    for argument in arguments:
        if said := renamed(argument):
            return said
    unknown = next((m for e in _chain(error) if (m := _UNKNOWN_KEY.search(str(e)))), None)
    if unknown:
        key = unknown.group(1)
        others = [a for a in arguments if "=" in a and not a.startswith("-") and _key(a) != key]
        config = _composed(others) or _composed([])
        return f"{unknown.group()}: no such option; " + (_valid(config, key) if config is not None else "see --cfg job")
    if isinstance(error, OmegaConfBaseException):
        return one_line(error)
    text = str(error) or (str(error.__cause__) if error.__cause__ else type(error).__name__)
    text = text.split("Config search path:")[0]
    text = " ".join(text.split())
    if isinstance(error.__cause__, OmegaConfBaseException) and str(error):
        text += f": {one_line(error.__cause__)}"
    return text


#: old beginning of an option's name → the new one
_RENAMED = {"rubric.stage.": "rubric.", "credit.stage.": "credit."}


def renamed(override: str) -> str | None:
    """What to say of an option whose name has changed; None of any other.

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
    """What omegaconf says, without its lines about node types."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    key = getattr(error, "full_key", None)
    return f"{key}: {text}" if key and key not in text else text


def merge_known(config: DictConfig, overrides: Iterable[str]) -> None:
    """Set `KEY.KEY=VALUE` in a composed configuration, where these options exist.

    Raises:
        ConfigError: one does not; the message lists those beside it.
    """
    for override in overrides:
        key = _key(override)
        parent, _, name = key.rpartition(".")
        try:
            beside = OmegaConf.select(config, parent) if parent else config
            if not isinstance(beside, DictConfig) or name not in beside.keys():  # noqa: SIM118 - `in` denies a ???
                raise ConfigError(f"{override}: no such option; {_valid(config, key)}")
            config.merge_with_dotlist([override])
        except OmegaConfBaseException as error:
            raise ConfigError(f"{override}: {one_line(error)}") from error


def refuse_unread(config: DictConfig, overrides: Iterable[str], groups: Iterable[str]) -> None:
    """Refuse additions (`+name=…`) at the top or in a section read by name, unless an interpolation reads them.

    Additions below a `_target_` stay Hydra's business: the class takes or refuses them. So do those of `callbacks`.

    Args:
        config: composed configuration.
        overrides: of the command line.
        groups: configuration groups that were chosen.

    Raises:
        ConfigError: something would be ignored; the message lists what exists.
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
    """Refuse options of a judge where the policy is the judge: `judge.plan` is the only one of them that is read then.

    Not for the jobs of a sweep, whose options are those of all its rubrics.

    Raises:
        ConfigError: something would be ignored; the message says where the policy's own are.
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
    """The options at the level where `key` stops existing, and those that look like it."""
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
    """Options and configuration groups at the top."""
    groups = {str(name) for entry in primary.defaults if isinstance(entry, DictConfig) for name in entry}
    return {str(k) for k in primary} - {"defaults", "hydra"} | {g for g in groups if " " not in g}


def _listed(asked: str, choices: Iterable[str], within: str) -> str:
    ordered = sorted(choices)
    near = difflib.get_close_matches(asked, ordered, n=2, cutoff=0.6)
    meant = f"did you mean {' or '.join(within + n for n in near)}? " if near else ""
    return f"{meant}Valid choices{f' in {within[:-1]}' if within else ''}: {', '.join(ordered)}"


def _key(override: str) -> str:
    return override.split("=", 1)[0].lstrip("+~").split("@")[0]


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
