"""The command `draco`: `draco VERB key=value …`. `python train.py …` is the same as `draco train …`."""

from __future__ import annotations

import logging
import os
import sys

from draco.config.arguments import did_you_mean, exit_status
from draco.core.errors import ConfigError
from draco.study.verbs import VERBS, verb

__all__ = ["main", "run", "train"]


def main() -> None:
    """Entry point of `draco`. Torch, lightning and Hydra load behind it, so that Ctrl-C meanwhile is one line.

    Exit status, of every verb: 0 done; 1 a fault, or a finding (a value that does not replay, a plan that does not fit,
    an attack that won); 2 the configuration or an input cannot work; 3 a judge, a server or an environment failed, or
    a guard stopped the run; 75 stopped by SIGTERM, SIGUSR1 or SIGUSR2 with its state saved (EX_TEMPFAIL: a launcher may
    start it again with resume=); 130 Ctrl-C.
    """
    sys.exit(run(sys.argv[1:]))


def train() -> None:
    """Entry point of `python train.py`."""
    sys.exit(run(["train", *sys.argv[1:]]))


def run(words: list[str]) -> int:
    """Run one verb and return its exit status.

    Args:
        words: the command line after `draco`.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # custom environments and strategies beside the user's own files
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    return exit_status(lambda: _call(words))


def _call(words: list[str]) -> int | None:
    name, *arguments = words or ["--help"]
    if name in ("-h", "--help"):
        print(overview())
        return 0
    if name not in VERBS:
        meant = f"did you mean draco train {name}? " if "=" in name else did_you_mean(name, VERBS)
        raise ConfigError(f"draco has no verb {name!r}; {meant}Verbs: {', '.join(VERBS)}; draco --help explains them")
    chosen = verb(name)
    if {"-h", "--help"} & set(arguments) and name != "train":  # Hydra answers for train, with groups and choices
        print(chosen.help_of(arguments) if name == "evaluate" else chosen.COMMAND.help())
        return 0
    status: int | None = chosen.main(arguments)
    return status


def overview() -> str:
    """What `draco --help` prints."""
    lines = ["draco VERB key=value …", "", "Verbs:"]
    lines += [f"    {name:12} {verb(name).COMMAND.summary}" for name in VERBS]
    lines += ["", "draco VERB --help explains one, with its options and examples."]
    return "\n".join(lines)
