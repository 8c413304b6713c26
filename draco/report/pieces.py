"""Texts of token ids, for the viewer: from the policy's tokenizer where it is at hand, otherwise ids alone."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

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
        folder = Path(str(files(path.removeprefix("pkg://")))) if path.startswith("pkg://") else Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            self.gap = f"Tokens are shown as ids: no tokenizer.json under {path}."
            return
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(file))

    def of(self, ids: Iterable[int]) -> dict[int, str]:
        """Text by id; empty without a tokenizer."""
        if self._tokenizer is None:
            return {}
        return {i: self._tokenizer.decode([i], skip_special_tokens=False) for i in sorted(ids)}
