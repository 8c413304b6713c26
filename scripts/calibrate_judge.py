"""What a person's ratings say about a run's judge.

    python scripts/report.py runs/NAME audit=100          # writes runs/NAME/audit.csv; rate it: pass, fail or n.a.
    python scripts/calibrate_judge.py runs/NAME [sheet=FILE.csv]

Prints agreement, Cohen's κ, Gwet's AC1, false-pass and false-fail rates; the person is the reference.
"""

from __future__ import annotations

from pathlib import Path

from draco.config.arguments import parse, run_main
from draco.core.errors import ConfigError
from draco.study.audit import read_sheet


def main(arguments: list[str]) -> None:
    """Read one sheet."""
    words, given = parse(arguments, {"sheet"})
    if len(words) != 1:
        raise ConfigError("expected one run folder: python scripts/calibrate_judge.py runs/NAME")
    run = Path(words[0])
    result = read_sheet(run, Path(given.get("sheet", run / "audit.csv")))
    print(f"{result.agreement.pairs} verdicts rated, {result.unrated} left blank; the person is the reference")
    for name, value in result.agreement.as_dict().items():
        if name != "pairs":
            print(f"{name.replace('_', ' '):20} {'–' if value is None else f'{value:.3f}'}")


if __name__ == "__main__":
    run_main(main)
