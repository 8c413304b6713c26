"""Archived judge calls, sent byte for byte to another judge, and how far the two agree (Appendix B.1).

The archived verdicts are the reference. `false_pass` is the share of what the archived judge failed that the other
passes; `false_fail` the reverse.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draco.core import files
from draco.core.errors import ConfigError, JudgeConfigError, JudgeError
from draco.core.types import Criterion
from draco.judge.agreement import agreement
from draco.judge.client import JudgeClient
from draco.judge.parsing import parse_json
from draco.judge.records import CallRecord
from draco.judge.replies import check_attributions, check_criteria, check_scores
from draco.judge.requests import JudgeRequest
from draco.run.archive import read_calls
from draco.study.matching import criteria_overlap, gather, written

__all__ = ["load_results", "replay_calls", "replayable", "summarise_replay"]

_STEP = re.compile(r"^\[step (\d+)\] action:", re.MULTILINE)
_AT_ONCE = 64  #: calls


def replayable(run: Path, steps: Iterable[int] | None = None) -> list[dict[str, Any]]:
    """Calls with a usable reply, in the archive's order; a call that needed several attempts once, as last sent."""
    return [c for c in read_calls(run, steps) if c["outcome"] in {"ok", "repaired"}]


def load_results(file: Path) -> dict[str, dict[str, Any]]:
    """Results by call. Failures are left out: they are sent again. So is a last line that a kill cut off."""
    return {row["key"]: row for row in files.read_lines(file) if row["outcome"] == "ok"}


def _key(call: Mapping[str, Any]) -> str:
    return json.dumps([call["step"], call["task_id"], call["sample"], call["phase"], call["prompt_hash"]])


def _parsed(call: Mapping[str, Any], data: Any, criteria: Sequence[Criterion] | None = None) -> list[list[Any]]:
    """A reply to `call`, checked as in training: a list a criterion. Without `criteria` they are those of the reply.

    It is [title, verdict] of a score call, [title, verdict, cited steps] of an attribute call, else [title,
    description]. A reply that does not pass the check raises ReplyFault.
    """
    phase = call["phase"]
    if phase not in ("score", "attribute"):
        return [[c.title, c.description] for c in check_criteria(phase, data)[0]]
    name = "verdicts" if phase == "score" else "attributions"
    if criteria is None:
        criteria = [Criterion(row["title"], "", "") for row in data[name]]
    if phase == "score":
        found: list[list[Any]] = [[s.score] for s in check_scores(criteria, data)[0]]
    else:
        prompt = "\n".join(content for _, content in call["messages"])
        steps = max((int(n) for n in _STEP.findall(prompt)), default=0)
        found = [[a.verdict, list(a.steps)] for a in check_attributions(criteria, steps, data)[0]]
    return [[row["title"], *values] for row, values in zip(data[name], found, strict=True)]


@dataclass(slots=True)
class _Budget:
    """What may still be spent. A call's cost is reserved before it is sent, or 64 at once would pass the cap.

    A call is expected to cost as much a token (of those that it took when it was archived) as the most expensive call
    so far. The first one is sent alone, to learn that price.
    """

    cap: float | None
    spent: float = 0.0
    reserved: float = 0.0  #: USD, for calls under way
    under_way: int = 0
    rate: float | None = None  #: USD a token; None: no call was answered yet
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def learn(self, call: Mapping[str, Any], outcome: str, usd: float | None) -> None:
        """Note what a call cost. An unknown price, or a failure that cost nothing, says nothing about the next call."""
        self.spent += usd or 0.0
        if usd is not None and (usd or outcome == "ok"):
            self.rate = max(self.rate or 0.0, usd / _tokens(call))

    async def reserve(self, call: Mapping[str, Any]) -> float | None:
        """USD reserved for a call, as soon as it is known that they are there; None: they are not."""
        async with self.changed:
            while True:
                guess = _tokens(call) * (self.rate or 0.0)
                fits = self.cap is None or self.spent + self.reserved + guess <= self.cap * (1 + 1e-9) > self.spent
                if fits and (self.cap is None or self.rate is not None or not self.under_way):
                    self.reserved, self.under_way = self.reserved + guess, self.under_way + 1
                    return guess
                if not self.under_way:
                    return None
                await self.changed.wait()

    async def release(self, guess: float) -> None:
        """The call is over."""
        async with self.changed:
            self.reserved, self.under_way = self.reserved - guess, self.under_way - 1
            self.changed.notify_all()


def _tokens(call: Mapping[str, Any]) -> int:
    return max(int(call["tokens_in"]) + int(call["tokens_out"]), 1)


async def replay_calls(
    calls: Sequence[Mapping[str, Any]], client: JudgeClient, file: Path, *, max_usd: float | None = None
) -> dict[str, int]:
    """Send calls and append one line a call to `file`; calls that have a result there are not sent again.

    Args:
        calls: of `replayable`.
        client: the other judge.
        file: JSON lines.
        max_usd: no call is sent that would probably pass it; what earlier attempts cost counts.

    Returns:
        counts: sent, failed, kept, left (for want of money).

    Raises:
        ConfigError: `max_usd` is set and the judge has no known price.
        JudgeConfigError: the provider refused for good.
    """
    done = load_results(file)
    wanted = [c for c in calls if _key(c) not in done]
    counts = {"sent": 0, "failed": 0, "kept": len(calls) - len(wanted), "left": 0}
    budget = _Budget(max_usd)
    by_key = {_key(c): c for c in calls}
    for past in files.read_lines(file):
        if past["key"] in by_key:
            budget.learn(by_key[past["key"]], past["outcome"], past["usd"])
        else:
            budget.spent += past["usd"] or 0.0
    files.mend_lines(file)
    gate = asyncio.Semaphore(_AT_ONCE)

    async def one(call: Mapping[str, Any]) -> None:
        async with gate:
            guess = await budget.reserve(call)
            if guess is None:
                counts["left"] += 1
                return
            row = await _send(call, client)
            files.append_line(file, row)  # at once: it is paid for
            counts["sent"] += 1
            counts["failed"] += row["outcome"] == "failed"
            if max_usd is not None and row["usd"] is None:
                raise ConfigError("max_usd is set, but this judge has no known price; set judge.prices, or no max_usd")
            budget.learn(call, row["outcome"], row["usd"])
            await budget.release(guess)

    await gather(one(c) for c in wanted)
    return counts


async def _send(call: Mapping[str, Any], client: JudgeClient) -> dict[str, Any]:
    """One line of results."""
    records: list[CallRecord] = []
    reference = _parsed(call, parse_json(call["reply"])[0])
    criteria = [Criterion(row[0], "", "") for row in reference]
    request = JudgeRequest(
        phase=call["phase"],
        messages=[{"role": role, "content": content} for role, content in call["messages"]],
        check=lambda data: (_parsed(call, data, criteria), None),
        sink=records.append,
        task_id=call["task_id"],
        sample=call["sample"],
        step=call["step"],
    )
    row: dict[str, Any] = {"key": _key(call), "step": call["step"], "phase": call["phase"]}
    try:
        row |= {"outcome": "ok", "reference": reference, "other": await client.call(request)}
    except JudgeConfigError:
        raise
    except JudgeError as error:
        row |= {"outcome": "failed", "error": str(error)}
    costs = [r.cost_usd for r in records]
    return {**row, "usd": None if None in costs else sum(c for c in costs if c is not None)}


def summarise_replay(
    results: Iterable[Mapping[str, Any]], judge: str, window: int, matches: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Agreement of the score calls, overlap of the criteria and of the cited steps, over all and by window of steps.

    Args:
        results: of `load_results`.
        judge: name of the other judge.
        window: steps.
        matches: pairs by call, as a matcher model found them; calls that it lacks are in none of its rates.
    """
    rows = list(results)
    by_window: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        by_window[row["step"] // window].append(row)
    found = matches or {}
    return {
        "judge": judge,
        "reference": "the archived judge",
        "window": window,
        "all": _numbers(rows, found),
        "windows": [{"first_step": k * window, **_numbers(by_window[k], found)} for k in sorted(by_window)],
    }


def _numbers(rows: Sequence[Mapping[str, Any]], matches: Mapping[str, int]) -> dict[str, Any]:
    def paired(phase: str) -> list[tuple[Any, Any]]:
        return [p for r in rows if r["phase"] == phase for p in zip(r["reference"], r["other"], strict=True)]

    sets = written(rows)
    by_text = [criteria_overlap(r["reference"], r["other"]) for r in sets]
    by_model = [(matches[r["key"]], len(r["reference"]), len(r["other"])) for r in sets if r["key"] in matches]
    cited = [(len({*a[2]} & {*b[2]}), len({*a[2]}), len({*b[2]})) for a, b in paired("attribute")]
    return {
        "calls": len(rows),
        **agreement((a[1], b[1]) for a, b in paired("score")).as_dict(),
        **_rates("", by_text),
        **_rates("model_", by_model),
        **_rates("cited_", cited),
    }


def _rates(name: str, overlaps: Sequence[tuple[int, int, int]]) -> dict[str, float | None]:
    """Recall and precision: what matches, of the reference and of the other, summed over calls."""
    matched, ours, others = (sum(o[i] for o in overlaps) for i in range(3))
    return {
        f"{name}recall": matched / ours if ours else None,
        f"{name}precision": matched / others if others else None,
    }
