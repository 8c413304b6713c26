"""Which proposed criteria say the same in other words, as far as that can be told without a judge.

What tells criteria of one task apart are names, amounts and objects, and these are words of the task or of its
attempts. So two criteria count as one when their texts are nearly alike (rapidfuzz) and hold the same of those words in
the same order: then only the proposer's own wording differs. The merge call does all further merging.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from rapidfuzz import fuzz

from draco.core.types import Criterion, Trajectory

__all__ = ["distinct", "vocabulary"]

_WORD = re.compile(r"\w+")
_NEARLY = 88.0  # percent
#: words that change a requirement, wherever they come from
_DECISIVE = frozenset(
    _WORD.findall(
        "no not never none only all every each any both before after until without once twice again first last new old "
        "exact exactly least most more less than"
    )
)
#: words that every text holds and that say nothing
_FUNCTION = frozenset(
    _WORD.findall(
        "a an the of to in on at by for from with as that which who it its this these those is are was were "
        "be been and has have had do does"
    )
)


def vocabulary(trajectories: Iterable[Trajectory]) -> frozenset[str]:
    """The words of the task and of what was done and answered."""
    words: set[str] = set()
    for t in trajectories:
        for text in (*(m.content for m in t.messages), *(part for s in t.steps for part in (s.action, s.observation))):
            words.update(_WORD.findall(text.casefold()))
    return frozenset(words - _FUNCTION)


def distinct(criteria: Iterable[Criterion], material: Collection[str]) -> tuple[Criterion, ...]:
    """The criteria in order, without those that repeat an earlier one.

    Args:
        criteria: as proposed.
        material: words that have to agree, see `vocabulary`.
    """
    kept: list[tuple[str, tuple[str, ...], Criterion]] = []
    for criterion in criteria:
        text = f"{criterion.title}\n{criterion.description}\n{criterion.evaluator_instruction}".casefold()
        facts = tuple(
            word
            for word in _WORD.findall(text)
            if word in material or word in _DECISIVE or any(c.isdigit() for c in word)
        )
        if not any(facts == other and fuzz.ratio(text, earlier) >= _NEARLY for earlier, other, _ in kept):
            kept.append((text, facts, criterion))
    return tuple(criterion for *_, criterion in kept)
