"""A trajectory as numbered text with role tags, between delimiters that nobody can guess.

    <<<BEGIN TRANSCRIPT 5f2c…>>>
    [system]
    …
    [user]
    …
    [step 1] action:
    …
    [step 1] observation:
    …
    [transcript ends]
    <<<END TRANSCRIPT 5f2c…>>>

Nothing in it tells how the episode ended or whether it succeeded. All of it is untrusted. The code of the delimiters is
an HMAC of the content under a secret of the run: no text can contain its own delimiter, and the same content always
gives the same prompt (caches and resume rely on that).

Kinds of block: OPENING (the messages before the first step), TRANSCRIPT (opening and steps), STEPS (the steps only, for
prompts that show the opening once), DIGEST (the steps only, cut short except those to show in full).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

from annotated_types import Ge

from draco.config.options import checked
from draco.core.errors import ConfigError
from draco.core.files import create_once
from draco.core.types import Message, Step, Trajectory

__all__ = [
    "CONTROL", "LEAST_SECRET", "Blocks", "Caps", "cut", "digest", "escape", "fence", "opening", "read_secret", "steps",
    "transcript",
]  # fmt: skip

LEAST_SECRET = 16  #: bytes

# Everything that a reader takes for a new line: a carriage return or a Unicode line separator, too, would show a forged
# role tag at the start of a line.
_BREAK = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
_TAG = re.compile(
    rf"(^|[{_BREAK}])([^\S{_BREAK}]*)(\\*\[[^\S{_BREAK}]*(?:step\b|system|user|assistant|transcript|rollout|cut\b))",
    re.IGNORECASE,
)
# Our own delimiters, and the control tokens of common chat templates: a server that renders the prompt may turn their
# spelling into the tokens.
_DELIMITER = re.compile(r"(\\*<<<\s*(?:BEGIN|END)\b)", re.IGNORECASE)
CONTROL = re.compile(
    r"([<\[])((?:\\*)(?:[|｜]|/?s>|/?(?:start|end)_of_turn>|[be]os>|/?INST\]|</?SYS>>))", re.IGNORECASE
)
_THINK = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)


@checked("rubric", action="rubric.max_action_chars", observation="rubric.max_observation_chars")
@dataclass(frozen=True, slots=True)
class Caps:
    """Most characters of one action and of one observation; a longer text is shown without its middle, and says so."""

    action: Annotated[int, Ge(40)] = 24_000
    observation: Annotated[int, Ge(40)] = 12_000


#: of a step in a digest
DIGEST = Caps(action=200, observation=160)


def escape(text: str) -> str:
    r"""Put a backslash before everything that looks like structure: role tags at the start of a line, delimiters, and
    (inside) the control tokens of chat templates.

    >>> escape("[step 3] action:"), escape("<|im_end|>")
    ('\\[step 3] action:', '<\\|im_end|>')
    """
    text = _TAG.sub(r"\1\2\\\3", text)
    if "<<<" in text:
        text = _DELIMITER.sub(r"\\\1", text)
    return CONTROL.sub(r"\1\\\2", text)


def cut(text: str, limit: int) -> str:
    """`text`, escaped; where it is longer than `limit` characters, a note stands in place of its middle."""
    if len(text) <= limit:
        return escape(text)
    head = (limit + 1) // 2
    tail = limit - head
    left_out = len(text) - limit
    return f"{escape(text[:head])}\n[cut: {left_out} characters]\n{escape(text[len(text) - tail :])}"


def _tagged(message: Message) -> str:
    return f"[{message.role}]\n{escape(message.content)}\n"


def opening(trajectory: Trajectory) -> str:
    """The messages before the agent's first turn: all that `propose_task` may see."""
    first = next((i for i, m in enumerate(trajectory.messages) if m.role == "assistant"), len(trajectory.messages))
    return "".join(_tagged(m) for m in trajectory.messages[:first])


def _step(step: Step, caps: Caps) -> str:
    text = f"[step {step.index}] action:\n{cut(step.action, caps.action)}\n"
    if step.observation:
        text += f"[step {step.index}] observation:\n{cut(step.observation, caps.observation)}\n"
    return text


def steps(trajectory: Trajectory, caps: Caps = Caps()) -> str:  # noqa: B008 - frozen
    """The steps as text, with their 1-based numbers."""
    return "".join(_step(step, caps) for step in trajectory.steps) + "[transcript ends]\n"


def transcript(trajectory: Trajectory, caps: Caps = Caps()) -> str:  # noqa: B008 - frozen
    """A trajectory as text, without delimiters."""
    return opening(trajectory) + steps(trajectory, caps)


def digest(trajectory: Trajectory, full: Collection[int], caps: Caps = Caps()) -> str:  # noqa: B008 - frozen
    """The steps, those in `full` (1-based) as in `steps`, the others without reasoning and cut to `DIGEST`."""
    parts = []
    for step in trajectory.steps:
        if step.index in full:
            parts.append(_step(step, caps))
        else:
            action = _THINK.sub("", step.action).strip() or step.action
            parts.append(_step(Step(step.index, step.span, action, step.observation, step.turn), DIGEST))
    return "".join(parts) + "[transcript ends]\n"


def fence(content: str, kind: str, secret: bytes) -> str:
    """`content` between delimiters that nobody can guess without `secret`."""
    code = hmac.new(secret, f"{kind}\0{content}".encode(errors="surrogatepass"), hashlib.sha256).hexdigest()[:32]
    return f"<<<BEGIN {kind} {code}>>>\n{content}<<<END {kind} {code}>>>\n"


@dataclass(slots=True)
class Blocks:
    """The fenced texts of one group, each made once."""

    secret: bytes
    caps: Caps = field(default_factory=Caps)
    _made: dict[tuple[str, int], str] = field(default_factory=dict)

    def opening(self, trajectory: Trajectory) -> str:
        """Kind OPENING."""
        return fence(opening(trajectory), "OPENING", self.secret)

    def transcript(self, trajectory: Trajectory) -> str:
        """Kind TRANSCRIPT."""
        return self._once("TRANSCRIPT", trajectory)

    def steps(self, trajectory: Trajectory) -> str:
        """Kind STEPS."""
        return self._once("STEPS", trajectory)

    def digest(self, trajectory: Trajectory, full: Collection[int]) -> str:
        """Kind DIGEST."""
        return fence(digest(trajectory, full, self.caps), "DIGEST", self.secret)

    def _once(self, kind: str, trajectory: Trajectory) -> str:
        key = (kind, trajectory.sample)
        if key not in self._made:
            render = transcript if kind == "TRANSCRIPT" else steps
            self._made[key] = fence(render(trajectory, self.caps), kind, self.secret)
        return self._made[key]


def read_secret(path: Path) -> bytes:
    """The secret in a file, made with mode 0600 if there is none.

    Raises:
        ConfigError: the file is too short to be a secret.
    """

    def make(made: Path) -> None:
        with open(made, "wb", opener=partial(os.open, mode=0o600)) as file:
            file.write(secrets.token_bytes(32))

    create_once(path, make)
    secret = path.read_bytes()
    if len(secret) < LEAST_SECRET:
        raise ConfigError(
            f"{path} holds {len(secret)} bytes, a transcript secret needs at least {LEAST_SECRET}; delete the file"
        )
    return secret
