"""Figures F2–F12: first their numbers, then one drawing for all kinds. What is missing is said in the picture.

Every figure is a list of panels of series. The numbers go to NAME.csv beside NAME.svg and NAME.png, so that what is
drawn can be checked.
"""

from __future__ import annotations

import csv
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draco.errors import ConfigError

__all__ = ["Figure", "Panel", "Series", "write_figure"]

#: Okabe–Ito: distinguishable with any colour vision, and in print
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
MARKERS = "osD^vPX*"
_ORDER = ["static+uniform", "static+step", "dynamic+uniform", "dynamic+step", "outcome+uniform", "random+uniform",
          "base",
          "propose_task", "propose_rollout", "merge", "score", "attribute"]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Series:
    """Points that belong together."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()  #: band, for means over seeds
    high: tuple[float, ...] = ()
    dotted: bool = False
    colour: str = ""  #: key of the colour, where it is another than the label


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes."""

    title: str
    series: tuple[Series, ...]
    kind: str = "line"  #: line | stack (areas) | scatter | bar (grouped by series)
    ticks: tuple[str, ...] = ()  #: names of the x values 0, 1, … of a bar panel
    gap: str = ""  #: why nothing is drawn


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure."""

    name: str  #: of its files
    title: str
    x_label: str
    y_label: str
    panels: tuple[Panel, ...]
    percent: bool = True  #: y is a share
    note: str = ""


def write_figure(figure: Figure, folder: Path) -> None:
    """NAME.csv, NAME.svg and NAME.png.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{figure.name}.csv", "w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["panel", "series", "x", "y", "low", "high"])
        for panel in figure.panels:
            for s in panel.series:
                for i, (x, y) in enumerate(zip(s.x, s.y, strict=True)):
                    name = panel.ticks[int(x)] if panel.ticks else x
                    band = (s.low[i], s.high[i]) if s.low else ("", "")
                    writer.writerow([panel.title, s.label, name, y, *band])
    drawn = _draw(figure)
    # Without dates, so that the same numbers give the same file.
    drawn.savefig(folder / f"{figure.name}.svg", metadata={"Date": None})
    drawn.savefig(folder / f"{figure.name}.png", dpi=150)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("figures need matplotlib: pip install 'draco[report]'") from None
    matplotlib.use("Agg")
    matplotlib.rcParams.update({
        "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
        "svg.hashsalt": "draco", "svg.fonttype": "none", "legend.frameon": False, "figure.facecolor": "white",
    })  # fmt: skip
    from matplotlib.figure import Figure as MplFigure

    return MplFigure


def _draw(figure: Figure) -> Any:
    make = _pyplot()
    count = max(len(figure.panels), 1)
    columns = min(count, 3)
    rows = -(-count // columns)
    width = {1: 7.5, 2: 10.5, 3: 13.5}[columns]
    drawn = make(figsize=(width, 1.2 + 3.1 * rows), layout="constrained")
    axes = drawn.subplots(rows, columns, squeeze=False).flatten()
    drawn.suptitle(figure.title, fontsize=12, fontweight="bold")
    keys = sorted({s.colour or s.label for p in figure.panels for s in p.series}, key=_rank)
    colours = {key: PALETTE[i % len(PALETTE)] for i, key in enumerate(keys)}
    shared: dict[str, Any] = {}
    for axis, panel in zip(axes, figure.panels, strict=False):
        axis.set_title("\n".join(textwrap.wrap(panel.title, 44)), fontsize=10)
        if panel.gap or not any(s.x for s in panel.series):
            _gap(axis, panel.gap or "nothing was recorded")
            continue
        _PLOTS[panel.kind](axis, panel, colours)
        axis.set_xlabel(figure.x_label)
        axis.set_ylabel(figure.y_label)
        if figure.percent:
            axis.yaxis.set_major_formatter(lambda v, _: f"{100 * v:.0f}%")
            if panel.kind in ("line", "stack"):
                axis.set_ylim(0, 1.02 if panel.kind == "line" else 1)
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            shared.setdefault(label, handle)
    for axis in axes[len(figure.panels) :]:
        axis.set_axis_off()
    note = "\n".join(textwrap.wrap(figure.note, int(width * 13)))
    labels = sorted(shared, key=_rank)
    if len(labels) > 1 or (labels and figure.panels[0].kind != "scatter" and len(figure.panels) == 1):
        handles = [shared[k] for k in labels]
        columns = max(1, min(len(labels), int(width * 10 / (max(map(len, labels)) + 7))))
        place: dict[str, Any] = {"loc": "outside lower center", "ncols": columns}
        drawn.legend(handles, labels, title=note or None, title_fontsize=8, **place)
    elif note:
        drawn.supxlabel(note, fontsize=8, color="#555555")
    return drawn


def _rank(key: str) -> tuple[int, str]:
    name = key.split(" (")[0].split(",")[0]
    return (_ORDER.index(name) if name in _ORDER else len(_ORDER), key)


def _gap(axis: Any, text: str) -> None:
    axis.text(0.5, 0.5, "no data:\n" + "\n".join(textwrap.wrap(text, 40)), ha="center", va="center", color="#777777",
              transform=axis.transAxes)  # fmt: skip
    axis.set_xticks([])
    axis.set_yticks([])
    axis.grid(False)


def _broken(x: Sequence[float], y: Sequence[float], spacing: float) -> tuple[list[float], list[float]]:
    """The same points with a break wherever one is missing: a line must not run over steps that have no number."""
    xs, ys = list(x[:1]), list(y[:1])
    for before, here, value in zip(x, x[1:], y[1:], strict=False):
        if here - before > 1.5 * spacing:
            xs.append((before + here) / 2)
            ys.append(math.nan)
        xs.append(here)
        ys.append(value)
    return xs, ys


def _line(axis: Any, panel: Panel, colours: dict[str, str]) -> None:
    gaps = [b - a for s in panel.series for a, b in zip(s.x, s.x[1:], strict=False)]
    spacing = min(gaps, default=1.0)
    for s in panel.series:
        colour = colours[s.colour or s.label]
        sparse = len(s.x) <= 12
        axis.plot(*_broken(s.x, s.y, spacing), ":" if s.dotted else "-", label=s.label, color=colour, linewidth=1.8,
                  marker=MARKERS[list(colours).index(s.colour or s.label) % len(MARKERS)] if sparse else None,
                  markersize=5)  # fmt: skip
        if s.low:
            axis.fill_between(s.x, s.low, s.high, color=colour, alpha=0.15, linewidth=0)
    if all(float(x).is_integer() for s in panel.series for x in s.x):
        axis.xaxis.get_major_locator().set_params(integer=True)


def _stack(axis: Any, panel: Panel, colours: dict[str, str]) -> None:
    axis.stackplot(
        panel.series[0].x, [s.y for s in panel.series], labels=[s.label for s in panel.series],
        colors=[colours[s.colour or s.label] for s in panel.series], alpha=0.85,
    )  # fmt: skip
    axis.margins(x=0)


def _scatter(axis: Any, panel: Panel, colours: dict[str, str]) -> None:
    for i, s in enumerate(panel.series):
        axis.scatter(s.x, s.y, label=s.label, color=colours[s.colour or s.label], s=55,
                     marker=MARKERS[list(colours).index(s.colour or s.label) % len(MARKERS)])  # fmt: skip
        for x, y in zip(s.x, s.y, strict=True):
            axis.annotate(s.label, (x, y), xytext=(6, 4 if i % 2 == 0 else -11), textcoords="offset points", fontsize=8)
    axis.margins(0.18)


def _bar(axis: Any, panel: Panel, colours: dict[str, str]) -> None:
    width = 0.8 / len(panel.series)
    for i, s in enumerate(panel.series):
        axis.bar([x + (i - (len(panel.series) - 1) / 2) * width for x in s.x], s.y, width, label=s.label,
                 color=colours[s.colour or s.label])  # fmt: skip
    axis.set_xticks(
        range(len(panel.ticks)), panel.ticks, rotation=30 if max(map(len, panel.ticks)) > 6 else 0, ha="right"
    )


_PLOTS = {"line": _line, "stack": _stack, "scatter": _scatter, "bar": _bar}
