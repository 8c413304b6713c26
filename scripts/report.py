"""Tables, figures and the HTML page of one run or several.

    python scripts/report.py runs/NAME [runs/OTHER … results/MODEL …]

Writes `tables/*.{csv,md}`, `figures/*.{svg,png,csv}` and `report.md`, which shows them all, into the run folder
(several folders: into `report/`, or where out= says), and `report.html` with the credit viewer into every run folder.
A folder of evaluation files without a run (scripts/evaluate.py policy=litellm … out=FOLDER) gives frontier rows.

Options (key=value):
    out        folder for tables and figures
    png        true (default) | false: figures as PNG beside SVG
    window     training steps a window (default 10)
    prices     USD per million tokens of the policy, READ,WRITTEN or READ,READ_AGAIN,WRITTEN, where an evaluation
               counted tokens but had no prices
    html       true (default) | false: report.html
    max_mb     size that report.html may have; more steps are thinned out evenly (default 64)
    max_text   characters of one action, observation or judge reply in report.html (default 4000)
    audit      so many verdicts go to `audit.csv`, without their score, for a person to rate (default 0)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from draco.config.arguments import number, parse, prices_of, run_main, whole
from draco.core import files
from draco.core.errors import ConfigError
from draco.core.table import Table
from draco.run.numbers import archive_numbers
from draco.study.curves import all_figures
from draco.study.figures import Figure, require_matplotlib, write_figure
from draco.study.page import write_page
from draco.study.runs import open_run
from draco.study.tables import all_tables, write_table

OPTIONS = {"out", "png", "window", "prices", "html", "max_mb", "max_text", "audit"}


def _flag(given: dict[str, str], name: str) -> bool:
    text = given.get(name, "true").lower()
    if text not in {"true", "false"}:
        raise ConfigError(f"{name}={text}: expected true or false")
    return text == "true"


def write_overview(out: Path, names: Sequence[str], tables: Sequence[Table], figures: Sequence[Figure]) -> None:
    """report.md: tables and figures that have something to show, then what is missing and why."""
    lines = [f"# {', '.join(names)}" if len(names) < 4 else f"# {len(names)} runs: {names[0]} … {names[-1]}", ""]
    for table in (t for t in tables if t.rows):
        lines += [
            (out / "tables" / f"{table.name}.md").read_text(encoding="utf-8"),
            f"([CSV](tables/{table.name}.csv))",
            "",
        ]
    drawn = [f for f in figures if any(s.x for p in f.panels for s in p.series)]
    for figure in drawn:
        lines += [f"![{figure.title}](figures/{figure.name}.svg)", "", f"([CSV](figures/{figure.name}.csv))", ""]
    missing = [f"- {t.title}: {' '.join(t.notes)}" for t in tables if not t.rows]
    missing += [f"- {f.title}: {'; '.join(sorted({p.gap for p in f.panels}))}." for f in figures if f not in drawn]
    lines += ["## Not measured", "", *missing, ""] if missing else []
    files.write_text(out / "report.md", "\n".join(lines))


def main(arguments: list[str]) -> None:
    """Write everything and say where it is."""
    words, given = parse(arguments, OPTIONS)
    if not words:
        raise ConfigError("no run folder is given: python scripts/report.py runs/NAME [runs/OTHER …]")
    runs = [open_run(Path(w)) for w in words]
    prices = prices_of(given.get("prices"))
    window, count = whole(given, "window", 10, least=1), whole(given, "audit", 0)
    max_mb, max_text = number(given, "max_mb", 64), whole(given, "max_text", 4000, least=1)
    pngs, pages = _flag(given, "png"), _flag(given, "html")
    require_matplotlib()  # before minutes of reading
    trained = [r for r in runs if r.trained]
    default = trained[0].path if len(runs) == 1 and trained else Path("report")
    out = Path(given.get("out", default))
    numbers = {r.path: archive_numbers(r.path) for r in trained}
    tables = all_tables(runs, prices)
    for table in tables:
        write_table(table, out / "tables")
    figures = all_figures(runs, numbers, window=window, prices=prices)
    for figure in figures:
        write_figure(figure, out / "figures", png=pngs)
    write_overview(out, [r.path.name for r in runs], tables, figures)
    print(f"tables:  {out / 'tables'}\nfigures: {out / 'figures'} ({len(figures)})\nall:     {out / 'report.md'}")
    if pages:
        for run in trained:
            size = write_page(run, numbers[run.path], max_mb=max_mb, max_text=max_text)
            print(f"page:    {run.path / 'report.html'} ({size / 1e6:.1f} MB)")
    if count:
        from draco.study.audit import write_sheet

        for run in trained:
            print(f"audit:   {write_sheet(run.path, count)}")


if __name__ == "__main__":
    run_main(main)
