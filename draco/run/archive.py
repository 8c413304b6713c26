"""What a run leaves behind of every training step: parquet tables under ``archive/step=000012/``.

From these alone rewards and credits can be recomputed to the last bit (float64 columns, token ids and spans exact). A
step's folder is written under a temporary name, reaches the disk and is renamed: it is complete or not there. Success
is in none of them; `end_state` is the opaque reference that only the environment's evaluator can read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from draco.core.files import publish
from draco.core.types import Credit, Group, Message, Step, Task, Termination, Trajectory

__all__ = [
    "TABLES", "archived_steps", "read_calls", "read_table", "read_trajectories", "step_folder", "step_folders",
    "write_step",
]  # fmt: skip

_NAME = re.compile(r"step=(\d{6,})")
_INTS, _FLOATS, _TEXTS = pa.list_(pa.int32()), pa.list_(pa.float64()), pa.list_(pa.string())
_KEY: list[tuple[str, pa.DataType]] = [("step", pa.int32()), ("group", pa.int32())]

#: table → columns; the format that readers may rely on
TABLES: dict[str, pa.Schema] = {
    "trajectories": pa.schema(
        [
            *_KEY,
            ("sample", pa.int32()),
            ("task_id", pa.string()),
            ("instruction", pa.string()),
            ("split", pa.string()),
            ("scenario_id", pa.string()),
            ("difficulty", pa.int32()),
            ("task_metadata", pa.string()),  # JSON
            ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
            ("token_ids", _INTS),
            ("step_of", _INTS),
            ("logprobs", _FLOATS),
            ("steps", pa.list_(pa.struct([
                ("index", pa.int32()), ("start", pa.int32()), ("stop", pa.int32()), ("turn", pa.int32()),
                ("action", pa.string()), ("observation", pa.string()),
            ]))),
            ("termination", pa.string()),
            ("prompt_tokens", pa.int32()),
            ("policy_version", pa.int32()),
            ("seed", pa.int64()),
            ("end_state", pa.string()),
            ("error", pa.string()),
            ("timings", pa.string()),  # JSON, seconds
        ]
    ),
    "criteria": pa.schema(
        [
            *_KEY,
            ("criterion", pa.int32()),
            ("title", pa.string()),
            ("description", pa.string()),
            ("evaluator_instruction", pa.string()),
            ("source", pa.string()),
            ("grounding_references", _TEXTS),
            ("evidence", pa.string()),
            ("dropped", pa.bool_()),
        ]
    ),
    "verdicts": pa.schema(
        [
            *_KEY,
            ("criterion", pa.int32()),
            ("sample", pa.int32()),
            ("score", pa.int8()),
            ("override", pa.int8()),
            ("cited_steps", _INTS),
            ("evidence", pa.string()),
            ("justification", pa.string()),
            ("explanation", pa.string()),
        ]
    ),
    "credits": pa.schema(
        [
            *_KEY,
            ("sample", pa.int32()),
            ("reward", pa.float64()),
            ("advantage", pa.float64()),
            ("reason", pa.string()),
            ("zero_std", pa.bool_()),
            ("step_tokens", _INTS),
            ("step_advantages", _FLOATS),
            ("qualities", _FLOATS),
        ]
    ),
    "failures": pa.schema([*_KEY, ("sample", pa.int32()), ("phase", pa.string()), ("reason", pa.string())]),
}  # fmt: skip


def step_folder(run: Path, step: int) -> Path:
    """Folder of one step's tables."""
    return run / "archive" / f"step={step:06d}"


def step_folders(run: Path) -> list[Path]:
    """All complete steps, in order."""
    found = (p for p in (run / "archive").glob("step=*") if _NAME.fullmatch(p.name))
    return sorted(found, key=lambda p: int(p.name.removeprefix("step=")))


def archived_steps(run: Path) -> list[int]:
    """Numbers of all complete steps, in order."""
    return [int(p.name.removeprefix("step=")) for p in step_folders(run)]


def write_step(
    run: Path, step: int, groups: Sequence[Group], credits: Sequence[Credit], calls: Sequence[Any] = ()
) -> None:
    """Write one step's tables; replaces what an interrupted attempt left.

    Args:
        run: run folder.
        step: batch number.
        groups: as rolled out.
        credits: one a judged group.
        calls: judge call records (dataclasses); a column a field, but for the texts: `read_calls` gives them back.
    """
    folder = step_folder(run, step)
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    rows = {
        "trajectories": [_trajectory(step, g.index, t) for g in groups for t in g.trajectories],
        "criteria": [r for c in credits for r in _criteria(step, c)],
        "verdicts": [r for c in credits for r in _verdicts(step, c)],
        "credits": [r for c in credits for r in _credits(step, c)],
        "failures": [
            {"step": step, "group": c.judgement.group.index, **dataclasses.asdict(f)}
            for c in credits
            for f in c.judgement.failures
        ],
    }
    for name, schema in TABLES.items():
        _write(pa.Table.from_pylist(rows[name], schema=schema), temporary / f"{name}.parquet")
    if calls:
        texts: dict[str, bytes] = {}
        _write(pa.Table.from_pylist([_call(step, c, texts) for c in calls]), temporary / "judge_calls.parquet")
        table = pa.table({"hash": list(texts), "text": list(texts.values())}, schema=_TEXT_TABLE)
        _write(table, temporary / "judge_texts.parquet")
    publish(temporary, folder)


def _write(table: pa.Table, path: Path) -> None:
    pq.write_table(table, path, compression="zstd")


def _trajectory(step: int, group: int, t: Trajectory) -> dict[str, Any]:
    return {
        "step": step,
        "group": group,
        "sample": t.sample,
        "task_id": t.task.id,
        "instruction": t.task.instruction,
        "split": t.task.split,
        "scenario_id": t.task.scenario_id,
        "difficulty": t.task.difficulty,
        "task_metadata": json.dumps(dict(t.task.metadata)),
        "messages": [{"role": m.role, "content": m.content} for m in t.messages],
        "token_ids": t.token_ids,
        "step_of": t.step_of,
        "logprobs": t.logprobs,
        "steps": [
            {
                "index": s.index, "start": s.span[0], "stop": s.span[1], "turn": s.turn,
                "action": s.action, "observation": s.observation,
            }
            for s in t.steps
        ],
        "termination": str(t.termination),
        "prompt_tokens": t.prompt_tokens,
        "policy_version": t.policy_version,
        "seed": t.seed,
        "end_state": t.end_state,
        "error": t.error,
        "timings": json.dumps(dict(t.timings)),
    }  # fmt: skip


def _criteria(step: int, credit: Credit) -> Iterable[dict[str, Any]]:
    j = credit.judgement
    for k, (criterion, dropped) in enumerate(zip(j.criteria, j.dropped, strict=True)):
        yield {
            "step": step, "group": j.group.index, "criterion": k, "dropped": dropped,
            **dataclasses.asdict(criterion),
        }  # fmt: skip


def _verdicts(step: int, credit: Credit) -> Iterable[dict[str, Any]]:
    j = credit.judgement
    for k, row in enumerate(j.verdicts):
        for trajectory, v in zip(j.group.trajectories, row, strict=True):
            yield {
                "step": step, "group": j.group.index, "criterion": k, "sample": trajectory.sample, "score": v.score,
                "override": v.override, "cited_steps": v.steps, "evidence": v.evidence,
                "justification": v.justification, "explanation": v.explanation,
            }  # fmt: skip


def _credits(step: int, credit: Credit) -> Iterable[dict[str, Any]]:
    j = credit.judgement
    for i, t in enumerate(j.group.trajectories):
        yield {
            "step": step, "group": j.group.index, "sample": t.sample, "reward": j.rewards[i],
            "advantage": credit.advantages[i], "reason": credit.reasons[i], "zero_std": credit.zero_std,
            "step_tokens": t.step_tokens, "step_advantages": credit.step_advantages[i],
            "qualities": credit.qualities[i],
        }  # fmt: skip


_TEXT_TABLE = pa.schema([("hash", pa.string()), ("text", pa.binary())])
#: Where prompts are cut, so that a transcript that several calls share is kept once: before their delimiters.
_CUT = re.compile(r"^(?=<<<)", re.MULTILINE)


def _call(step: int, call: Any, texts: dict[str, bytes]) -> dict[str, Any]:
    """One row of judge_calls; the texts of prompt and reply go to `texts` by their hash."""
    row: dict[str, Any] = {"step": step}
    for item in dataclasses.fields(call):
        value = getattr(call, item.name)
        if item.name == "messages":
            row["messages"] = [
                {"role": role, "parts": [_put(texts, part) for part in _CUT.split(content)]} for role, content in value
            ]
        elif item.name == "reply":
            row["reply"] = _put(texts, value)
        else:
            row[item.name] = value if isinstance(value, str | int | float | None) else json.dumps(value)
    return row


def _put(texts: dict[str, bytes], text: str) -> str:
    content = text.encode(errors="surrogatepass")
    name = hashlib.sha256(content).hexdigest()[:32]
    texts[name] = content
    return name


def read_calls(run: Path, steps: Iterable[int] | None = None) -> list[dict[str, Any]]:
    """Judge calls with their texts: `messages` as [(role, content)] byte for byte as sent, `reply` as it came.

    Raises:
        FileNotFoundError: the run has no judge calls.
    """
    rows: list[dict[str, Any]] = []
    folders = step_folders(run) if steps is None else [step_folder(run, s) for s in steps]
    for folder in folders:
        if not (folder / "judge_calls.parquet").is_file():
            continue
        table = pq.read_table(folder / "judge_texts.parquet", partitioning=None)
        found = zip(table["hash"].to_pylist(), table["text"].to_pylist(), strict=True)
        texts = {name: content.decode(errors="surrogatepass") for name, content in found}
        for row in pq.read_table(folder / "judge_calls.parquet", partitioning=None).to_pylist():
            row["messages"] = [(m["role"], "".join(texts[p] for p in m["parts"])) for m in row["messages"]]
            row["reply"] = texts[row["reply"]]
            rows.append(row)
    if not rows:
        raise FileNotFoundError(f"no judge calls under {run / 'archive'}")
    return rows


def read_table(run: Path, name: str, steps: Iterable[int] | None = None) -> pa.Table:
    """One table over all steps, or over some.

    Raises:
        FileNotFoundError: the run has no such table.
    """
    folders = step_folders(run) if steps is None else [step_folder(run, s) for s in steps]
    files = [f / f"{name}.parquet" for f in folders if (f / f"{name}.parquet").is_file()]
    if not files:
        raise FileNotFoundError(f"no {name}.parquet under {run / 'archive'}")
    return pa.concat_tables([pq.read_table(f, partitioning=None) for f in files], promote_options="default")


def read_trajectories(table: pa.Table) -> list[Trajectory]:
    """Rebuild trajectories from rows of the `trajectories` table."""
    return [
        Trajectory(
            task=Task(
                r["task_id"], r["instruction"], r["split"], r["scenario_id"], r["difficulty"],
                json.loads(r["task_metadata"]),
            ),
            sample=r["sample"],
            messages=tuple(Message(**m) for m in r["messages"]),
            token_ids=tuple(r["token_ids"]),
            step_of=tuple(r["step_of"]),
            logprobs=tuple(r["logprobs"]),
            steps=tuple(
                Step(s["index"], (s["start"], s["stop"]), s["action"], s["observation"], s["turn"]) for s in r["steps"]
            ),
            termination=Termination(r["termination"]),
            prompt_tokens=r["prompt_tokens"],
            policy_version=r["policy_version"],
            seed=r["seed"],
            end_state=r["end_state"],
            error=r["error"],
            timings=json.loads(r["timings"]),
        )
        for r in table.to_pylist()
    ]  # fmt: skip
