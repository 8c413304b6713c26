"""Counts of an archived step, from its tables (Section 4.4). All figures of the report are drawn from these."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from draco.run.archive import archived_steps, step_folder

__all__ = ["PhaseCost", "StepNumbers", "Verdicts", "archive_numbers", "inert_share", "step_numbers", "total", "windows"]


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Counts of scored verdicts."""

    passes: int = 0
    fails: int = 0
    na: int = 0

    @property
    def pass_rate(self) -> float | None:
        """Share of passes among passes and fails; None if there are none."""
        return self.passes / (self.passes + self.fails) if self.passes + self.fails else None

    def __add__(self, other: Verdicts) -> Verdicts:
        return Verdicts(self.passes + other.passes, self.fails + other.fails, self.na + other.na)


@dataclass(frozen=True, slots=True)
class PhaseCost:
    """Tokens and cost of the judge calls of one phase, retries included."""

    tokens: int = 0  #: input and output
    usd: float | None = 0.0  #: None: the price of a call is unknown


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """Counts of one archived step."""

    step: int
    rollouts: int
    terminations: Mapping[str, int]
    members: int  #: judged rollouts, which have credit
    inert: int | None  #: members with no passes or no fails after dropout; None without criteria
    reasons: Mapping[str, int]  #: credit reasons of the members
    verdicts: Verdicts  #: of all criteria, before dropout
    by_title: Mapping[str, Verdicts]
    citations: Mapping[int, int]  #: number of passes and fails (after dropout) that cite a step → number of steps
    calls: Mapping[str, PhaseCost]  #: by phase


def step_numbers(run: Path, step: int) -> StepNumbers:
    """Count one step."""
    ends = Counter(r["termination"] for r in _rows(run, step, "trajectories", "termination"))
    credits = _rows(run, step, "credits", "group", "sample", "reason", "step_tokens")
    criteria = {
        (r["group"], r["criterion"]): (r["dropped"], r["title"])
        for r in _rows(run, step, "criteria", "group", "criterion", "dropped", "title")
    }
    members = {(r["group"], r["sample"]): len(r["step_tokens"]) for r in credits}
    by_title: dict[str, Verdicts] = defaultdict(Verdicts)
    scores: dict[tuple[int, int], set[int]] = {m: set() for m in members}  # passes and fails left after dropout
    cited: dict[tuple[int, int], Counter[int]] = {m: Counter() for m in members}
    for r in _rows(run, step, "verdicts", "group", "criterion", "sample", "score", "cited_steps"):
        dropped, title = criteria[r["group"], r["criterion"]]
        by_title[title] += Verdicts(r["score"] == 1, r["score"] == -1, r["score"] == 0)
        member = (r["group"], r["sample"])
        if not dropped and r["score"] and member in members:
            scores[member].add(r["score"])
            cited[member].update(set(r["cited_steps"] or ()))
    citations: Counter[int] = Counter()
    if any(cited.values()):
        for member, steps in members.items():
            citations.update(cited[member][j] for j in range(1, steps + 1))
    return StepNumbers(
        step=step,
        rollouts=sum(ends.values()),
        terminations=dict(ends),
        members=len(credits),
        inert=sum(len(s) < 2 for s in scores.values()) if criteria else None,
        reasons=dict(Counter(r["reason"] for r in credits)),
        verdicts=total(by_title.values()),
        by_title=dict(by_title),
        citations=dict(citations),
        calls=_calls(run, step),
    )


def archive_numbers(run: Path) -> list[StepNumbers]:
    """Every archived step, in order."""
    return [step_numbers(run, step) for step in archived_steps(run)]


def total(parts: Iterable[Verdicts]) -> Verdicts:
    """Sum of counts."""
    return sum(parts, Verdicts())


def inert_share(steps: Iterable[StepNumbers]) -> float | None:
    """Inert members among all members of steps with criteria; None without any."""
    known = [(s.inert, s.members) for s in steps if s.inert is not None and s.members]
    return sum(inert for inert, _ in known) / sum(members for _, members in known) if known else None


def windows(steps: Sequence[StepNumbers], width: int) -> list[list[StepNumbers]]:
    """Steps grouped by number: [0, width), [width, 2·width), …; empty groups are left out."""
    found: dict[int, list[StepNumbers]] = defaultdict(list)
    for s in steps:
        found[s.step // width].append(s)
    return [found[k] for k in sorted(found)]


def _rows(run: Path, step: int, table: str, *columns: str) -> list[dict[str, Any]]:
    file = step_folder(run, step) / f"{table}.parquet"
    if not file.is_file():
        return []
    rows: list[dict[str, Any]] = pq.ParquetFile(file).read(columns=list(columns), use_threads=False).to_pylist()
    return rows


def _calls(run: Path, step: int) -> dict[str, PhaseCost]:
    costs: dict[str, PhaseCost] = defaultdict(PhaseCost)
    for r in _rows(run, step, "judge_calls", "phase", "cost_usd", "tokens_in", "tokens_out"):
        old = costs[r["phase"]]
        usd = None if old.usd is None or r["cost_usd"] is None else old.usd + r["cost_usd"]
        costs[r["phase"]] = PhaseCost(old.tokens + r["tokens_in"] + r["tokens_out"], usd)
    return dict(costs)
