"""A trajectory as numbered, role-tagged text between unguessable delimiters.

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

Nothing in it tells how the episode ended or whether it succeeded. All of it is untrusted: the code of the delimiters is
an HMAC of the content under a secret of the run, so that no text inside can contain its own delimiter, while the same
content always gives the same prompt (caches and resume rely on that).
"""

from __future__ import annotations

import hashlib
import hmac
import re

from draco.types import Message, Trajectory

__all__ = ["escape", "fence", "opening", "transcript"]

# What counts as a new line for a reader, not only for str.split("\n"): a carriage return or a Unicode line separator
# would show a forged role tag at the start of a line just as well.
_BREAK = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
_TAG = re.compile(
    rf"(^|[{_BREAK}])([^\S{_BREAK}]*)(\\*\[[^\S{_BREAK}]*(?:step\b|system|user|assistant|transcript|rollout))",
    re.IGNORECASE,
)


def escape(text: str) -> str:
    r"""Put a backslash before everything at the start of a line that looks like a role tag.

    >>> escape("[step 3] action:")
    '\\[step 3] action:'
    """
    return _TAG.sub(r"\1\2\\\3", text)


def _tagged(message: Message) -> str:
    return f"[{message.role}]\n{escape(message.content)}\n"


def opening(trajectory: Trajectory) -> str:
    """The messages before the agent's first turn: all that `propose_task` may see."""
    first = next((i for i, m in enumerate(trajectory.messages) if m.role == "assistant"), len(trajectory.messages))
    return "".join(_tagged(m) for m in trajectory.messages[:first])


def transcript(trajectory: Trajectory) -> str:
    """The whole trajectory as text, without delimiters. Steps carry their 1-based number."""
    parts = [opening(trajectory)]
    for step in trajectory.steps:
        parts.append(f"[step {step.index}] action:\n{escape(step.action)}\n")
        if step.observation:
            parts.append(f"[step {step.index}] observation:\n{escape(step.observation)}\n")
    parts.append("[transcript ends]\n")
    return "".join(parts)


def fence(content: str, kind: str, secret: bytes) -> str:
    """`content` between delimiters that nobody can foresee without `secret`."""
    code = hmac.new(secret, f"{kind}\0{content}".encode(errors="surrogatepass"), hashlib.sha256).hexdigest()[:32]
    return f"<<<BEGIN {kind} {code}>>>\n{content}<<<END {kind} {code}>>>\n"
