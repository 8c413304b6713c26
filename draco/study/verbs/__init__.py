"""The commands of `draco`: one file each, with its options, its help and its `main`.

train        a run, or a sweep (Hydra reads its options)
evaluate     a checkpoint or a model behind an API, on held-out tasks; `evaluate_tau`: on τ-bench
judge        finished trajectories of any agent
report       tables, figures and the HTML page
replay       rewards and credits from the archive; `replay_judge`: the archived calls, sent to another judge
rescore      a run's rollouts on a fixed set of criteria
calibrate    a person's ratings against the judge's
author       a static set of criteria from rollouts
check        whether a model trains exactly as it is served
plan         memory, hours and money of a run before it starts
redteam      planted attacks against a judge
attribution  where blame went, on the embedded environment
completion   completion for a shell

Importing one of these files loads neither torch nor Hydra: what is heavy is imported by `main`.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

__all__ = ["VERBS", "verb"]

VERBS = (
    "train", "evaluate", "judge", "report", "replay", "rescore", "calibrate", "author", "check", "plan", "redteam",
    "attribution", "completion",
)  # fmt: skip


def verb(name: str) -> ModuleType:
    """The file of a command: `COMMAND` says what it takes, `main` runs it with the arguments after the name."""
    return import_module(f"{__name__}.{name}")
