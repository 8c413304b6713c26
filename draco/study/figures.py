"""Drawing of figures: panels of series, all kinds by one function. Where data is missing, the picture says so.

The numbers go to NAME.csv beside NAME.svg and NAME.png, so that what is drawn can be checked.
"""

from __future__ import annotations

import csv
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from draco.core.errors import ConfigError
from draco.study.settings import SETTINGS

__all__ = ["Figure", "Panel", "Series", "require_matplotlib", "write_figure"]

#: Okabe–Ito without its yellow, then Tol's muted palette: distinguishable with any colour vision, and in print
PALETTE = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000",
    "#882255", "#44AA99", "#332288", "#999933", "#AA4499", "#117733",
)  # fmt: skip
MARKERS = "osD^vPX*"
#: colours that are the same in every figure, in the order of legends. One hue a rubric; step credit has the darker one
COLOURS = dict(zip(SETTINGS, ("#56B4E9", "#0072B2", "#E69F00", "#D55E00", "#009E73", "#CC79A7"), strict=True)) | {
    "base": "#000000",
    "propose_task": "#56B4E9", "propose_rollout": "#0072B2", "merge": "#009E73", "score": "#E69F00",
    "attribute": "#D55E00",
    "length_limit": "#0072B2", "turn_limit": "#56B4E9", "no_action": "#D55E00", "gave_up": "#E69F00",
    "deadline": "#CC79A7", "environment_error": "#000000", "engine_error": "#009E73", "submitted": "#DCDFE3",
    "agreement": "#0072B2", "all-pass baseline": "#8A8F96", "false pass": "#D55E00", "false fail": "#E69F00",
    "criteria recall": "#009E73", "criteria precision": "#CC79A7", "criteria recall, by a model": "#00563F",
    "criteria precision, by a model": "#8A3A66", "recall of cited steps": "#56B4E9",
    "precision of cited steps": "#000000", "pass rate": "#0072B2",
}  # fmt: skip
_ORDER = list(COLOURS)
_SOFT = "#5b626b"


@dataclass(frozen=True, slots=True)
class Series:
    """Points that belong together."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()  #: band, for means over seeds
    high: tuple[float, ...] = ()
    dotted: bool = False
    colour: str = ""  #: key of the colour, if it is not the label

    @property
    def key(self) -> str:
        """Name of its colour."""
        return self.colour or self.label


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes."""

    title: str
    series: tuple[Series, ...]
    kind: str = "line"  #: line | stack (areas) | scatter | bar (grouped by series) | pile (bars on each other)
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
    smooth: int = 1  #: lines are drawn as moving averages over so many steps; the numbers stay as they are
    y_max: float = 1.0  #: end of the axis of a stack


def require_matplotlib() -> None:
    """Find out whether figures can be drawn, before any other work.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError("figures need matplotlib: pip install 'draco[report]'")


def write_figure(figure: Figure, folder: Path, *, png: bool = True) -> None:
    """Write NAME.csv, NAME.svg and, if wanted, NAME.png.

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
                    band = (s.low[i], s.high[i]) if s.low else ("", "")
                    writer.writerow([panel.title, s.label, panel.ticks[int(x)] if panel.ticks else x, y, *band])
    drawn = _draw(figure)
    # Without dates: the same numbers give the same file.
    drawn.savefig(folder / f"{figure.name}.svg", metadata={"Date": None})
    if png:
        drawn.savefig(folder / f"{figure.name}.png", dpi=150)


def _draw(figure: Figure) -> Any:
    count = max(len(figure.panels), 1)
    columns = min(count, 4 if count > 6 else 3)
    rows = -(-count // columns)
    filled = [not p.gap and any(s.x for s in p.series) for p in figure.panels]
    width = {1: 8.0, 2: 10.5, 3: 13.0, 4: 13.5}[columns]
    height = (2.4 if rows > 1 else 3.6) * rows if any(filled) else 1.0
    drawn = _matplotlib_figure()(figsize=(width, 1.1 + height), layout="constrained")
    ratios = [1.0 if f else 0.5 for f in filled] if rows == 1 and any(filled) else None
    grid = drawn.subplots(rows, columns, squeeze=False, width_ratios=ratios, sharex=rows > 1, sharey=rows > 1)
    axes = grid.flatten()
    drawn.suptitle(figure.title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    colours = _colours({s.key for p in figure.panels for s in p.series})
    # Where the last panel has every line, their names stand at its right, in place of a legend.
    named = rows == 1 and {p.kind for p in figure.panels} == {"line"} and filled[-1]
    named = named and {s.label for p in figure.panels for s in p.series} == {s.label for s in figure.panels[-1].series}
    handles: dict[str, Any] = {}
    for i, (axis, panel) in enumerate(zip(axes, figure.panels, strict=False)):
        axis.set_title("\n".join(textwrap.wrap(panel.title, 44, break_on_hyphens=False)), fontsize=10)
        if not filled[i]:
            _gap(axis, panel.gap or "nothing was recorded", 40 if ratios is None else 24)
            continue
        _PLOTS[panel.kind](axis, panel, colours, figure)
        # Panels that share their axes are labelled at the outer ones alone.
        _label(axis, panel, figure, below=rows == 1 or i + columns >= count, left=rows == 1 or i % columns == 0)
        if named and i == count - 1:
            _name_ends(axis, panel, colours, figure.smooth)
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    for axis in axes[count:]:
        axis.set_axis_off()
    _legend(drawn, figure, handles, width, named=named)
    return drawn


def _matplotlib_figure() -> Any:
    require_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({
        "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
        "svg.hashsalt": "draco", "svg.fonttype": "none", "legend.frameon": False, "figure.facecolor": "white",
    })  # fmt: skip
    from matplotlib.figure import Figure as MplFigure

    return MplFigure


def _label(axis: Any, panel: Panel, figure: Figure, *, below: bool, left: bool) -> None:
    axis.tick_params(labelbottom=below)
    axis.set_xlabel(figure.x_label if below else "")
    axis.set_ylabel(figure.y_label if left else "")
    if figure.percent or panel.kind == "scatter":
        axis.yaxis.set_major_formatter(lambda v, _: f"{100 * v:.3g}%")
        if panel.kind in ("line", "stack"):
            axis.set_ylim(0, 1.02 if panel.kind == "line" else figure.y_max)


def _legend(drawn: Any, figure: Figure, handles: dict[str, Any], width: float, *, named: bool) -> None:
    """One legend for all panels, with the note as its title; without a legend the note stands alone."""
    note = "\n".join(textwrap.wrap(figure.note, int(width * 13)))
    labels = sorted(handles, key=_rank)
    if (len(labels) > 1 and not named) or (labels and figure.panels[0].kind in ("bar", "stack", "scatter")):
        fits = max(1, int(width * 10 / (max(map(len, labels)) + 7)))
        lines = -(-len(labels) // fits)
        legend = drawn.legend(
            [handles[k] for k in labels], labels, title=note or None, title_fontsize=8, loc="outside lower center",
            ncols=-(-len(labels) // lines),
        )  # fmt: skip
        legend.get_title().set(color=_SOFT, multialignment="center")
    elif note:
        drawn.supxlabel(note, fontsize=8, color=_SOFT)


def _colours(keys: set[str]) -> dict[str, str]:
    """Colour by key, in the order of legends: fixed ones; the others take what is left of the palette."""
    ordered = sorted(keys, key=_rank)
    used = {COLOURS[k] for k in ordered if k in COLOURS}
    free = [c for c in PALETTE if c not in used] or list(PALETTE)
    others = [k for k in ordered if k not in COLOURS]
    return {k: COLOURS[k] if k in COLOURS else free[others.index(k) % len(free)] for k in ordered}


def _marker(key: str, colours: dict[str, str]) -> str:
    return MARKERS[list(colours).index(key) % len(MARKERS)]


def _rank(key: str) -> tuple[int, str]:
    name = key.split(" (")[0].split(",")[0]
    return (_ORDER.index(name) if name in _ORDER else len(_ORDER), key)


def _gap(axis: Any, text: str, width: int) -> None:
    axis.text(0.5, 0.5, "no data:\n" + "\n".join(textwrap.wrap(text, width)), ha="center", va="center", color=_SOFT,
              transform=axis.transAxes)  # fmt: skip
    axis.set_axis_off()


def _broken(x: Sequence[float], y: Sequence[float], spacing: float) -> tuple[list[float], list[float]]:
    """The same points with a break (NaN) wherever one is missing: no line may cross steps that have no number."""
    xs, ys = list(x[:1]), list(y[:1])
    for before, here, value in zip(x, x[1:], y[1:], strict=False):
        if here - before > 1.5 * spacing:
            xs.append((before + here) / 2)
            ys.append(math.nan)
        xs.append(here)
        ys.append(value)
    return xs, ys


def _smoothed(x: Sequence[float], y: Sequence[float], width: int) -> list[float]:
    """Mean over the points that are there, at most (width − 1) / 2 away in x."""
    reach = (width - 1) / 2
    near = ([v for a, v in zip(x, y, strict=True) if abs(a - b) <= reach] for b in x)
    return [sum(values) / len(values) for values in near]


def _apart(values: Sequence[float], least: float, high: float) -> list[float]:
    """Ascending values, moved as little as possible so that they are `least` apart and none is above `high`."""
    moved: list[float] = []
    for v in values:
        moved.append(max(v, moved[-1] + least) if moved else v)
    for i in reversed(range(len(moved))):
        moved[i] = min(moved[i], high - least * (len(moved) - 1 - i))
    return moved


def _name_ends(axis: Any, panel: Panel, colours: dict[str, str], smooth: int) -> None:
    """Names at the right end of their lines, instead of a legend."""
    ends = sorted(((_smoothed(s.x, s.y, smooth)[-1], s) for s in panel.series if s.x), key=lambda e: e[0])
    low, high = axis.get_ylim()
    texts = ["\n".join(textwrap.wrap(s.label, 30, break_on_hyphens=False)) for _, s in ends]
    gap = 0.062 * (high - low) * max(t.count("\n") + 1 for t in texts)
    for (_, s), text, y in zip(ends, texts, _apart([y for y, _ in ends], gap, high - gap / 2), strict=True):
        axis.annotate(text, (1.015, y), xycoords=axis.get_yaxis_transform(), color=colours[s.key],
                      va="center", fontsize=9, fontweight="bold", annotation_clip=False)  # fmt: skip


def _line(axis: Any, panel: Panel, colours: dict[str, str], figure: Figure) -> None:
    gaps = [b - a for s in panel.series for a, b in zip(s.x, s.x[1:], strict=False)]
    spacing = min(gaps, default=1.0)
    for s in panel.series:
        y, low, high = (_smoothed(s.x, v, figure.smooth) if v else [] for v in (s.y, s.low, s.high))
        axis.plot(*_broken(s.x, y, spacing), ":" if s.dotted else "-", label=s.label, color=colours[s.key],
                  linewidth=1.9, marker=_marker(s.key, colours) if len(s.x) <= 12 else None, markersize=5)  # fmt: skip
        if low:
            axis.fill_between(s.x, low, high, color=colours[s.key], alpha=0.14, linewidth=0)
    _step_axis(axis, panel)
    axis.margins(x=0.02)


def _step_axis(axis: Any, panel: Panel) -> None:
    """Ticks at whole steps; one step alone stands in the middle."""
    xs = {x for s in panel.series for x in s.x}
    if all(float(x).is_integer() for x in xs):
        axis.xaxis.get_major_locator().set_params(integer=True)
    if len(xs) == 1:
        axis.set_xlim(min(xs) - 1, min(xs) + 1)


def _stack(axis: Any, panel: Panel, colours: dict[str, str], figure: Figure) -> None:
    axis.stackplot(
        panel.series[0].x, [s.y for s in panel.series], labels=[s.label for s in panel.series],
        colors=[colours[s.key] for s in panel.series],
    )  # fmt: skip
    axis.margins(x=0)
    axis.grid(False)
    _step_axis(axis, panel)


def _scatter(axis: Any, panel: Panel, colours: dict[str, str], figure: Figure) -> None:
    """Points are named in the legend: names beside them would overlap where settings cost alike."""
    axis.margins(0.2)
    for s in panel.series:
        # Half transparent: a point under another one stays visible.
        axis.scatter(s.x, s.y, s=70, marker=_marker(s.key, colours), zorder=3, label=s.label, linewidths=1.5,
                     facecolors=[(colours[s.key], 0.25)], edgecolors=[colours[s.key]])  # fmt: skip
    xs = [x for s in panel.series for x in s.x]
    if min(xs) > 0 and max(xs) > 20 * min(xs):
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter(lambda v, _: f"{v:.3g}")


def _ticks(axis: Any, panel: Panel) -> None:
    slanted = max(map(len, panel.ticks)) > 6
    axis.set_xticks(
        range(len(panel.ticks)), panel.ticks, rotation=25 if slanted else 0, ha="right" if slanted else "center"
    )
    axis.grid(False, axis="x")


def _bar(axis: Any, panel: Panel, colours: dict[str, str], figure: Figure) -> None:
    width = 0.8 / len(panel.series)
    for i, s in enumerate(panel.series):
        axis.bar([x + (i - (len(panel.series) - 1) / 2) * width for x in s.x], s.y, width, label=s.label,
                 color=colours[s.key])  # fmt: skip
    _ticks(axis, panel)
    # The empty end of a long tail is cut off.
    last = max((x for s in panel.series for x, y in zip(s.x, s.y, strict=True) if y >= 0.0005), default=0.0)
    axis.set_xlim(-0.6, last + 0.6)


def _pile(axis: Any, panel: Panel, colours: dict[str, str], figure: Figure) -> None:
    bottom = [0.0] * len(panel.ticks)
    for s in panel.series:
        axis.bar(s.x, s.y, 0.62, bottom=[bottom[int(x)] for x in s.x], label=s.label,
                 color=colours[s.key])  # fmt: skip
        for x, y in zip(s.x, s.y, strict=True):
            bottom[int(x)] += y
    for x, total in enumerate(bottom):
        axis.annotate(f"{total:.3g}", (x, total), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=9)
    _ticks(axis, panel)
    axis.margins(y=0.1)


_PLOTS = {"line": _line, "stack": _stack, "scatter": _scatter, "bar": _bar, "pile": _pile}
