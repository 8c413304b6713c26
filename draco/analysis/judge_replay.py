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
from pathlib import Path
from typing import Any

from rapidfuzz import fuzz

from draco import jsonl
from draco.analysis.agreement import agreement
from draco.analysis.matching import written
from draco.archive import read_calls
from draco.errors import ConfigError, JudgeConfigError, JudgeError
from draco.judge.client import JudgeClient, JudgeRequest
from draco.judge.records import CallRecord
from draco.judge.schema import check_attributions, check_criteria, check_scores, parse_json
from draco.types import Criterion

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


async def replay_calls(
    calls: Sequence[Mapping[str, Any]], client: JudgeClient, file: Path, *, max_usd: float | None = None
) -> dict[str, int]:
    """Send calls and append one line a call to `file`; calls that have a result there are not sent again.

    Args:
        calls: of `replayable`.
        client: the other judge.
        file: JSON lines.
        max_usd: no further call is sent once so much was spent, that of earlier attempts included.

    Returns:
        counts: sent, failed, kept, left (for want of money).

    Raises:
        ConfigError: `max_usd` is set and the judge has no known price.
        JudgeConfigError: the provider refused for good.
    """
    done = load_results(file)
    counts = {"sent": 0, "failed": 0, "kept": 0, "left": 0}
    spent = sum(r["usd"] or 0.0 for r in jsonl.read(file))
    jsonl.mend(file)
    gate = asyncio.Semaphore(64)

    async def one(call: Mapping[str, Any]) -> None:
        nonlocal spent
        async with gate:
            if max_usd is not None and spent >= max_usd:
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
            if max_usd is not None and row["usd"] is None:
                raise ConfigError("max_usd is set, but this judge has no known price; set it without max_usd")
            spent += row["usd"] or 0.0
            counts["sent"] += 1
            jsonl.append(file, row)

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
    once, the most similar first. Paraphrases in other words count as two; `draco.analysis.matching` asks a model.
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
    """Agreement of the score calls and overlap of the criteria, over all and by window of training steps.

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
    recall, precision = _rates(by_text)
    model_recall, model_precision = _rates(by_model)
    return {
        "calls": len(rows),
        **agreement(pairs).as_dict(),
        "recall": recall,
        "precision": precision,
        "model_recall": model_recall,
        "model_precision": model_precision,
    }


def _rates(overlaps: Sequence[tuple[int, int, int]]) -> tuple[float | None, float | None]:
    """(matched / of the reference, matched / of the other) of sums."""
    matched, ours, others = (sum(o[i] for o in overlaps) for i in range(3))
    return (matched / ours if ours else None, matched / others if others else None)
