"""A blind sheet of sampled verdicts for a person to rate, and how far the judge agrees with the ratings."""

from __future__ import annotations

import csv
import io
import random
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from draco.core import files
from draco.core.errors import ConfigError
from draco.judge.agreement import Agreement, agreement
from draco.judge.transcript import transcript
from draco.run.archive import archived_steps, read_table
from draco.study.judgements import read_credits

__all__ = ["Calibration", "read_sheet", "write_sheet"]

Key = tuple[int, int, int, int]  #: of a verdict: step, group, criterion, sample
_COLUMNS = ("id", "rating", "comment", "criterion", "description", "how to judge", "transcript")
_RATINGS = {
    "pass": 1, "1": 1, "+1": 1, "yes": 1, "fail": -1, "-1": -1, "−1": -1, "no": -1,
    "0": 0, "na": 0, "n.a.": 0, "n/a": 0, "not applicable": 0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Calibration:
    """Agreement of the archived verdicts with a rated sheet; the person is the reference."""

    agreement: Agreement
    unrated: int


def write_sheet(run: Path, count: int) -> Path:
    """audit.csv: `count` verdicts drawn evenly from all, without their score, justification or citations.

    Raises:
        ConfigError: no verdict is archived, or the sheet that is there holds ratings.
    """
    file = run / "audit.csv"
    if file.is_file() and any(row["rating"].strip() for row in _read(file)):
        raise ConfigError(f"{file} holds ratings; move it away before a new sheet is made")
    keys = sorted(_scores(run, archived_steps(run)))
    if not keys:
        raise ConfigError(f"{run}: no verdict is archived, so there is nothing to rate")
    chosen = sorted(random.Random(0).sample(keys, min(count, len(keys))))
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(_COLUMNS)
    for step, of_step in groupby(chosen, key=lambda key: key[0]):
        judged = {c.judgement.group.index: c.judgement for c in read_credits(run, step)}
        for _, group, k, sample in of_step:
            criterion = judged[group].criteria[k]
            (one,) = [t for t in judged[group].group.trajectories if t.sample == sample]
            texts = (criterion.title, criterion.description, criterion.evaluator_instruction, transcript(one))
            writer.writerow([f"{step}/{group}/{k}/{sample}", "", "", *map(_cell, texts)])
    files.write_text(file, text.getvalue())
    return file


def _scores(run: Path, steps: Iterable[int]) -> dict[Key, int]:
    """Archived verdicts of some steps."""
    return {
        (step, v["group"], v["criterion"], v["sample"]): v["score"]
        for step in steps
        for v in read_table(run, "verdicts", [step]).to_pylist()
    }


def _cell(text: str) -> str:
    """The text, marked so that no spreadsheet reads it as a formula."""
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
        raise ConfigError(f"{file}: no such sheet; make one with draco report RUN audit=100")
    rated: dict[Key, int] = {}
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
    found = _scores(run, sorted({key[0] for key in rated}))
    if missing := [key for key in rated if key not in found]:
        raise ConfigError(f"{file}: {'/'.join(map(str, missing[0]))} is no verdict of {run}")
    return Calibration(agreement((person, found[key]) for key, person in rated.items()), unrated)
