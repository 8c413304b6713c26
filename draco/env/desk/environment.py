"""The environment: tasks, episodes, and the record that an episode leaves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from draco.config.options import checked
from draco.core.types import Message, Task
from draco.env.base import Environment, Episode, Reply
from draco.env.desk.apps import describe
from draco.env.desk.parse import BadCall, parse
from draco.env.desk.scenarios import SPLITS, GoldTask, gold_task, task_ids
from draco.env.desk.world import Refused, World

__all__ = ["RULES", "DeskEnvironment", "DeskEpisode", "opening"]

RULES = "Read all pages. Confirm what is held. Keep keys secret. Do each thing once, then complete."
_LONG = """You work in a small office through API calls. {rules}
{how}
The APIs:
{apis}
Lists have pages: read every page before you act. What is held is not done before you confirm it. Never write a key in
a message or note. Copy ids exactly. When everything is done, call desk.complete with status "done"."""
_HOW = {
    "code": 'Answer with exactly one call in a code block, for example:\n<code>apis.mail.read(id="m12")</code>',
    "tool_call": (
        "Answer with one or several function calls, for example:\n"
        '<tool_call>{"name": "mail.read", "arguments": {"id": "m12"}}</tool_call>\n'
        "A call listed below as apis.app.name(x) is the function app.name with the argument x."
    ),
}


def opening(gold: GoldTask, *, verbose: bool) -> tuple[Message, Message]:
    """System and user message of a task."""
    if verbose:
        system = _LONG.format(rules=RULES, how=_HOW[gold.style.name], apis=describe())
    else:
        system = f"apps: {' '.join(gold.task.metadata['apps'])}. {RULES}"
    return Message("system", system), Message("user", gold.task.instruction)


class DeskEpisode(Episode):
    """One task in its own world. Never raises on what an agent writes."""

    def __init__(self, gold: GoldTask, *, verbose: bool = False) -> None:
        self.format = gold.style
        self.opening = opening(gold, verbose=verbose)
        self._task_id = gold.task.id
        self._world = World(gold.world)
        self._turn = 0
        self._calls: list[dict[str, Any]] = []

    def step(self, actions: Sequence[str]) -> Reply:
        """Run the actions of one turn."""
        self._turn += 1
        observations = tuple(self._run(body, position) for position, body in enumerate(actions, start=1))
        status = self._world.status
        return Reply(observations, done=bool(status), completed=bool(status), failed=status == "fail")

    def idle(self) -> None:
        """Counts as a turn, so that turn numbers stay true."""
        self._turn += 1
        self._calls.append({"turn": self._turn, "position": 0, "api": "", "args": {}, "observation": ""})

    def _run(self, body: str, position: int) -> str:
        api, args = "", {}
        try:
            call = parse(body, self.format)
            api, args = call.api, call.args
            observation = self._world.call(call, len(self._calls))
        except (BadCall, Refused) as refusal:
            observation = f"error: {refusal}"
        self._calls.append(
            {"turn": self._turn, "position": position, "api": api, "args": args, "observation": observation}
        )
        return observation

    def end_state(self) -> str:
        """JSON: the calls that were run and the state that they led to. For `DeskEvaluator` only."""
        world = self._world
        return json.dumps(
            {
                "task": self._task_id,
                "calls": self._calls,
                "effects": world.effects,
                "held": list(world.held.values()),
                "status": world.status,
            }
        )


@checked("env")
class DeskEnvironment(Environment):
    """The embedded office: in process, seeded, no network, no execution of what an agent writes.

    Args:
        verbose_prompt: a full system message with the API list and an example, for pretrained chat models.
    """

    name = "desk"

    def __init__(self, verbose_prompt: bool = False) -> None:
        self.verbose_prompt = verbose_prompt

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(SPLITS)

    def tasks(self, split: str) -> tuple[Task, ...]:
        return tuple(gold_task(task_id).task for task_id in task_ids(split))

    def open(self, task: Task, *, seed: int) -> DeskEpisode:
        """Start an episode. A task fixes its world, so `seed` changes nothing."""
        return DeskEpisode(gold_task(task.id), verbose=self.verbose_prompt)
