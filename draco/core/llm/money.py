"""Tokens of a request and what they cost.

Prices come from litellm's bundled table or from the configuration. An unknown price is unknown, never 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from draco.core.llm.library import load_litellm

__all__ = ["Prices", "Usage", "price_of"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request, as the provider counts."""

    tokens_in: int = 0  #: cached ones included
    tokens_out: int = 0
    tokens_cached: int = 0  #: of `tokens_in`, read from the provider's prefix cache


@dataclass(frozen=True, slots=True)
class Prices:
    """USD a million tokens."""

    input: float
    output: float
    cached: float | None = None  #: input tokens read from the provider's prefix cache; None = like the others

    def cost(self, usage: Usage) -> float:
        """USD.

        >>> Prices(input=1.0, output=10.0, cached=0.5).cost(Usage(1_000_000, 100_000, 400_000))
        1.8
        """
        cached = self.input if self.cached is None else self.cached
        fresh = usage.tokens_in - usage.tokens_cached
        return (fresh * self.input + usage.tokens_cached * cached + usage.tokens_out * self.output) / 1e6


def price_of(model: str) -> Prices | None:
    """What litellm's packaged table says of a model; None: it does not know it."""
    try:
        info = load_litellm().get_model_info(model)
    except Exception:  # litellm raises a bare Exception for a model that is not in its table
        return None
    names = ("input_cost_per_token", "output_cost_per_token", "cache_read_input_token_cost")
    each, output, cached = (None if info.get(name) is None else info[name] * 1e6 for name in names)
    return None if each is None or output is None else Prices(each, output, cached)
