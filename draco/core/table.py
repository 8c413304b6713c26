"""A table of numbers that can be written as Markdown, as CSV, or to the terminal."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import rich.table

__all__ = ["Cell", "Table"]

Cell = float | str | None  #: None: not measured


@dataclass(frozen=True, slots=True)
class Table:
    """One table."""

    name: str  #: file name without extension
    title: str
    columns: tuple[str, ...]  #: the first one labels the rows
    rows: tuple[tuple[Cell, ...], ...]
    form: str = "{:.1%}"  #: format of numbers in Markdown and the terminal; CSV has all digits
    notes: tuple[str, ...] = ()  #: what the numbers mean, and what is missing
    forms: Mapping[str, str] = field(default_factory=dict)  #: column → another format

    def shown(self) -> list[list[str]]:
        """Cells as formatted text."""
        forms = [self.forms.get(c, self.form) for c in self.columns]
        return [[_shown(c, f) for c, f in zip(row, forms, strict=True)] for row in self.rows]

    def csv(self) -> str:
        """CSV with all digits; an empty cell was not measured."""
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow(self.columns)
        writer.writerows(["" if c is None else c for c in row] for row in self.rows)
        return text.getvalue()

    def markdown(self) -> str:
        """A Markdown table; empty if there are no rows."""
        rows = [[c.replace("|", "\\|").replace("\n", " ") for c in row] for row in self.shown()]
        lines = ["| " + " | ".join(row) + " |" for row in [list(self.columns), *rows]]
        return "\n".join([lines[0], "|---" * len(self.columns) + "|", *lines[1:]]) + "\n" if rows else ""

    def terminal(self) -> rich.table.Table:
        """A table for rich's `Console.print`."""
        from rich.markup import escape
        from rich.table import Table as RichTable

        table = RichTable(title=escape(self.title), title_justify="left")
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="right" if i else "left")
        for row in self.shown():
            table.add_row(*map(escape, row))
        return table


def _shown(cell: Cell, form: str) -> str:
    return "–" if cell is None else cell if isinstance(cell, str) else form.format(cell)
