"""`draco completion`: a script that lets a shell complete verbs, options, and the groups and keys of the configuration.

The script asks `draco completion of WORD …` at every TAB. Hydra itself knows the groups, choices and keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args, get_origin

from draco.config.arguments import Command, did_you_mean, words
from draco.core.errors import ConfigError
from draco.study.verbs import VERBS, verb

__all__ = ["COMMAND", "candidates", "main"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The shell."""

    shell: Path = words("bash, zsh or fish")


COMMAND = Command(
    "draco completion",
    "print a script that completes verbs, options and values in a shell",
    Options,
    examples=(
        'eval "$(draco completion bash)"                                # in ~/.bashrc',
        'eval "$(draco completion zsh)"                                 # in ~/.zshrc, after compinit',
        "draco completion fish > ~/.config/fish/completions/draco.fish",
    ),
)

# A key, a section and a folder go on: no space after them. bash cuts words at = and :, and replaces the last part only.
BASH = r"""
_draco_complete() {
    local line=${COMP_LINE:0:COMP_POINT} words word cut choice
    read -ra words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    word=${words[${#words[@]}-1]}
    cut=${word%"${word##*[=:]}"}
    COMPREPLY=()
    while IFS= read -r choice; do
        [[ $choice == *[=./] ]] || choice+=" "
        COMPREPLY+=("${choice#"$cut"}")
    done < <("${words[0]}" completion of "${words[@]:1}" 2> /dev/null)
}
complete -o nospace -o default -F _draco_complete draco
"""

ZSH = r"""
_draco() {
    local -a found open
    found=(${(f)"$("$words[1]" completion of "${(@)words[2,CURRENT]}" 2> /dev/null)"})
    open=(${(M)found:#*[=./]})
    found=(${found:#*[=./]})
    (( $#open )) && compadd -Q -S '' -- $open
    (( $#found )) && compadd -Q -- $found
    (( $#open + $#found )) && return
    compset -P '*='
    _files
}
compdef _draco draco
"""

FISH = r"""
complete -c draco -a '(set -l typed (commandline -opc); draco completion of $typed[2..] (commandline -ct) 2> /dev/null)'
"""

SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def main(arguments: list[str]) -> None:
    """Print the script of a shell; `of WORD …` prints what could stand in place of the last word."""
    if arguments[:1] == ["of"]:
        print("\n".join(candidates(arguments[1:])))
        return
    shell = str(COMMAND.parse(arguments).shell)
    if shell not in SCRIPTS:
        raise ConfigError(f"no completion for {shell}; {did_you_mean(shell, SCRIPTS)}expected bash, zsh or fish")
    print(SCRIPTS[shell].strip())


def candidates(typed: Sequence[str]) -> list[str]:
    """What could stand in place of the last word.

    Args:
        typed: the words after `draco`, up to the cursor; the last one may be empty.
    """
    *before, current = typed or [""]
    if not before:
        return _beginning(current, [*VERBS, "--help"])
    if before[0] not in VERBS:
        return []
    if before[0] == "completion":
        return _beginning(current, SCRIPTS)
    command: Command[object] = verb(before[0]).COMMAND
    options = command.names()
    key, has_value, _ = current.partition("=")
    if has_value and key in options:
        found = {f"{key}={value}" for value in _values(options[key])}
    else:
        given = {w.partition("=")[0] for w in before[1:]}
        found = {f"{name}=" for name in options.keys() - given} | {"--help"}
    if (prefixes := command.prefixes()) is not None:
        overrides = [w for w in before[1:] if "=" in w and w.partition("=")[0] not in options]
        overrides += [w for w in before[1:] if w.partition("=")[0] + "." in prefixes]  # judge=litellm: a group as well
        found |= {c for c in _of_configuration(overrides, current) if _passes(c, prefixes, options)}
    return _beginning(current, found)


def _beginning(current: str, found: Iterable[str]) -> list[str]:
    return sorted(c for c in found if c.startswith(current))


def _values(annotation: object) -> list[str]:
    """The texts that an option takes, where they are few."""
    parts = [annotation, *get_args(annotation)]
    if bool in parts:
        return ["true", "false"]
    return [str(choice) for part in parts if get_origin(part) is Literal for choice in get_args(part)]


def _passes(choice: str, prefixes: Sequence[str], options: Iterable[str]) -> bool:
    """Whether a command passes this on to the configuration."""
    key = choice.partition("=")[0]
    if key.rpartition(".")[2].startswith("_") or key.startswith("hydra"):  # _target_ is no user's option
        return False
    if not prefixes:
        return key not in options
    return any(f"{key.partition('.')[0]}." == p for p in prefixes)


def _of_configuration(overrides: Sequence[str], current: str) -> list[str]:
    """Groups, choices and keys of the training configuration."""
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from hydra.plugins.completion_plugin import DefaultCompletionPlugin

    try:
        with initialize_config_module("conf", version_base="1.3"):
            plugin = DefaultCompletionPlugin(GlobalHydra.instance().config_loader())
            return list(plugin._query("train", " ".join([*overrides, current])))
    except Exception:  # a half-typed line composes nothing: nothing is offered then
        return []
