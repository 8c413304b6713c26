"""The contract of environments.

An environment is two objects that never meet on the training path. `Environment` opens episodes; `Evaluator` reads the
opaque end state of a finished episode. Settings that judge by rubrics get the first alone (outcome blindness).
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draco.core.types import Message, Task

__all__ = [
    "CODE",
    "TOOL_CALL",
    "ActionFormat",
    "ActionSpan",
    "Environment",
    "Episode",
    "Evaluator",
    "Outcome",
    "Reply",
]


@dataclass(frozen=True, slots=True)
class ActionSpan:
    """One action inside a turn: characters [start, stop) of the turn, tags included, and what is between the tags."""

    start: int
    stop: int
    body: str


@dataclass(frozen=True, slots=True)
class ActionFormat:
    """How actions are written in a turn: every `open`…`close` pair is one action."""

    name: str
    open: str
    close: str
    stop: tuple[str, ...] = ()  #: generation of a turn ends right after the first of these (or the end token)
    reminder: str = ""  #: what the agent is told once after a turn without a parsable action

    def parse(self, text: str) -> tuple[ActionSpan, ...]:
        """All complete actions of a turn, in order. Reasoning in <think>…</think> is not searched.

        A template may open <think> in the prompt, so that a turn only closes it: all text before is reasoning, too.
        """
        before, closing, _ = text.partition("</think>")
        inside = before.count(self.open) > before.count(self.close)  # an action that quotes the tag
        head = " " * len(before + closing) if closing and not inside and "<think>" not in before else ""
        masked = head + re.sub(
            r"<think>.*?(</think>|\Z)", lambda m: " " * len(m.group()), text[len(head) :], flags=re.DOTALL
        )
        spans, at = [], 0
        while (start := masked.find(self.open, at)) >= 0:
            end = masked.find(self.close, start + len(self.open))
            if end < 0:
                break
            at = end + len(self.close)
            spans.append(ActionSpan(start, at, text[start + len(self.open) : end]))
        return tuple(spans)

    def attempted(self, text: str) -> bool:
        """True if the turn opens an action, complete or not. A turn with a malformed action is no closing turn."""
        return self.open in text


#: one code block a turn, AppWorld style
CODE = ActionFormat(
    name="code",
    open="<code>",
    close="</code>",
    stop=("</code>",),
    reminder="No <code>...</code> block found. Write one, or complete the task.",
)
#: JSON function calls, several a turn
TOOL_CALL = ActionFormat(
    name="tool_call",
    open="<tool_call>",
    close="</tool_call>",
    reminder="No <tool_call>...</tool_call> found. Write one, or complete the task.",
)


@dataclass(frozen=True, slots=True)
class Reply:
    """What the environment answers to the actions of one turn."""

    observations: tuple[str, ...]  #: one for each action that was run
    done: bool = False  #: the episode is over, no further turn
    completed: bool = False  #: the completion API was called so far
    failed: bool = False  #: it was called with a failure status


class Episode(ABC):
    """One running episode. It has no evaluate method on purpose."""

    opening: tuple[Message, ...]  #: system and user message
    format: ActionFormat
    places: int | None = None  #: episodes that its environment can hold at a time; None: any number

    @abstractmethod
    def step(self, actions: Sequence[str]) -> Reply:
        """Run the action bodies of one turn, in order.

        The agent's own mistakes come back as observations.

        Raises:
            EnvironmentFault: a fault that is not the agent's.
        """

    def idle(self) -> None:  # noqa: B027 - optional
        """The agent took a turn without an action. For environments that number turns."""

    @abstractmethod
    def end_state(self) -> str:
        """An opaque reference to the state reached, for the evaluator; JSON-able text, stored in the archive."""

    def close(self) -> None:  # noqa: B027 - optional
        """Release resources. Called exactly once, whatever the termination."""


class Environment(ABC):
    """Opens episodes."""

    name: str
    scaffold: str = ""  #: which agent plays, for tables: prompt and loop, not the model
    caveats: tuple[str, ...] = ()  #: added to every judge prompt (as in Appendix F)

    @property
    @abstractmethod
    def splits(self) -> tuple[str, ...]:
        """Names of the splits that exist."""

    @abstractmethod
    def tasks(self, split: str) -> tuple[Task, ...]:
        """Tasks of a split in a fixed order.

        Raises:
            ConfigError: the split does not exist; the message lists those that do.
        """

    @abstractmethod
    def open(self, task: Task, *, seed: int) -> Episode:
        """Start an episode. `seed` keys whatever is random in the environment."""

    def check(self) -> None:  # noqa: B027 - optional
        """Try out whether episodes can run here. Called once, before a run loads or pays for anything.

        Raises:
            ConfigError: they cannot; one line that says what to do.
        """

    def close(self) -> None:  # noqa: B027 - optional
        """Release what outlives episodes, such as servers. It may be used again afterwards."""

    def opening(self, task: Task) -> tuple[Message, ...]:
        """Opening messages of a task, without keeping an episode."""
        episode = self.open(task, seed=0)
        try:
            return episode.opening
        finally:
            episode.close()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What only an evaluator may say."""

    success: bool | None  #: None: the evaluator failed; counted, never 0
    causal_steps: tuple[int, ...] = ()  #: 1-based steps that caused the failure, where the environment knows
    faults: tuple[str, ...] = ()  #: names of the mistakes, where the environment knows
    error: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict)  #: what else the environment says, for people to read


class Evaluator(ABC):
    """Reads end states. Injected into validation and into reward stages that read outcomes by name, nowhere else."""

    @abstractmethod
    def evaluate(self, task: Task, end_state: str) -> Outcome:
        """Success of one finished episode."""

    def close(self) -> None:  # noqa: B027 - optional
        """Release what outlives evaluations, such as servers. It may be used again afterwards."""


def parse_tool_call(body: str) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a JSON function call.

    Raises:
        ValueError: not a JSON object with a string `name` and an object `arguments`.
    """
    call = json.loads(body)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError('expected {"name": ..., "arguments": {...}}')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        raise ValueError("arguments must be an object")
    return call["name"], arguments
