"""Runs inside tau2's own Python: ``python tau_judge.py JUDGE LOG run --domain …`` is ``tau2 run --domain …`` by JUDGE.

tau2 decides assertions in words by a model that a constant names, and records none of its tokens. This sets the
constant, writes the tokens of every such call to LOG, and hands over to tau2's command. draco never imports tau2, and
this file nothing of draco.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

__all__ = ["main", "set_judge"]

_MODULE = "tau2.evaluator.evaluator_nl_assertions"
_CONSTANT = "DEFAULT_LLM_NL_ASSERTIONS"


def set_judge(module: Any, judge: str, log: str) -> None:
    """Have tau2's module judge by another model and log what it uses.

    Raises:
        SystemExit: this tau2 names its judge elsewhere.
    """
    if not hasattr(module, _CONSTANT) or not hasattr(module, "generate"):
        sys.exit(f"this tau2 has no {_CONSTANT} in {_MODULE}: its judge cannot be set; known to work: tau2 1.0")
    setattr(module, _CONSTANT, judge)
    asked, lock = module.generate, threading.Lock()

    def generate(*args: Any, **options: Any) -> Any:
        reply = asked(*args, **options)
        usage = getattr(reply, "usage", None) or {}
        with lock, open(log, "a", encoding="utf-8") as stream:
            stream.write(json.dumps({"model": judge, **{k: v for k, v in usage.items() if isinstance(v, int)}}) + "\n")
        return reply

    module.generate = generate


def main() -> None:
    """The arguments after JUDGE and LOG are tau2's."""
    judge, log = sys.argv[1:3]
    sys.argv = ["tau2", *sys.argv[3:]]
    sys.path.pop(0)  # this folder: its modules are not tau2's
    os.makedirs(os.path.dirname(log), exist_ok=True)
    with open(log, "a", encoding="utf-8"):
        pass  # there, and empty where no assertion is decided in words
    set_judge(import_module(_MODULE), judge, log)
    (command,) = entry_points(group="console_scripts", name="tau2")
    command.load()()


if __name__ == "__main__":
    main()
