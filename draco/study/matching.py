"""Which criteria of two sets are the same: by their texts, or by a model, which also recognises paraphrases."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from rapidfuzz import fuzz

from draco.core import files
from draco.core.errors import JudgeConfigError, JudgeError
from draco.core.types import Criterion
from draco.judge.client import JudgeClient
from draco.judge.parsing import ReplyFault
from draco.judge.prompts import criteria_block, messages, prompt_version
from draco.judge.replies import strict_schema
from draco.judge.requests import JudgeRequest

__all__ = ["check_pairs", "criteria_overlap", "gather", "load_matches", "match_criteria", "written"]

_WRITING = ("propose_task", "propose_rollout", "merge")  #: calls that write criteria
_SIMILAR = 80.0  #: rapidfuzz's token_set_ratio, 0–100, from which two criteria count as the same


class _Pair(BaseModel):
    model_config = ConfigDict(strict=True)
    a: int
    b: int


class _Reply(BaseModel):
    pairs: list[_Pair]


def criteria_overlap(reference: Sequence[Sequence[str]], other: Sequence[Sequence[str]]) -> tuple[int, int, int]:
    """Criteria of the reference that the other wrote too: (matched, of the reference, of the other).

    Two criteria are the same if the texts `title: description` are similar by rapidfuzz's token_set_ratio. The most
    similar are paired first, each criterion once. A paraphrase in other words counts as another criterion.
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


def check_pairs(data: Any, ours: int, others: int) -> int:
    """Number of pairs of a reply.

    Args:
        data: the reply.
        ours, others: number of criteria in the two sets.

    Raises:
        ReplyFault: wrong shape, a number that no criterion has, or a criterion in two pairs.
    """
    try:
        pairs = _Reply.model_validate(data).pairs
    except ValidationError as error:
        first = error.errors()[0]
        raise ReplyFault(f"{'.'.join(map(str, first['loc'])) or 'reply'}: {first['msg']}") from None
    for side, numbers, count in (("a", [p.a for p in pairs], ours), ("b", [p.b for p in pairs], others)):
        if wrong := [n for n in numbers if not 1 <= n <= count]:
            raise ReplyFault(f"{side}={wrong[0]}: expected a number from 1 to {count}")
        if len(set(numbers)) < len(numbers):
            raise ReplyFault(f"a criterion of {side.upper()} is in two pairs")
    return len(pairs)


def written(results: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Results of calls that write criteria."""
    return [r for r in results if r["phase"] in _WRITING]


def load_matches(file: Path) -> dict[str, int]:
    """Pairs by call; a last line that a kill cut off is left out."""
    return {row["key"]: row["pairs"] for row in files.read_lines(file)}


async def gather(calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all calls; when one raises, cancel the others and raise its error."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def match_criteria(results: Iterable[Mapping[str, Any]], client: JudgeClient, file: Path) -> dict[str, int]:
    """Ask a model about every pair of sets and append its answers to `file`; answers that are there are kept.

    Sets of which one is empty have no pair, and the model is not asked.

    Returns:
        counts: asked, failed (in no rate; asked again next time), kept.

    Raises:
        JudgeConfigError: the provider refused for good.
    """
    done = load_matches(file)
    rows = written(results)
    counts = {"asked": 0, "failed": 0, "kept": sum(r["key"] in done for r in rows)}
    files.mend_lines(file)
    gate = asyncio.Semaphore(64)

    async def one(row: Mapping[str, Any]) -> None:
        pairs = 0
        if row["reference"] and row["other"]:
            async with gate:
                counts["asked"] += 1
                try:
                    pairs = await client.call(_request(row))
                except JudgeConfigError:
                    raise
                except JudgeError:
                    counts["failed"] += 1
                    return
        files.append_line(file, {"key": row["key"], "pairs": pairs})

    await gather(one(r) for r in rows if r["key"] not in done)
    return counts


def _request(row: Mapping[str, Any]) -> JudgeRequest[int]:
    ours, others = row["reference"], row["other"]
    return JudgeRequest(
        phase="match",
        messages=messages("match", [_side(ours, "A"), _side(others, "B")], ()),
        check=lambda data: (check_pairs(data, len(ours), len(others)), None),
        sink=lambda _: None,
        step=row["step"],
        task_id=row["key"],
        version=prompt_version("match"),
        schema=strict_schema(_Reply),
    )


def _side(criteria: Sequence[Sequence[str]], name: str) -> str:
    listed = [Criterion(title, text, "") for title, text in criteria]
    numbers = [{"number": i} for i in range(1, len(listed) + 1)]
    return criteria_block(listed, name, numbers, ("evaluator_instruction",))
