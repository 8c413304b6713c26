"""`draco report`: tables, figures and the HTML page of one run or several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from draco.config.arguments import Command, option, prices_of, words
from draco.config.options import Count, Index, Positive
from draco.core.llm.money import Prices

if TYPE_CHECKING:
    from draco.core.table import Table
    from draco.study.figures import Figure

__all__ = ["COMMAND", "main"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is drawn, and where it goes."""

    run: tuple[Path, ...] = words("run folders; a folder of evaluation files without a run gives frontier rows")
    out: Path | None = option(None, "folder for tables and figures", shown="the run's own; of several runs report/")
    png: bool = option(True, "figures as PNG beside SVG")
    window: Count = option(10, "training steps a window")
    prices: Prices | None = option(
        None,
        "USD per million tokens of the policy, READ,WRITTEN or READ,READ_AGAIN,WRITTEN, where an evaluation counted "
        "tokens but had no prices",
        read=prices_of,
    )
    html: bool = option(True, "report.html with the credit viewer, in every run folder")
    max_mb: Positive = option(64, "size that report.html may have; more steps are thinned out evenly")
    max_text: Count = option(4000, "characters of one action, observation or judge reply in report.html")
    audit: Index = option(0, "so many verdicts go to audit.csv, without their score, for a person to rate")


COMMAND = Command(
    "draco report",
    "tables, figures and the HTML page of one run or several",
    Options,
    "Writes tables/*.{csv,md}, figures/*.{svg,png,csv} and report.md, which shows them all. Needs matplotlib:\n"
    "pip install 'draco[report]'.",
    ("draco report runs/NAME", "draco report runs/A runs/B results/gpt out=report", "draco report runs/NAME audit=100"),
)


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
    from draco.core import files

    files.write_text(out / "report.md", "\n".join(lines))


def main(arguments: list[str]) -> None:
    """Write everything and say where it is."""
    given = COMMAND.parse(arguments)
    from draco.run.numbers import archive_numbers
    from draco.study.audit import write_sheet
    from draco.study.curves import all_figures
    from draco.study.figures import require_matplotlib, write_figure
    from draco.study.page import write_page
    from draco.study.runs import open_run
    from draco.study.tables import all_tables, write_table

    runs = [open_run(path) for path in given.run]
    require_matplotlib()  # before minutes of reading
    trained = [r for r in runs if r.trained]
    out = given.out or (trained[0].path if len(runs) == 1 and trained else Path("report"))
    numbers = {r.path: archive_numbers(r.path) for r in trained}
    tables = all_tables(runs, given.prices)
    for table in tables:
        write_table(table, out / "tables")
    figures = all_figures(runs, numbers, window=given.window, prices=given.prices)
    for figure in figures:
        write_figure(figure, out / "figures", png=given.png)
    write_overview(out, [r.path.name for r in runs], tables, figures)
    print(f"tables:  {out / 'tables'}\nfigures: {out / 'figures'} ({len(figures)})\nall:     {out / 'report.md'}")
    for run in trained if given.html else ():
        size = write_page(run, numbers[run.path], max_mb=given.max_mb, max_text=given.max_text)
        print(f"page:    {run.path / 'report.html'} ({size / 1e6:.1f} MB)")
    for run in trained if given.audit else ():
        print(f"audit:   {write_sheet(run.path, given.audit)}")
