"""The archive: parquet tables of every training step, under ``archive/step=000012/``.

Rewards and credits can be recomputed exactly from these tables (numbers in float64, token ids, spans). A step's folder
is written under a temporary name, flushed and renamed, so it is complete or absent. No table holds success; `end_state`
is an opaque reference that only the environment's evaluator can read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from draco.core.files import publish, step_name, step_of, step_paths
from draco.core.types import Credit, Group, Message, Step, Task, Termination, Trajectory

__all__ = [
    "TABLES", "archived_steps", "read_calls", "read_table", "read_trajectories", "step_folder", "step_folders",
    "write_step",
]  # fmt: skip

_INT, _FLOAT, _TEXT, _BOOL = pa.int32(), pa.float64(), pa.string(), pa.bool_()
_INTS, _FLOATS, _TEXTS = pa.list_(_INT), pa.list_(_FLOAT), pa.list_(_TEXT)


def _columns(**types: pa.DataType) -> pa.Schema:
    return pa.schema({"step": _INT, "group": _INT, **types})


#: table → columns: the format that readers may rely on. `task_metadata` and `timings` (seconds) are JSON.
TABLES: dict[str, pa.Schema] = {
    "trajectories": _columns(
        sample=_INT, task_id=_TEXT, instruction=_TEXT, split=_TEXT, scenario_id=_TEXT, difficulty=_INT,
        task_metadata=_TEXT, messages=pa.list_(pa.struct({"role": _TEXT, "content": _TEXT})), token_ids=_INTS,
        step_of=_INTS, logprobs=_FLOATS,
        steps=pa.list_(pa.struct({
            "index": _INT, "start": _INT, "stop": _INT, "turn": _INT, "action": _TEXT, "observation": _TEXT,
        })),
        termination=_TEXT, prompt_tokens=_INT, policy_version=_INT, seed=pa.int64(), end_state=_TEXT, error=_TEXT,
        timings=_TEXT,
    ),
    "criteria": _columns(
        criterion=_INT, title=_TEXT, description=_TEXT, evaluator_instruction=_TEXT, source=_TEXT,
        grounding_references=_TEXTS, evidence=_TEXT, dropped=_BOOL,
    ),
    "verdicts": _columns(
        criterion=_INT, sample=_INT, score=pa.int8(), override=pa.int8(), cited_steps=_INTS, evidence=_TEXT,
        justification=_TEXT, explanation=_TEXT,
    ),
    "credits": _columns(
        sample=_INT, reward=_FLOAT, advantage=_FLOAT, reason=_TEXT, zero_std=_BOOL, step_tokens=_INTS,
        step_advantages=_FLOATS, qualities=_FLOATS,
    ),
    "failures": _columns(sample=_INT, phase=_TEXT, reason=_TEXT),
}  # fmt: skip


def step_folder(run: Path, step: int) -> Path:
    """The folder of one step's tables."""
    return run / "archive" / step_name(step)


def step_folders(run: Path) -> list[Path]:
    """The folders of all complete steps, in order."""
    return step_paths(run / "archive")


def archived_steps(run: Path) -> list[int]:
    """Numbers of all complete steps, in order."""
    return [step_of(p) for p in step_folders(run)]


def write_step(
    run: Path, step: int, groups: Sequence[Group], credits: Sequence[Credit], calls: Sequence[Any] = ()
) -> None:
    """Write one step's tables; an earlier attempt at this step is replaced.

    Args:
        run: run folder.
        step: batch number.
        groups: as rolled out.
        credits: one for each judged group.
        calls: judge call records (dataclasses), a column for each field. Their texts are stored apart, see
            `read_calls`.
    """
    folder = step_folder(run, step)
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    rows = {
        "trajectories": [{"group": g.index, **_trajectory(t)} for g in groups for t in g.trajectories],
        **{
            name: [{"group": c.judgement.group.index, **row} for c in credits for row in rows_of(c)]
            for name, rows_of in _OF_CREDIT.items()
        },
    }
    for name, schema in TABLES.items():
        table = pa.Table.from_pylist([{"step": step, **row} for row in rows[name]], schema=schema)
        _write(table, temporary / f"{name}.parquet")
    if calls:
        texts: dict[str, bytes] = {}
        _write(pa.Table.from_pylist([_call(step, c, texts) for c in calls]), temporary / "judge_calls.parquet")
        table = pa.table({"hash": list(texts), "text": list(texts.values())}, schema=_TEXT_TABLE)
        _write(table, temporary / "judge_texts.parquet")
    publish(temporary, folder)


def _write(table: pa.Table, path: Path) -> None:
    pq.write_table(table, path, compression="zstd")


def _fields(record: Any) -> dict[str, Any]:
    """Fields of a dataclass; what is no column of a table is left out when the table is made."""
    return {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}


def _trajectory(t: Trajectory) -> dict[str, Any]:
    return {
        **_fields(t.task), **_fields(t), "task_id": t.task.id, "task_metadata": json.dumps(dict(t.task.metadata)),
        "messages": [_fields(m) for m in t.messages],
        "steps": [_fields(s) | {"start": s.span[0], "stop": s.span[1]} for s in t.steps],
        "termination": str(t.termination), "timings": json.dumps(dict(t.timings)),
    }  # fmt: skip


def _criteria(credit: Credit) -> Iterable[dict[str, Any]]:
    j = credit.judgement
    for k, (criterion, dropped) in enumerate(zip(j.criteria, j.dropped, strict=True)):
        yield {"criterion": k, "dropped": dropped, **_fields(criterion)}


def _verdicts(credit: Credit) -> Iterable[dict[str, Any]]:
    j = credit.judgement
    for k, row in enumerate(j.verdicts):
        for trajectory, v in zip(j.group.trajectories, row, strict=True):
            yield {"criterion": k, "sample": trajectory.sample, "cited_steps": v.steps, **_fields(v)}


def _credits(credit: Credit) -> Iterable[dict[str, Any]]:
    j = credit.judgement
    for i, t in enumerate(j.group.trajectories):
        yield {
            "sample": t.sample, "reward": j.rewards[i], "advantage": credit.advantages[i],
            "reason": credit.reasons[i], "zero_std": credit.zero_std, "step_tokens": t.step_tokens,
            "step_advantages": credit.step_advantages[i], "qualities": credit.qualities[i],
        }  # fmt: skip


#: table → its rows of one group
_OF_CREDIT: dict[str, Callable[[Credit], Iterable[dict[str, Any]]]] = {
    "criteria": _criteria,
    "verdicts": _verdicts,
    "credits": _credits,
    "failures": lambda credit: map(_fields, credit.judgement.failures),
}


_TEXT_TABLE = pa.schema([("hash", pa.string()), ("text", pa.binary())])
#: Prompts are cut before their delimiters, so that a transcript that several calls share is stored once.
_CUT = re.compile(r"^(?=<<<)", re.MULTILINE)


def _call(step: int, call: Any, texts: dict[str, bytes]) -> dict[str, Any]:
    """One row of judge_calls; the texts of prompt and reply are added to `texts` under their hash."""
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


def _files(run: Path, name: str, steps: Iterable[int] | None) -> list[Path]:
    folders = step_folders(run) if steps is None else [step_folder(run, s) for s in steps]
    return [file for folder in folders if (file := folder / f"{name}.parquet").is_file()]


def read_calls(run: Path, steps: Iterable[int] | None = None) -> list[dict[str, Any]]:
    """Judge calls with their texts: `messages` as [(role, content)] exactly as sent, `reply` exactly as received.

    Raises:
        FileNotFoundError: the run has no judge calls.
    """
    rows: list[dict[str, Any]] = []
    for file in _files(run, "judge_calls", steps):
        table = pq.read_table(file.with_name("judge_texts.parquet"), partitioning=None)
        found = zip(table["hash"].to_pylist(), table["text"].to_pylist(), strict=True)
        texts = {name: content.decode(errors="surrogatepass") for name, content in found}
        for row in pq.read_table(file, partitioning=None).to_pylist():
            row["messages"] = [(m["role"], "".join(texts[p] for p in m["parts"])) for m in row["messages"]]
            row["reply"] = texts[row["reply"]]
            rows.append(row)
    if not rows:
        raise FileNotFoundError(f"no judge calls under {run / 'archive'}")
    return rows


def read_table(run: Path, name: str, steps: Iterable[int] | None = None) -> pa.Table:
    """One table, of all steps or of some.

    Raises:
        FileNotFoundError: the run has no such table.
    """
    files = _files(run, name, steps)
    if not files:
        raise FileNotFoundError(f"no {name}.parquet under {run / 'archive'}")
    return pa.concat_tables([pq.read_table(f, partitioning=None) for f in files], promote_options="default")


def read_trajectories(table: pa.Table) -> list[Trajectory]:
    """Rebuild trajectories from rows of the `trajectories` table."""
    return [_read_trajectory(row) for row in table.to_pylist()]


def _read_trajectory(row: dict[str, Any]) -> Trajectory:
    task = {name: row[name] for name in ("instruction", "split", "scenario_id", "difficulty")}
    values = {n: row[n] for n in ("sample", "prompt_tokens", "policy_version", "seed", "end_state", "error")}
    values |= {name: tuple(row[name]) for name in ("token_ids", "step_of", "logprobs")}
    return Trajectory(
        task=Task(id=row["task_id"], metadata=json.loads(row["task_metadata"]), **task),
        messages=tuple(Message(**m) for m in row["messages"]),
        steps=tuple(Step(span=(s.pop("start"), s.pop("stop")), **s) for s in row["steps"]),
        termination=Termination(row["termination"]),
        timings=json.loads(row["timings"]),
        **values,
    )
