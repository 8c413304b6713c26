"""Texts of token ids, for the viewer: from the policy's tokenizer where it is at hand, otherwise ids alone."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
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
        folder = _folder(path)
        file = folder / "tokenizer.json" if folder is not None else None
        if file is None or not file.is_file():
            self.gap = f"Tokens are shown as ids: no tokenizer.json under {path}."
            return
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(file))

    def of(self, ids: Iterable[int]) -> dict[int, str]:
        """Text by id; empty without a tokenizer."""
        if self._tokenizer is None:
            return {}
        return {i: self._tokenizer.decode([i], skip_special_tokens=False) for i in sorted(ids)}


def _folder(path: str) -> Path | None:
    """Where a policy's files are; a package is found without importing it, which may need what is not installed."""
    if not path.startswith("pkg://"):
        return Path(path)
    try:
        spec = find_spec(path.removeprefix("pkg://"))
    except ModuleNotFoundError:
        return None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None
