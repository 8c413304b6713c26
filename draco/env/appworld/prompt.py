"""What the agent is told: system prompt (with and without thinking), user message, observations cut to a limit."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.resources import files

from draco.core.types import Message, Task

__all__ = ["CAVEATS", "TokenCounter", "cut", "opening"]

#: what a judge must know to judge AppWorld transcripts (Appendix F)
CAVEATS = (
    "Calling complete_task marks the task as finished but does not end the episode: the agent is given one more turn. "
    "A short closing turn without code after it is right; code that still changes something after it is not.",
    "Every action must stand between <code> and </code>. The tags are required by the environment and are no mistake.",
    "Only one code block is run in a turn; what it prints is the only thing that the agent sees of it. A block without "
    "print answers 'Execution successful.' whatever its calls returned.",
    "Long outputs are cut by the environment, which says so in the last line; the cut is not the agent's doing, acting "
    "as if nothing were missing is.",
    "Passwords and tokens that the supervisor app hands out are meant to be used in calls.",
)


def opening(task: Task, *, thinking: bool) -> tuple[Message, Message]:
    """System and user message of a task."""
    folder = files("draco.env.appworld") / "prompts"
    how = "thinking" if thinking else "plain"
    system = (folder / "system.md").read_text(encoding="utf-8")
    system = system.replace("{how}", (folder / f"{how}.md").read_text(encoding="utf-8").strip()).strip()
    who = task.metadata["supervisor"]
    user = (
        f"I am your supervisor, {who['first_name']} {who['last_name']} (e-mail {who['email']}, phone "
        f"{who['phone_number']}). It is now {task.metadata['datetime'].replace('T', ' ')}.\n\nTask: {task.instruction}"
    )
    return Message("system", system), Message("user", user)


def cut(text: str, limit: int, count: Callable[[str], int]) -> str:
    """`text`, or as many whole lines of it as fit into `limit` tokens with the note that says so.

    A single line that is longer than that is cut at a character.
    """
    # A token has at least one byte, and almost none has more than 128 characters.
    if len(text.encode()) <= limit or (len(text) < 128 * limit and count(text) <= limit):
        return text
    lines = text.splitlines(keepends=True)
    note = "[output cut here: {shown} of {total} lines shown, limit {limit} tokens]"
    room = limit - count(note.format(shown=len(lines), total=len(lines), limit=limit)) - 1
    kept = _largest(len(lines), lambda n: count("".join(lines[:n])) <= room)
    head = "".join(lines[:kept])
    if not kept:
        head = lines[0][: _largest(min(len(lines[0]), 128 * limit), lambda n: count(lines[0][:n]) <= room)]
    return f"{head.rstrip(chr(10))}\n{note.format(shown=kept, total=len(lines), limit=limit)}"


def _largest(high: int, fits: Callable[[int], bool]) -> int:
    """Largest n ≤ high that fits, by bisection; 0 if none."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


class TokenCounter:
    """Counts tokens with the policy's tokenizer, loaded at first use; without one by an estimate that is rather high.

    Args:
        path: what `policy.path` is; None estimates: words of up to four letters, single digits and signs.
        gguf_file: what `policy.gguf_file` is.
    """

    def __init__(self, path: str | None = None, gguf_file: str | None = None) -> None:
        self.path, self.gguf_file = path, gguf_file
        self._tokenizer: Callable[..., dict[str, list[int]]] | None = None

    def __call__(self, text: str) -> int:
        if self.path is None:
            return len(re.findall(r"[^\W\d_]{1,4}|\d|\s+|[^\w\s]|_", text))
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            from draco.core.files import resolve

            options = {"gguf_file": self.gguf_file} if self.gguf_file else {}
            self._tokenizer = AutoTokenizer.from_pretrained(resolve(self.path), **options)
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])
