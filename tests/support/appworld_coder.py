"""A policy for AppWorld's miniature tasks that knows the gold, some of the time: writes code turn by turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from support import appworld_mini as mini
from support.echo import type_out

from draco.rollout.engines import Engine
from draco.rollout.rollout import Rollout

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


def script(task_id: str, sample: int, version: int = 0) -> list[str]:
    """The turns of one rollout: even samples solve the task, odd ones once the policy's version is above its level.

    Before that they complete without doing it; on level 3 they give up.
    """
    level = int(task_id[4])
    look = "Who is it?\n<code>print(apis.supervisor.show_profile())</code>"
    solves = sample % 2 == 0 or level < version
    if level == 3 and not solves:
        return [look, "It cannot be done.", "No."]
    act = GOLD[task_id] if solves else "apis.supervisor.complete_task()"
    return [look, f"Now do it.\n<code>{act}</code>", "Done."]


class ScriptedCoder(Engine):
    """An engine that types `script`."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def run(self, policy: object, rollouts: Sequence[Rollout], *, temperature: float) -> Iterator[Rollout]:
        for rollout in rollouts:
            type_out(rollout, script(rollout.task.id, rollout.sample, rollout.policy_version))
            yield rollout
