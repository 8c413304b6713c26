"""What the check runs on: trajectories of given tokens for the trainer, short conversations for the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draco.core.types import Message, Step, Task, Termination, Trajectory
from draco.env.base import ActionFormat, ActionSpan, Episode, Reply
from draco.policy.chat import ChatFormat
from draco.rollout.loop import Limits
from draco.rollout.rollout import Rollout
from draco.update.packing import Row

__all__ = ["NUMBERS", "WORDS", "Numbers", "Talk", "conversations", "rows_of_tokens", "text"]

_SENTENCES = (
    "The meeting on Tuesday was moved to room 14. ", "Please send 3 copies of the report to Anna before noon. ",
    "It rained for 25 days, and the river rose by 2 metres. ", "def add(a, b): return a + b. ",
    "She asked: what is 17 times 6? The answer is 102. ", "Nobody had seen the key since the 8th of May. ",
)  # fmt: skip


def text(sentences: int, start: int = 0) -> str:
    """So many plain sentences."""
    return "".join(_SENTENCES[(start + i) % len(_SENTENCES)] for i in range(sentences)).strip()


# --- for the trainer --------------------------------------------------------------------------------------------------


def rows_of_tokens(lengths: Sequence[int], ids: Sequence[int]) -> list[Row]:
    """Rows of `lengths` tokens, taken from `ids` at different places; three steps each, of different advantage."""
    return [_row(i, [ids[(7 * i + j) % len(ids)] for j in range(n)]) for i, n in enumerate(lengths)]


def _row(number: int, tokens: list[int]) -> Row:
    """Prompt, step, gap, step, gap, step."""
    count = len(tokens)
    cuts = sorted({max(1, count * part // 10) for part in (2, 4, 5, 7, 8)} | {count})
    spans = list(zip(cuts[::2], cuts[1::2], strict=False))
    step_of = [-1] * count
    for j, (start, stop) in enumerate(spans):
        step_of[start:stop] = [j] * (stop - start)
    steps = tuple(Step(j + 1, span, "", "", j + 1) for j, span in enumerate(spans))
    trajectory = Trajectory(
        _TASK, number, (), tuple(tokens), tuple(step_of), (0.0,) * count, steps, Termination.SUBMITTED, cuts[0], 0, 0
    )
    return Row(trajectory, tuple((-1.0) ** (number + j) * (1 + 0.25 * j) for j in range(len(spans))))


# --- for the engine ---------------------------------------------------------------------------------------------------

_TASK = Task("conformance", "", "", "")


class _EveryTurn(ActionFormat):
    """The whole turn is one action."""

    def parse(self, text: str) -> tuple[ActionSpan, ...]:
        return (ActionSpan(0, len(text), text),)


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation: its prompt, the answers to its turns but the last, and the tokens of a turn."""

    prompt: str
    answers: tuple[str, ...]
    turn: int


class _Episode(Episode):
    """Gives the answers of a talk, then ends."""

    format = _EveryTurn("turn", "", "")

    def __init__(self, talk: Talk) -> None:
        self.opening = (Message("system", "Answer in one sentence."), Message("user", talk.prompt))
        self._answers = list(talk.answers)

    def step(self, actions: Sequence[str]) -> Reply:
        done = not self._answers
        return Reply(("",) if done else (self._answers.pop(0),), done, completed=done)

    def end_state(self) -> str:
        return ""


#: for real tokenizers: short and long prompts and answers; about 250 tokens in all, of which at most 30 are sampled
WORDS = (
    Talk(text(1), (text(1, 1),), 5),
    Talk(text(3, 2), (), 5),
    Talk(text(1, 4), (text(2, 2), text(1, 5)), 5),
)
#: for `Numbers`: a switch at 16 or 24 tokens lies in a turn, in an answer, in a prompt, and behind the row's end
NUMBERS = (
    Talk("5", ("3",), 3),
    Talk("12", ("5", "2"), 9),
    Talk("40", ("3",), 6),
    Talk("8", ("30",), 5),
    Talk("14", ("1",), 14),
)


class Numbers(ChatFormat):
    """Stands for a tokenizer: the text "12" is twelve tokens. For copies, whose vocabulary is small."""

    def __init__(self, vocabulary: int) -> None:
        self.end_ids: frozenset[int] = frozenset()
        self.opened = ""
        generator = torch.Generator().manual_seed(0)
        self.ids: list[int] = torch.randint(1, vocabulary, (256,), generator=generator).tolist()

    def prompt_ids(self, opening: Sequence[Message]) -> tuple[int, ...]:
        return tuple(self.ids[: int(opening[-1].content)])

    def glue(self, observation: str, last_id: int | None) -> tuple[int, ...]:
        return tuple(self.ids[100 : 100 + int(observation)])

    def decode(self, ids: Sequence[int]) -> str:
        return ""


def conversations(chat: ChatFormat, talks: Sequence[Talk]) -> list[Rollout]:
    """Rollouts that have not begun."""
    return [
        Rollout(_Episode(talk), chat, Limits(max_turn_tokens=talk.turn), task=_TASK, sample=i, seed=i, policy_version=0)
        for i, talk in enumerate(talks)
    ]
