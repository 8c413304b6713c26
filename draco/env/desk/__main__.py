"""Play the desk in a terminal.

python -m draco.env.desk list [SPLIT]      # task ids, or the splits
python -m draco.env.desk play TASK_ID      # type calls; an empty line ends the episode
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from draco.core.errors import ConfigError
from draco.env.base import Outcome
from draco.env.desk.apps import describe
from draco.env.desk.environment import DeskEnvironment
from draco.env.desk.evaluator import DeskEvaluator
from draco.env.desk.scenarios import gold_task

_USAGE = "usage: python -m draco.env.desk list [SPLIT] | play TASK_ID"


def _list(split: str | None) -> None:
    env = DeskEnvironment()
    if split is None:
        for name in env.splits:
            print(f"{name:15} {len(env.tasks(name))} tasks")
        return
    for task in env.tasks(split):
        print(f"{task.id:20} difficulty {task.difficulty}  {task.metadata['family']:14} {task.instruction}")


def _play(task_id: str) -> None:
    task = gold_task(task_id).task
    episode = DeskEnvironment().open(task, seed=0)
    print(describe(), end="\n\n")
    for message in episode.opening:
        print(f"{message.role}: {message.content}")
    style = episode.format
    example = 'apis.mail.read(id="m12")' if style.stop else '{"name": "mail.read", "arguments": {"id": "m12"}}'
    print(f"Type one call a line, with or without {style.open} {style.close}, e.g. {example}. An empty line ends it.")
    turn, done = 0, False
    while not done:
        try:
            line = input(f"{turn + 1}> ").strip()
        except (EOFError, KeyboardInterrupt):
            line = ""
        if not line:
            break
        reply = episode.step([action.body for action in style.parse(line)] or [line])
        turn, done = turn + 1, reply.done
        print("\n".join(reply.observations))
    outcome = DeskEvaluator().evaluate(task, episode.end_state())
    print("success" if outcome.success else f"failure: {_reasons(outcome)}")


def _reasons(outcome: Outcome) -> str:
    """What went wrong, and at which steps."""
    shown = [f"{fault} (step {', '.join(str(s) for s in steps)})" for fault, steps in outcome.detail["steps"].items()]
    return "; ".join(shown) or "the end state is not what the task asks for"


def main(words: Sequence[str]) -> int:
    """Exit code 0, or 2 for wrong usage or an unknown name."""
    try:
        match list(words):
            case ["list", *split] if len(split) < 2:
                _list(split[0] if split else None)
            case ["play", task_id]:
                _play(task_id)
            case _:
                print(_USAGE, file=sys.stderr)
                return 2
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
