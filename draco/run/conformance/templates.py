"""The chat format against the template's own rendering: end tokens, and conversations that grow turn by turn."""

from __future__ import annotations

import re
from collections.abc import Sequence

from draco.core.errors import TemplateError
from draco.core.types import Message
from draco.policy.chat import ChatFormat
from draco.run.conformance.rows import text

__all__ = ["end_tokens", "round_trips"]

_TURNS = (f"{text(1, 1)}\n<code>print(3)</code>", text(2, 2), "é ü 中 <b>1</b>  two spaces\n\nand lines")
_THOUGHT = "<think>\nI look at the list first.\n</think>\n\n"
_NO_THOUGHT = re.compile(r"<think>\s*</think>\s*")  #: what some templates write into turns without a thought
_ANSWERS = ("[1] done", "two lines\n  and blanks", "error: no such id, at line 3")


def end_tokens(chat: ChatFormat) -> str:
    """Spellings of the ids that end a turn.

    Raises:
        TemplateError: the template closes a turn with something else, so a turn could run past its own end.
    """
    tokenizer = chat.tokenizer
    tail = chat.glue("", None)
    if not tail or tail[0] not in chat.end_ids:
        raise TemplateError(
            f"after a turn the template writes {tokenizer.decode(list(tail[:1]))!r}, which is no end token: rollouts "
            "would run past the end of their turns"
        )
    return " ".join(sorted(tokenizer.decode([i]) for i in chat.end_ids))


def round_trips(chat: ChatFormat) -> str:
    """Which conversations have token ids that say, turn by turn, what the template renders for the same messages.

    Raises:
        TemplateError: one of them differs.
    """
    system, ask = Message("system", "You help. Today is a good day."), Message("user", text(2))
    said = []
    for name, opening in (("system", [system, ask]), ("no system", [ask])):
        if not chat.opened:
            said.append(name + _follow(chat, f"{name} message", opening, _TURNS))
    closed = chat.decode(chat.prompt_ids([ask])).rstrip().endswith("</think>")  # thinking is switched off
    if not closed:
        thought = _THOUGHT.removeprefix(chat.opened).lstrip("\n") if chat.opened else _THOUGHT
        said.append("thoughts" + _follow(chat, "thoughts", [system, ask], [thought + t for t in _TURNS]))
    return ", ".join(said)


def _follow(chat: ChatFormat, name: str, opening: Sequence[Message], turns: Sequence[str]) -> str:
    """Play a conversation and compare after every turn; returns a remark, mostly an empty one.

    Raises:
        TemplateError: the text of the ids is not what the template renders.
    """
    ids = list(chat.prompt_ids(opening))
    messages: list[dict[str, str]] = [{"role": m.role, "content": m.content} for m in opening]
    remark = ""
    for turn, answer in zip(turns, _ANSWERS, strict=True):
        ids += [*chat.encode_text(turn), *chat.glue(answer, None)]
        messages += [{"role": "assistant", "content": chat.opened + turn}, {"role": "user", "content": answer}]
        have, want = chat.decode(ids), chat.decode(chat.rendered_ids(messages))
        if have != want:
            if _NO_THOUGHT.sub("", have) == _NO_THOUGHT.sub("", want):
                remark = " (the template writes an empty thought into earlier turns without one)"
                continue
            at = next((i for i, (a, b) in enumerate(zip(have, want, strict=False)) if a != b), len(want))
            raise TemplateError(
                f"a conversation with {name} becomes other text than the template renders: "
                f"{have[max(0, at - 20) : at + 20]!r} in place of {want[max(0, at - 20) : at + 20]!r}"
            )
    return remark
