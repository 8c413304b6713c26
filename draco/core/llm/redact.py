"""Keys never reach a record, a log line or an exception text."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

__all__ = ["Redactor"]

_KEY_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS?)$", re.IGNORECASE)
_KEY_SHAPE = re.compile(
    r"\b(?:sk|pk|rk|xai|gsk|hf)[-_][\w\-]{8,}|\bAIza[\w\-]{8,}|(?<=Bearer )[\w\-.~+/=]{8,}|(?<=://)[^/@\s]+(?=@)"
)
_MARK = "[redacted]"
_SHORTEST = 8


class Redactor:
    """Removes the keys that the environment and the configuration hold.

    >>> Redactor(["hunter2-hunter2"])("it was hunter2-hunter2")
    'it was [redacted]'
    """

    def __init__(self, keys: Iterable[str | None] = ()) -> None:
        self._keys: list[str] = []
        for key in (*(v for k, v in os.environ.items() if _KEY_NAME.search(k)), *keys):
            self.add(key)

    def add(self, key: str | None) -> None:
        """One more key. Shorter ones (`EMPTY`, `x`, which local servers want) are no secrets but parts of words."""
        if key and len(key) >= _SHORTEST and key not in self._keys:
            self._keys = sorted([*self._keys, key], key=len, reverse=True)

    def __call__(self, text: str) -> str:
        """`text` without any known key."""
        for key in self._keys:
            if key in text:
                text = text.replace(key, _MARK)
        return text

    def error(self, text: str) -> str:
        """A provider's error text without known keys and without anything shaped like one; at most 2,000 characters."""
        return _KEY_SHAPE.sub(_MARK, self(text))[:2000]
