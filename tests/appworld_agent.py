"""A policy for AppWorld's miniature tasks that knows the gold, some of the time: writes code turn by turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from conftest import type_out

from draco.agent import Rollout
from draco.env.appworld.inside import mini

__all__ = ["GOLD", "ScriptedCoder", "script", "wrong"]

#: task id → the gold solution as one block
GOLD = {
    s["id"]: f"def solution(apis):\n    {s['solution']}\nsolution(apis)\nprint('all done')" for s in mini.scenarios()
}


def wrong(task_id: str) -> str:
    """A block that does something, and not what is asked."""
    if task_id.startswith("mini1"):
        return "apis.supervisor.complete_task(answer='12345')"
    return GOLD[task_id].replace("amount=", "amount=1 + ").replace("pinned=True", "pinned=False")


def script(task_id: str, sample: int) -> list[str]:
    """The turns of one rollout: even samples solve the task, odd ones complete without doing it."""
    look = "Who is it?\n<code>print(apis.supervisor.show_profile())</code>"
    act = GOLD[task_id] if sample % 2 == 0 else "apis.supervisor.complete_task()"
    return [look, f"Now do it.\n<code>{act}</code>", "Done."]


class ScriptedCoder:
    """An engine that types `script`."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def run(self, policy: object, rollouts: Sequence[Rollout], *, temperature: float) -> Iterator[Rollout]:
        for rollout in rollouts:
            type_out(rollout, script(rollout.task.id, rollout.sample))
            yield rollout
