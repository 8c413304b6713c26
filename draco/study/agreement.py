"""How far two judges, or a judge and a person, agree on pass and fail."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

__all__ = ["Agreement", "agreement"]


@dataclass(frozen=True, slots=True)
class Agreement:
    """Over verdict pairs (reference, other), scores in −1, 0, +1. A rate without a denominator is None."""

    pairs: int
    agreement: float | None  #: same verdict, of all three
    all_pass_baseline: float | None  #: agreement of a judge that passes everything
    false_pass: float | None  #: the other passes, of what the reference fails
    false_fail: float | None  #: the other fails, of what the reference passes
    kappa: float | None  #: Cohen's κ; None where chance agreement is 1
    ac1: float | None  #: Gwet's AC1 over the categories in use, at least two

    def as_dict(self) -> dict[str, float | int | None]:
        """JSON-able fields."""
        return asdict(self)


def agreement(pairs: Iterable[tuple[int, int]]) -> Agreement:
    """Agreement statistics.

    κ = (p_o − Σ_c r_c·o_c) / (1 − Σ_c r_c·o_c), with r and o the category shares of reference and other (Cohen 1960).
    AC1 = (p_o − e) / (1 − e), e = Σ_c π_c·(1 − π_c) / (C − 1), π_c = (r_c + o_c) / 2 (Gwet 2008).

    Raises:
        ValueError: a score outside {−1, 0, 1}.

    Example::

        >>> agreement([(1, 1), (-1, 1), (-1, -1), (1, 1)]).false_pass
        0.5
    """
    found = list(pairs)
    if wrong := {s for pair in found for s in pair} - {-1, 0, 1}:
        raise ValueError(f"expected scores in -1, 0, 1, got {sorted(wrong)}")
    n = len(found)
    if not n:
        return Agreement(0, None, None, None, None, None, None)
    same = sum(a == b for a, b in found) / n
    failed, passed = [b for a, b in found if a == -1], [b for a, b in found if a == 1]
    reference = {c: sum(a == c for a, _ in found) / n for c in (-1, 0, 1)}
    other = {c: sum(b == c for _, b in found) / n for c in (-1, 0, 1)}
    chance = sum(reference[c] * other[c] for c in (-1, 0, 1))
    shares = [(reference[c] + other[c]) / 2 for c in (-1, 0, 1)]
    categories = max(sum(s > 0 for s in shares), 2)
    gwet = sum(s * (1 - s) for s in shares) / (categories - 1)
    return Agreement(
        pairs=n,
        agreement=same,
        all_pass_baseline=reference[1],
        false_pass=failed.count(1) / len(failed) if failed else None,
        false_fail=passed.count(-1) / len(passed) if passed else None,
        kappa=(same - chance) / (1 - chance) if chance < 1 else None,
        ac1=(same - gwet) / (1 - gwet),
    )
