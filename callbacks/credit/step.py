"""Step credit: A_i redistributed over the steps that the verdicts cite (DRACO).

    Q_j = passes / (passes + fails) citing step j        w_j = Q_j if A_i ≥ 0 else 1 − Q_j        Eq. 4, 5
    a_j = A_i · N · w_j / (n_j · Σ_k w_k)                                                          Eq. 6

Why: in a long episode a few steps decide. The total of a trajectory, Σ n_j a_j = A_i·N, stays that of GRPO. If the
attribution call overrode a verdict, its cited steps belong to the other verdict, so they count in no Q (with
`attribution_overrides=ignore`; with `apply` the score was replaced). A checkpoint need not save any state.
"""

from __future__ import annotations

from typing import Literal

from draco.config.options import checked
from draco.core.types import Judgement
from draco.credit.base import GroupCredit
from draco.credit.redistribution import StepCredit, redistribute

__all__ = ["StepLevelCredit"]


@checked("credit")
class StepLevelCredit(GroupCredit):
    """Closed-form redistribution.

    Args:
        unanimous: rule for equal positive weights (Appendix E.7): `equal_totals` (the formula) or `uniform`.
        options: of `GroupCredit`.
    """

    needs_citations = True

    def __init__(self, *, unanimous: Literal["equal_totals", "uniform"] = "equal_totals", **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.unanimous: Literal["equal_totals", "uniform"] = unanimous

    def credit(self, judgement: Judgement, member: int, advantage: float) -> StepCredit:
        surviving = [row[member] for row, out in zip(judgement.verdicts, judgement.dropped, strict=True) if not out]
        citations = [(0, ()) if v.override is not None else (v.score, v.steps) for v in surviving]
        tokens = judgement.group.trajectories[member].step_tokens
        return redistribute(advantage, citations, tokens, unanimous=self.unanimous)
