"""Which criteria of two sets are the same, by a model: paraphrases too, which a comparison of texts takes for two."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from draco.core import jsonl
from draco.core.errors import JudgeConfigError, JudgeError
from draco.core.types import Criterion
from draco.judge.client import JudgeClient
from draco.judge.prompts import criteria_block, messages, prompt_version
from draco.judge.replies import ReplyFault, strict_schema
from draco.judge.requests import JudgeRequest

__all__ = ["check_pairs", "load_matches", "match_criteria", "written"]

_WRITING = ("propose_task", "propose_rollout", "merge")  #: calls that write criteria


class _Pair(BaseModel):
    model_config = ConfigDict(strict=True)
    a: int
    b: int


class _Reply(BaseModel):
    pairs: list[_Pair]


def check_pairs(data: Any, ours: int, others: int) -> int:
    """Number of pairs of a reply.

    Args:
        data: the reply.
        ours, others: criteria of the two sets.

    Raises:
        ReplyFault: no such reply, a number that no criterion has, or one that stands in two pairs.
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
    return {row["key"]: row["pairs"] for row in jsonl.read(file)}


def _side(criteria: Sequence[Sequence[str]], name: str) -> str:
    listed = [Criterion(title, text, "") for title, text in criteria]
    numbers = [{"number": i} for i in range(1, len(listed) + 1)]
    return criteria_block(listed, name, numbers, ("evaluator_instruction",))


async def match_criteria(results: Iterable[Mapping[str, Any]], client: JudgeClient, file: Path) -> dict[str, int]:
    """Ask a model about every pair of sets, and append a line each to `file`; what is there is not asked again.

    Two sets of which one is empty have no pair, and nobody is asked.

    Returns:
        counts: asked, failed (left out of the figures, asked again next time), kept.

    Raises:
        JudgeConfigError: the provider refused for good.
    """
    done = load_matches(file)
    rows = written(results)
    counts = {"asked": 0, "failed": 0, "kept": sum(r["key"] in done for r in rows)}
    jsonl.mend(file)
    gate = asyncio.Semaphore(64)

    async def one(row: Mapping[str, Any]) -> None:
        ours, others = row["reference"], row["other"]
        pairs = 0
        if ours and others:
            request = JudgeRequest(
                phase="match",
                messages=messages("match", [_side(ours, "A"), _side(others, "B")], ()),
                check=lambda data: (check_pairs(data, len(ours), len(others)), None),
                sink=lambda _: None,
                step=row["step"],
                task_id=row["key"],
                version=prompt_version("match"),
                schema=strict_schema(_Reply),
            )
            async with gate:
                counts["asked"] += 1
                try:
                    pairs = await client.call(request)
                except JudgeConfigError:
                    raise
                except JudgeError:
                    counts["failed"] += 1
                    return
        jsonl.append(file, {"key": row["key"], "pairs": pairs})

    tasks = [asyncio.ensure_future(one(r)) for r in rows if r["key"] not in done]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return counts
