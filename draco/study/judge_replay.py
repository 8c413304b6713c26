"""Archived judge calls, sent byte for byte to another judge; what the two agree on (method §8).

The archived verdicts are the reference. `false_pass` is the share of what the archived judge failed that the other
passes; `false_fail` the reverse.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rapidfuzz import fuzz

from draco.core import jsonl
from draco.core.errors import ConfigError, JudgeConfigError, JudgeError
from draco.core.types import Criterion
from draco.judge.agreement import agreement
from draco.judge.client import JudgeClient
from draco.judge.records import CallRecord
from draco.judge.replies import check_attributions, check_criteria, check_scores, parse_json
from draco.judge.requests import JudgeRequest
from draco.run.archive import read_calls
from draco.study.matching import written

__all__ = ["criteria_overlap", "load_results", "replay_calls", "replayable", "summarise_replay"]

_STEP = re.compile(r"^\[step (\d+)\] action:", re.MULTILINE)
_SIMILAR = 80.0  #: of rapidfuzz's token_set_ratio, 0–100: two criteria are one from here on


def replayable(run: Path, steps: Iterable[int] | None = None) -> list[dict[str, Any]]:
    """Calls with a usable reply, in the archive's order; a call that needed several attempts once, as last sent."""
    return [c for c in read_calls(run, steps) if c["outcome"] in {"ok", "repaired"}]


def _parsed(phase: str, data: Any, prompt: str) -> list[list[Any]]:
    """[[title, verdict or description], …] of a reply; checked as in training."""
    if phase == "score":
        titles = [v["title"] for v in data["verdicts"]]
        scored, _ = check_scores([Criterion(t, "", "") for t in titles], data)
        return [[t, s.score] for t, s in zip(titles, scored, strict=True)]
    if phase == "attribute":
        titles = [v["title"] for v in data["attributions"]]
        steps = max((int(n) for n in _STEP.findall(prompt)), default=0)
        attributed, _ = check_attributions([Criterion(t, "", "") for t in titles], steps, data)
        return [[t, a.verdict, list(a.steps)] for t, a in zip(titles, attributed, strict=True)]
    criteria, _ = check_criteria(phase, data)
    return [[c.title, c.description] for c in criteria]


def _check(call: Mapping[str, Any], reference: list[list[Any]]) -> Callable[[Any], tuple[Any, str | None]]:
    phase = call["phase"]
    criteria = [Criterion(r[0], "", "") for r in reference]
    prompt = "\n".join(content for _, content in call["messages"])

    def check(data: Any) -> tuple[Any, str | None]:
        if phase == "score":
            check_scores(criteria, data)
        elif phase == "attribute":
            check_attributions(criteria, max((int(n) for n in _STEP.findall(prompt)), default=0), data)
        else:
            check_criteria(phase, data)
        return _parsed(phase, data, prompt), None

    return check


def _key(call: Mapping[str, Any]) -> str:
    return json.dumps([call["step"], call["task_id"], call["sample"], call["phase"], call["prompt_hash"]])


def load_results(file: Path) -> dict[str, dict[str, Any]]:
    """Results by call, failures left out: they are sent again. A last line that a kill cut off is left out."""
    return {row["key"]: row for row in jsonl.read(file) if row["outcome"] == "ok"}


@dataclass(slots=True)
class _Purse:
    """What may still be spent. A call's cost is set aside before it is sent, or 64 at once would pass the cap.

    A call is supposed to cost as much a token (of those that it took when it was archived) as the dearest so far. The
    first is sent alone, so that there is one.
    """

    cap: float | None
    spent: float = 0.0
    aside: float = 0.0  #: USD of calls under way
    under_way: int = 0
    rate: float | None = None  #: USD a token; None: no call was answered yet
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def learn(self, call: Mapping[str, Any], outcome: str, usd: float | None) -> None:
        """What a call cost. Without a known price, or where a failure cost nothing, it says nothing of the next."""
        self.spent += usd or 0.0
        if usd is not None and (usd or outcome == "ok"):
            self.rate = max(self.rate or 0.0, usd / _tokens(call))

    async def take(self, call: Mapping[str, Any]) -> float | None:
        """USD set aside for a call, once it is known whether they are there; None: they are not."""
        async with self.changed:
            while True:
                guess = _tokens(call) * (self.rate or 0.0)
                fits = self.cap is None or self.spent + self.aside + guess <= self.cap * (1 + 1e-9) > self.spent
                if fits and (self.cap is None or self.rate is not None or not self.under_way):
                    self.aside, self.under_way = self.aside + guess, self.under_way + 1
                    return guess
                if not self.under_way:
                    return None
                await self.changed.wait()

    async def give_back(self, guess: float) -> None:
        """The call is over."""
        async with self.changed:
            self.aside, self.under_way = self.aside - guess, self.under_way - 1
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
        max_usd: no call is sent that would probably pass it, what earlier attempts cost included.

    Returns:
        counts: sent, failed, kept, left (for want of money).

    Raises:
        ConfigError: `max_usd` is set and the judge has no known price.
        JudgeConfigError: the provider refused for good.
    """
    done = load_results(file)
    counts = {"sent": 0, "failed": 0, "kept": 0, "left": 0}
    purse = _Purse(max_usd)
    by_key = {_key(c): c for c in calls}
    for past in jsonl.read(file):
        if past["key"] in by_key:
            purse.learn(by_key[past["key"]], past["outcome"], past["usd"])
        else:
            purse.spent += past["usd"] or 0.0
    jsonl.mend(file)
    gate = asyncio.Semaphore(64)

    async def one(call: Mapping[str, Any]) -> None:
        async with gate:
            guess = await purse.take(call)
            if guess is None:
                counts["left"] += 1
                return
            records: list[CallRecord] = []
            data, _ = parse_json(call["reply"])
            reference = _parsed(call["phase"], data, "\n".join(content for _, content in call["messages"]))
            request = JudgeRequest(
                phase=call["phase"],
                messages=[{"role": role, "content": content} for role, content in call["messages"]],
                check=_check(call, reference),
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
                counts["failed"] += 1
            costs = [r.cost_usd for r in records]
            row["usd"] = None if None in costs else sum(c for c in costs if c is not None)
            jsonl.append(file, row)  # whatever happens next, it is paid for
            counts["sent"] += 1
            if max_usd is not None and row["usd"] is None:
                raise ConfigError("max_usd is set, but this judge has no known price; set judge.prices, or no max_usd")
            purse.learn(call, row["outcome"], row["usd"])
            await purse.give_back(guess)

    wanted = [c for c in calls if _key(c) not in done]
    counts["kept"] = len(calls) - len(wanted)
    tasks = [asyncio.ensure_future(one(c)) for c in wanted]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return counts


def criteria_overlap(reference: Sequence[Sequence[str]], other: Sequence[Sequence[str]]) -> tuple[int, int, int]:
    """Criteria of the reference that the other also wrote: (matched, of the reference, of the other).

    Two criteria are one where `title: description` are similar by rapidfuzz's token_set_ratio; a matched pair is used
    once, the most similar first. Paraphrases in other words count as two; `draco.study.matching` asks a model.
    """
    texts = [[f"{title}: {text}".casefold() for title, text in side] for side in (reference, other)]
    ranked = sorted(
        ((fuzz.token_set_ratio(a, b), i, j) for i, a in enumerate(texts[0]) for j, b in enumerate(texts[1])),
        key=lambda r: (-r[0], r[1], r[2]),
    )
    left, right = set(range(len(reference))), set(range(len(other)))
    pairs = 0
    for score, i, j in ranked:
        if score >= _SIMILAR and i in left and j in right:
            left.remove(i)
            right.remove(j)
            pairs += 1
    return pairs, len(reference), len(other)


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
    pairs = [
        (a[1], b[1]) for r in rows if r["phase"] == "score" for a, b in zip(r["reference"], r["other"], strict=True)
    ]
    by_text = [criteria_overlap(r["reference"], r["other"]) for r in written(rows)]
    by_model = [(matches[r["key"]], len(r["reference"]), len(r["other"])) for r in written(rows) if r["key"] in matches]
    cited = [
        (len({*a[2]} & {*b[2]}), len({*a[2]}), len({*b[2]}))
        for r in rows if r["phase"] == "attribute" for a, b in zip(r["reference"], r["other"], strict=True)
    ]  # fmt: skip
    recall, precision = _rates(by_text)
    model_recall, model_precision = _rates(by_model)
    cited_recall, cited_precision = _rates(cited)
    return {
        "calls": len(rows),
        **agreement(pairs).as_dict(),
        "recall": recall,
        "precision": precision,
        "model_recall": model_recall,
        "model_precision": model_precision,
        "cited_recall": cited_recall,
        "cited_precision": cited_precision,
    }


def _rates(overlaps: Sequence[tuple[int, int, int]]) -> tuple[float | None, float | None]:
    """(matched / of the reference, matched / of the other) of sums."""
    matched, ours, others = (sum(o[i] for o in overlaps) for i in range(3))
    return (matched / ours if ours else None, matched / others if others else None)
