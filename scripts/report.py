"""Tables, figures and the HTML page of one run or several.

    python scripts/report.py runs/NAME [runs/OTHER … results/MODEL …]

Writes `tables/*.{csv,md}` and `figures/*.{svg,png,csv}` into the run folder (several folders: into `report/`, or
where out= says), and `report.html` with the credit viewer into every run folder. A folder of evaluation files without
a run (scripts/evaluate.py policy=litellm … out=FOLDER) gives frontier rows.

Options (key=value):
    out        folder for tables and figures
    window     training steps a window (default 10)
    prices     USD per million tokens of the policy, READ,WRITTEN or READ,READ_AGAIN,WRITTEN, where an evaluation
               counted tokens but had no prices
    html       true (default) | false: report.html
    max_mb     size that report.html may have; more steps are thinned out evenly (default 64)
    max_text   characters of one action, observation or judge reply in report.html (default 4000)
    audit      so many verdicts go to `audit.csv`, without their score, for a person to rate (default 0)
"""

from __future__ import annotations

import sys
from pathlib import Path

from draco.analysis.runs import open_run
from draco.analysis.series import archive_numbers
from draco.arguments import parse
from draco.errors import ConfigError, DracoError
from draco.report.curves import all_figures
from draco.report.figures import write_figure
from draco.report.page import write_page
from draco.report.tables import all_tables, write_table

OPTIONS = {"out", "window", "prices", "html", "max_mb", "max_text", "audit"}


def prices_of(text: str | None) -> tuple[float, ...] | None:
    """Two or three numbers with commas.

    Raises:
        ConfigError: not that.
    """
    if text is None:
        return None
    try:
        values = [float(v) for v in text.split(",")]
        if len(values) == 2:
            values = [values[0], values[0], values[1]]
        read, again, written = values
    except ValueError:
        raise ConfigError(
            f"prices={text}: expected READ,WRITTEN or READ,READ_AGAIN,WRITTEN in USD per million"
        ) from None
    return read, again, written


def main(arguments: list[str]) -> None:
    """Write everything and say where it is."""
    words, given = parse(arguments, OPTIONS)
    if not words:
        raise ConfigError("no run folder is given: python scripts/report.py runs/NAME [runs/OTHER …]")
    runs = [open_run(Path(w)) for w in words]
    prices = prices_of(given.get("prices"))
    window = int(given.get("window", 10))
    trained = [r for r in runs if r.trained]
    default = trained[0].path if len(runs) == 1 and trained else Path("report")
    out = Path(given.get("out", default))
    numbers = {r.path: archive_numbers(r.path) for r in trained}
    for table in all_tables(runs, prices):
        write_table(table, out / "tables")
    figures = all_figures(runs, numbers, window=window, prices=prices)
    for figure in figures:
        write_figure(figure, out / "figures")
    print(f"tables:  {out / 'tables'}\nfigures: {out / 'figures'} ({len(figures)})")
    if given.get("html", "true").lower() != "false":
        for run in trained:
            size = write_page(
                run, numbers[run.path], max_mb=float(given.get("max_mb", 64)), max_text=int(given.get("max_text", 4000))
            )
            print(f"page:    {run.path / 'report.html'} ({size / 1e6:.1f} MB)")
    if count := int(given.get("audit", 0)):
        from draco.analysis.audit import write_sheet

        for run in trained:
            print(f"audit:   {write_sheet(run.path, count)}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except DracoError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
