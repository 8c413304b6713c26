"""`draco calibrate`: what a person's ratings say about a run's judge."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from draco.config.arguments import Command, option, words

__all__ = ["COMMAND", "main"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The sheet that was rated."""

    run: Path = words("run folder")
    sheet: Path | None = option(None, "the rated sheet", shown="RUN/audit.csv")


COMMAND = Command(
    "draco calibrate",
    "compare a person's ratings with the judge's verdicts",
    Options,
    """
    `draco report RUN audit=100` writes the sheet RUN/audit.csv. Rate its rows: pass, fail or n.a. This prints
    agreement, Cohen's κ, Gwet's AC1, false-pass and false-fail rates; the person is the reference.
    """,
    ("draco calibrate runs/NAME", "draco calibrate runs/NAME sheet=ratings.csv"),
)


def main(arguments: list[str]) -> None:
    """Read one sheet."""
    given = COMMAND.parse(arguments)
    from draco.study.audit import read_sheet

    result = read_sheet(given.run, given.sheet or given.run / "audit.csv")
    print(f"{result.agreement.pairs} verdicts rated, {result.unrated} left blank; the person is the reference")
    for name, value in result.agreement.as_dict().items():
        if name != "pairs":
            print(f"{name.replace('_', ' '):20} {'–' if value is None else f'{value:.3f}'}")
