"""A blind sheet of sampled verdicts for a person to rate, and what the ratings say about the judge."""

from __future__ import annotations

import csv
import random
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from draco.core import files
from draco.core.errors import ConfigError
from draco.judge.agreement import Agreement, agreement
from draco.judge.transcript import transcript
from draco.run.archive import read_table, step_folders
from draco.study.judgements import read_credits

__all__ = ["Calibration", "read_sheet", "write_sheet"]

_COLUMNS = ("id", "rating", "comment", "criterion", "description", "how to judge", "transcript")
_RATINGS = {
    "pass": 1, "1": 1, "+1": 1, "yes": 1, "fail": -1, "-1": -1, "−1": -1, "no": -1,
    "0": 0, "na": 0, "n.a.": 0, "n/a": 0, "not applicable": 0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Calibration:
    """A rated sheet against the archive; the person is the reference."""

    agreement: Agreement
    unrated: int


def write_sheet(run: Path, count: int) -> Path:
    """audit.csv: `count` verdicts drawn evenly from all, without their score, justification or citations.

    Raises:
        ConfigError: no verdict is archived, or a sheet with ratings is there already.
    """
    file = run / "audit.csv"
    if file.is_file() and any(row["rating"].strip() for row in _read(file)):
        raise ConfigError(f"{file} holds ratings; move it away before a new sheet is made")
    keys: list[tuple[int, int, int, int]] = []
    for folder in step_folders(run):
        step = int(folder.name.removeprefix("step="))
        rows = read_table(run, "verdicts", [step]).select(["group", "criterion", "sample"]).to_pylist()
        keys += [(step, r["group"], r["criterion"], r["sample"]) for r in rows]
    if not keys:
        raise ConfigError(f"{run}: no verdict is archived, so there is nothing to rate")
    chosen = random.Random(0).sample(sorted(keys), min(count, len(keys)))
    temporary = file.with_name(file.name + ".tmp")
    with open(temporary, "w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(_COLUMNS)
        for step in sorted({k[0] for k in chosen}):
            judged = {c.judgement.group.index: c.judgement for c in read_credits(run, step)}
            for _, group, k, sample in sorted(key for key in chosen if key[0] == step):
                criterion = judged[group].criteria[k]
                (one,) = [t for t in judged[group].group.trajectories if t.sample == sample]
                texts = (criterion.title, criterion.description, criterion.evaluator_instruction, transcript(one))
                writer.writerow([f"{step}/{group}/{k}/{sample}", "", "", *map(_cell, texts)])
    files.publish(temporary, file)
    return file


def _cell(text: str) -> str:
    """Text that no spreadsheet takes for a formula."""
    return "'" + text if text.lstrip()[:1] in {"=", "+", "-", "@"} else text


def _read(file: Path) -> list[dict[str, str]]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # transcripts are long
    with open(file, encoding="utf-8-sig", newline="") as stream:
        rows = list(csv.DictReader(stream))
    if rows and not {"id", "rating"} <= rows[0].keys():
        raise ConfigError(f"{file}: expected the columns id and rating, got {', '.join(rows[0])}")
    return [{k: v or "" for k, v in row.items() if k is not None} for row in rows]


def read_sheet(run: Path, file: Path) -> Calibration:
    """Compare a rated sheet with the archived verdicts.

    Raises:
        ConfigError: an unknown rating, an id that the archive has not or that occurs twice, or no rating at all.
    """
    if not file.is_file():
        raise ConfigError(f"{file}: no such sheet; make one with scripts/report.py RUN audit=100")
    rated: dict[tuple[int, int, int, int], int] = {}
    unrated = 0
    for line, row in enumerate(_read(file), start=1):
        text = row["rating"].strip().lower()
        if not text:
            unrated += 1
            continue
        if text not in _RATINGS:
            raise ConfigError(f"{file}, row {line}: rating {row['rating']!r}; expected pass, fail or n.a.")
        try:
            step, group, k, sample = map(int, row["id"].split("/"))
        except ValueError:
            raise ConfigError(f"{file}, row {line}: {row['id']!r} is no id of a verdict") from None
        if (step, group, k, sample) in rated:
            raise ConfigError(f"{file}, row {line}: {row['id']} is rated twice")
        rated[step, group, k, sample] = _RATINGS[text]
    if not rated:
        raise ConfigError(f"{file}: no verdict is rated yet; fill the column rating with pass, fail or n.a.")
    found: dict[tuple[int, int, int, int], int] = {}
    for step in Counter(k[0] for k in rated):
        for v in read_table(run, "verdicts", [step]).to_pylist():
            found[step, v["group"], v["criterion"], v["sample"]] = v["score"]
    if missing := [k for k in rated if k not in found]:
        raise ConfigError(f"{file}: {'/'.join(map(str, missing[0]))} is no verdict of {run}")
    return Calibration(agreement((person, found[k]) for k, person in rated.items()), unrated)
