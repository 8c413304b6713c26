"""Texts of token ids, for the viewer: from the policy's tokenizer if its file is there, else ids alone."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from draco.core.errors import ConfigError
from draco.core.files import resolve

__all__ = ["TokenPieces"]


class TokenPieces:
    """Looks up the text of single tokens.

    Args:
        path: `policy.path` of a run: a folder with tokenizer.json, or `pkg://package.name`.
    """

    def __init__(self, path: str) -> None:
        self._tokenizer: Any = None
        self.gap = ""  #: why there are no texts; empty when there are
        if not path:
            self.gap = "The trajectories came without a policy: token counts are estimates and have no texts."
            return
        with suppress(ConfigError):  # a package that is not installed
            file = Path(resolve(path)) / "tokenizer.json"
            if file.is_file():
                from tokenizers import Tokenizer

                self._tokenizer = Tokenizer.from_file(str(file))
                return
        self.gap = f"Tokens are shown as ids: no tokenizer.json under {path}."

    def of(self, ids: Iterable[int]) -> dict[int, str]:
        """Text by id; empty without a tokenizer."""
        if self._tokenizer is None:
            return {}
        return {i: self._tokenizer.decode([i], skip_special_tokens=False) for i in sorted(ids)}
