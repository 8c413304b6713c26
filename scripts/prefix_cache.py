"""How many prompt tokens a provider's prefix cache would not have to read again, under a stated model.

Cached is the longest common prefix with any prompt whose call was *completed* before, in complete blocks of 128 tokens
and from 1,024 tokens on. Nothing is evicted within one step, nothing is kept from one step to the next. Calls of one
kind within a step start together (all its groups at once), so none of them finds the prompt of another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from draco.judge.prompts import CALLS
from draco.judge.records import CallRecord

__all__ = ["BLOCK", "LEAST", "PrefixCache", "PromptTokens", "prompt_tokens"]

BLOCK = 128  #: tokens
LEAST = 1024  #: tokens; a shorter common prefix is not cached


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Prompt tokens of some calls."""

    calls: int = 0
    tokens: int = 0
    cached: int = 0

    @property
    def uncached(self) -> int:
        """Tokens that are read and paid in full."""
        return self.tokens - self.cached

    def __add__(self, other: PromptTokens) -> PromptTokens:
        return PromptTokens(self.calls + other.calls, self.tokens + other.tokens, self.cached + other.cached)


class PrefixCache:
    """Prompts of completed calls, as hashes of all their block-wise prefixes."""

    def __init__(self) -> None:
        self._prefixes: set[int] = set()

    def add(self, tokens: Sequence[int]) -> None:
        """A call with this prompt was completed."""
        self._prefixes.update(_prefixes(tokens))

    def cached(self, tokens: Sequence[int]) -> int:
        """Tokens of this prompt that are cached."""
        hit = 0
        for prefix in _prefixes(tokens):
            if prefix not in self._prefixes:
                break
            hit += BLOCK
        return hit if hit >= LEAST else 0


def _prefixes(tokens: Sequence[int]) -> Iterable[int]:
    running = 0
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        running = hash((running, tuple(tokens[start : start + BLOCK])))
        yield running


def prompt_tokens(records: Iterable[CallRecord], encode: Callable[[str], Sequence[int]]) -> dict[str, PromptTokens]:
    """PromptTokens by kind of call, over all steps.

    Args:
        records: of all attempts; transport retries and re-asks are calls like others.
        encode: text → token ids.
    """
    found: dict[str, PromptTokens] = {}

    def wave(record: CallRecord) -> tuple[int, int]:
        return record.step, CALLS.index(record.phase)

    for _, of_step in groupby(sorted(records, key=wave), key=lambda r: r.step):
        cache = PrefixCache()
        for phase, calls in groupby(of_step, key=lambda r: r.phase):
            prompts = [[t for role, text in r.messages for t in encode(f"<{role}>\n{text}")] for r in calls]
            for tokens in prompts:
                found[phase] = found.get(phase, PromptTokens()) + PromptTokens(1, len(tokens), cache.cached(tokens))
            for tokens in prompts:
                cache.add(tokens)
    return found
