"""The bill of judge calls, and its projection from calls on a made-up group."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from draco.core.llm.money import Prices, Usage
from draco.judge.records import CallRecord
from draco.judge.transcript import DIGEST

__all__ = ["Line", "bill", "projected"]

#: a delimited block of a prompt: its kind and its text
_BLOCK = re.compile(r"<<<BEGIN (TRANSCRIPT|STEPS|OPENING|DIGEST) \S+>>>\n(.*?)<<<END \1", re.DOTALL)
_STEP_TAGS = 120  #: most characters of the tags and cut marks of a step in a digest


@dataclass(frozen=True, slots=True)
class Line:
    """Calls of one kind at one price; tokens are the mean of a call."""

    phase: str
    calls: float
    tokens_in: float
    tokens_out: float
    tokens_cached: float = 0.0  #: of `tokens_in`, read from the provider's prefix cache
    price: Prices | None = None  #: None = unknown


def bill(lines: Iterable[Line]) -> dict[str, Any]:
    """Sums of calls, tokens and USD (None: a price is unknown), and the sums of each phase under `phases`."""
    names = ("calls", "tokens_in", "tokens_out", "tokens_cached")
    phases: dict[str, dict[str, float]] = {}
    usd: float | None = 0.0
    for line in lines:
        tokens = [line.calls * t for t in (line.tokens_in, line.tokens_out, line.tokens_cached)]
        row = phases.setdefault(line.phase, dict.fromkeys(names, 0.0))
        for name, value in zip(names, (line.calls, *tokens), strict=True):
            row[name] += value
        known = usd is not None and line.price is not None
        usd = usd + line.price.cost(Usage(*map(round, tokens))) if known else None  # type: ignore[operator, union-attr]
    return {**{name: sum(row[name] for row in phases.values()) for name in names}, "usd": usd, "phases": phases}


def projected(
    calls: Sequence[CallRecord],
    group_size: int,
    limits: tuple[int, int, int],
    price: Callable[[str], Prices | None],
) -> Iterator[Line]:
    """Project the judge calls of a real group from the calls on a made-up group of two.

    Every transcript in a prompt is counted as long as the limits allow, without prefix caching. Each voter, and each of
    its repeats, is a line of its own, at the price of its model.

    Args:
        calls: on the made-up group.
        group_size: rollouts of a real group.
        limits: most tokens of a prompt, most tokens of a response, most turns.
        price: of a model; None = unknown.
    """
    prompt, response, turns = limits
    for phase, model, repeat in dict.fromkeys((c.phase, c.model, c.repeat) for c in calls):
        mine = [c for c in calls if (c.phase, c.model, c.repeat) == (phase, model, repeat)]
        on_group = mine[0].sample < 0
        text = "".join(content for _, content in mine[0].messages)
        tokens_in = sum(c.tokens_in for c in mine) / len(mine)
        tokens_out = sum(c.tokens_out for c in mine) / len(mine)
        per_character = tokens_in / max(len(text), 1)
        digest = per_character * turns * (DIGEST.action + DIGEST.observation + _STEP_TAGS)
        longest = {
            "TRANSCRIPT": prompt + response, "STEPS": response, "OPENING": prompt, "DIGEST": min(response, digest),
        }  # fmt: skip
        blocks = _BLOCK.findall(text)
        for kind, inside in blocks:
            several = on_group and sum(k == kind for k, _ in blocks) > 1  # a block for each of the two rollouts
            tokens_in += longest[kind] * (group_size / 2 if several else 1.0) - per_character * len(inside)
        free = all(c.cost_usd == 0.0 for c in mine)  # as the judge reports
        each = Prices(0.0, 0.0) if free else price(model)
        yield Line(phase, 1.0 if on_group else float(group_size), tokens_in, tokens_out, price=each)
