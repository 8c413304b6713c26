"""The numbers of figures F2–F12, from run folders. Nothing is interpolated; a panel without data says why."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draco.core.llm.money import Prices
from draco.core.types import Termination
from draco.run.numbers import StepNumbers, Verdicts, archive_numbers, inert_share, total, windows
from draco.study.figures import Figure, Panel, Series
from draco.study.runs import Evaluation, Run
from draco.study.settings import by_setting, evaluations, fault_notes, finals, splits
from draco.study.statistics import mean_std

__all__ = ["all_figures", "over_seeds"]

_Curve = Mapping[float, float]
_PHASES = ("propose_task", "propose_rollout", "merge", "score", "attribute")
_PANELS = 12  #: criteria shown in F10
_USUAL = "submitted"  #: how a rollout should end
_SMOOTH = 5  #: steps of the moving average that F4 and F7 draw, of a run of at least four times as many
#: F9: figure of a judge replay → its name
_REPLAYED = {
    "agreement": "agreement", "all_pass_baseline": "all-pass baseline", "false_pass": "false pass",
    "false_fail": "false fail", "recall": "criteria recall", "precision": "criteria precision",
    "model_recall": "criteria recall, by a model", "model_precision": "criteria precision, by a model",
    "cited_recall": "recall of cited steps", "cited_precision": "precision of cited steps",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Data:
    """What figures are drawn from."""

    runs: Sequence[Run]
    cells: Mapping[str, list[Run]]  #: trained runs by setting
    numbers: Mapping[Path, list[StepNumbers]]  #: of the archive, by run folder
    window: int  #: steps
    prices: Prices | None

    @property
    def trained(self) -> list[Run]:
        return [r for cell in self.cells.values() for r in cell]

    @property
    def seeds(self) -> str:
        """What a line stands for where a setting has several runs."""
        several = any(len(cell) > 1 for cell in self.cells.values())
        return "Line: mean over the seeds that have the step; band: lowest to highest of them." if several else ""

    def steps(self, cell: Sequence[Run]) -> list[StepNumbers]:
        return [s for run in cell for s in self.numbers[run.path]]

    def lines(self, curve: Callable[[Run], _Curve]) -> list[Series]:
        """One line a setting that has any point, over its seeds."""
        curves = {setting: [c for run in cell if (c := curve(run))] for setting, cell in self.cells.items()}
        return [over_seeds(setting, found) for setting, found in curves.items() if found]


def all_figures(
    runs: Sequence[Run], numbers: Mapping[Path, list[StepNumbers]] | None = None, *, window: int = 10,
    prices: Prices | None = None,
) -> list[Figure]:  # fmt: skip
    """Every figure, those without data included.

    Args:
        runs: run folders and folders of evaluation files.
        numbers: archive numbers by run folder; counted here if not given.
        window: steps a window.
        prices: see `Evaluation.cost_usd`.
    """
    trained = [r for r in runs if r.trained]
    numbers = {r.path: archive_numbers(r.path) for r in trained} if numbers is None else numbers
    data = _Data(runs, by_setting(trained), numbers, window, prices)
    return [
        _cost_success(data),
        _terminations(data),
        _pass_rate(data),
        _pass_k(data),
        _frontier(data),
        _train_success(data),
        _judge_cost(data),
        _judge_replay(data),
        *_criteria(data),
        _inert(data),
        _citations(data),
    ]


def over_seeds(label: str, curves: Sequence[_Curve], **style: Any) -> Series:
    """Mean over seeds at every x that any seed has; the band runs from the lowest to the highest of them."""
    xs = sorted(set().union(*curves)) if curves else []
    columns = [[c[x] for c in curves if x in c] for x in xs]
    means = tuple(sum(c) / len(c) for c in columns)
    if len(curves) < 2:
        return Series(label, tuple(xs), means, **style)
    return Series(label, tuple(xs), means, tuple(map(min, columns)), tuple(map(max, columns)), **style)


def _figure(
    name: str, title: str, axes: tuple[str, str], panels: Iterable[Panel], nothing: str = "", notes: Iterable[str] = (),
    **style: Any,
) -> Figure:  # fmt: skip
    """A figure; without a panel it says `nothing`."""
    drawn = tuple(panels) or (Panel("", (), gap=nothing),)
    return Figure(name, title, *axes, drawn, note=" ".join(n for n in notes if n), **style)


def _panel(series: Iterable[Series], gap: str, title: str = "", kind: str = "line", ticks: Sequence[str] = ()) -> Panel:
    """A panel; without a series it says `gap`."""
    drawn = tuple(series)
    return Panel(title, drawn, kind, tuple(ticks), "" if drawn else gap)


def _by_step(steps: Iterable[StepNumbers], value: Callable[[StepNumbers], float | None]) -> dict[float, float]:
    # The archive counts batches from 0, every log from 1: x is the number of batches done.
    return {float(s.step + 1): v for s in steps if (v := value(s)) is not None}


def _by_window(
    steps: Sequence[StepNumbers], width: int, value: Callable[[Sequence[StepNumbers]], float | None]
) -> dict[float, float]:
    """A value by first step of the window."""
    found = ((float(w[0].step // width * width + 1), value(w)) for w in windows(steps, width))
    return {x: v for x, v in found if v is not None}


def _smoothing(series: Sequence[Series]) -> tuple[int, str]:
    """Width of the moving average to draw, and a note."""
    if max((len(s.x) for s in series), default=0) < 4 * _SMOOTH:
        return 1, ""
    return _SMOOTH, f"Drawn: moving averages over {_SMOOTH} steps; the CSV has every step."


def _scatter(split: str, rows: Mapping[str, Sequence[Evaluation]], cost: Callable[[Evaluation], float | None]) -> Panel:
    """TGC against cost. A point is a mean over all evaluations of a row; rows that lack one are named, not drawn."""
    series = []
    lacking: dict[str, list[str]] = {"cost": [], "TGC": []}
    for name, found in rows.items():
        spreads = {"cost": mean_std(map(cost, found)), "TGC": mean_std(e.figure("tgc") for e in found)}
        missing = {what: len(found) if s is None else s.missing for what, s in spreads.items()}
        for what in (w for w, m in missing.items() if m):
            part = f" ({missing[what]} of {len(found)} evaluations)" if missing[what] < len(found) else ""
            lacking[what].append(name + part)
        x, y = spreads.values()
        if x and y and not any(missing.values()):
            series.append(Series(name, (x.mean,), (y.mean,)))
    without = "; ".join(f"no {what}: {', '.join(names)}" for what, names in lacking.items() if names)
    gap = "no evaluation has a cost; give prices=READ,WRITTEN here or to draco evaluate"
    return _panel(series, gap, split + (f" ({without})" if series and without else ""), "scatter")


def _cost_success(data: _Data) -> Figure:
    panels, notes = [], list[str]()
    for split in splits(data.trained, base=True):
        rows = evaluations(data.trained, split)
        panels.append(_scatter(split, rows, lambda e: e.cost_usd(data.prices)))
        notes += fault_notes(split, rows)
    axes = ("USD for one run of every task", "TGC")
    title = "F2 · Success against the cost of evaluation"
    return _figure("F2_success_cost", title, axes, panels, "no evaluation", notes)


def _terminations(data: _Data) -> Figure:
    panels, notes, worst = [], list[str](), 0.0
    for setting, cell in data.cells.items():
        counts: dict[int, Counter[str]] = defaultdict(Counter)
        silent = 0
        for s in data.steps(cell):
            known = {k: n for k, n in s.terminations.items() if k != Termination.UNKNOWN}
            counts[s.step + 1].update(known)
            silent += s.rollouts - sum(known.values())
        # The usual ending is drawn on top: the rare ones then start at the axis, where their size can be read.
        kinds = sorted(sum(counts.values(), Counter()), key=lambda k: (k == _USUAL, k))
        xs = sorted(s for s in counts if counts[s].total())
        worst = max([worst, *(1 - counts[x][_USUAL] / counts[x].total() for x in xs)])
        series = [Series(k, tuple(map(float, xs)), tuple(counts[x][k] / counts[x].total() for x in xs)) for k in kinds]
        gap = "its log does not say how trajectories ended" if silent else "no archived step"
        panels.append(Panel(setting, tuple(series), "stack", gap="" if xs else gap))
        if silent and xs:
            notes.append(f"{setting}: {silent} rollouts whose log does not say how they ended are left out.")
    end = 1.0 if not worst else next(m for m in (0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if 1.1 * worst <= m or m == 1.0)
    notes += [] if end == 1 else [f"The axis ends at {end:.0%}: all other rollouts {_USUAL}."]
    axes = ("training step", "share of rollouts")
    return _figure("F3_terminations", "F3 · How training rollouts end", axes, panels, "no run", notes, y_max=end)


def _pass_rate(data: _Data) -> Figure:
    def rate(s: StepNumbers) -> float | None:
        return s.verdicts.pass_rate

    lines = {s.label: s for s in data.lines(lambda run: _by_step(data.numbers[run.path], rate))}
    series, rescored = [], False
    for setting, cell in data.cells.items():
        series += [lines[setting]] if setting in lines else []
        for folder in sorted({p for r in cell for p in r.path.glob("rescored/*")}):
            if found := _by_step(archive_numbers(folder), rate):
                label = f"{setting} (rollouts re-scored: {folder.name})"
                series.append(over_seeds(label, [found], dotted=True, colour=setting))
                rescored = True
    smooth, how = _smoothing(series)
    notes = [data.seeds, how]
    if without := [s for s in data.cells if s not in lines]:
        notes.append(f"No rubric: {', '.join(without)}.")
    notes += [] if rescored else ["No run was re-scored on a static set (draco rescore RUN)."]
    title, axes = "F4 · Pass rate of the training rubric", ("training step", "passes / (passes + fails)")
    panels = [_panel(series, "no run with a rubric")]
    return _figure("F4_pass_rate", title, axes, panels, notes=notes, smooth=smooth)


def _pass_k(data: _Data) -> Figure:
    panels, notes = [], list[str]()
    kinds = {"tgc_pass_hat": "pass^k: all k runs succeed", "tgc_pass_at": "pass@k: at least one does"}
    for split in splits(data.trained, base=True):
        rows = evaluations(data.trained, split)
        for key, label in kinds.items():
            series = []
            for name, found in rows.items():
                curves = [{float(k): v for k, v in enumerate(e.content[key], 1) if v is not None} for e in found]
                if any(len(c) > 1 for c in curves):
                    series.append(over_seeds(name, [c for c in curves if c]))
                    fewer = sum(len(c) < max(map(len, curves)) for c in curves)
                    if fewer and key == "tgc_pass_hat":
                        notes.append(f"{name}, {split}: {fewer} of {len(curves)} evaluations have fewer runs a task "
                                     "and are not in the points at larger k.")  # fmt: skip
            gap = "every evaluation is of one run a task (n = 1); evaluate with n=3"
            panels.append(_panel(series, gap, f"{split}, {label}"))
    if any(s.low for p in panels for s in p.series):
        notes.insert(0, "Line: mean over seeds and checkpoints; band: lowest to highest.")
    return _figure("F5_pass_k", "F5 · pass^k against pass@k", ("k", "TGC"), panels, "no evaluation", notes)


def _frontier(data: _Data) -> Figure:
    models = [r for r in data.runs if not r.trained]
    panels, notes = [], list[str]()

    def usd_a_task(e: Evaluation) -> float | None:
        usd, tasks = e.cost_usd(data.prices), e.content["tasks"]
        return usd / tasks if usd is not None and tasks else None

    for split in splits(models):
        rows = {s: finals(cell, split) for s, cell in {**by_setting(models), **data.cells}.items()}
        panels.append(_scatter(split, rows, usd_a_task))
        notes += fault_notes(split, rows)
    gap = "no frontier model was evaluated (draco evaluate policy=litellm model=… out=FOLDER)"
    title = "F6 · Frontier models and trained policies by cost"
    return _figure("F6_frontier", title, ("USD a task", "TGC"), panels, gap, notes)


def _train_success(data: _Data) -> Figure:
    series = data.lines(lambda run: {float(s + 1): good / known for s, (good, known) in run.train_success.items()})
    smooth, how = _smoothing(series)
    title = "F7 · Success on training tasks (after the fact; never a reward)"
    panels = [_panel(series, "no train_success.csv: the environment has no evaluator")]
    axes = ("training step", "share of rollouts")
    return _figure("F7_train_success", title, axes, panels, notes=(data.seeds, how), smooth=smooth)


def _judge_cost(data: _Data) -> Figure:
    judged = {s: c for s, c in data.cells.items() if any(n.calls for n in data.steps(c))}
    if not judged:
        title = "F8 · What judging costs"
        return _figure("F8_judge_cost", title, ("", ""), (), "no run with a judge", percent=False)
    seen = {p for c in judged.values() for n in data.steps(c) for p in n.calls}
    phases = [*(p for p in _PHASES if p in seen), *sorted(seen - {*_PHASES})]
    usd: dict[str, list[float | None]] = {p: [] for p in phases}
    tokens: dict[str, list[float]] = {p: [] for p in phases}
    points, unsolved = [], list[str]()
    for setting, cell in judged.items():
        for phase in phases:
            parts = [n.calls[phase] for n in data.steps(cell) if phase in n.calls]
            costs = [p.usd for p in parts]
            usd[phase].append(None if None in costs else sum(c for c in costs if c is not None) / len(cell))
            tokens[phase].append(sum(p.tokens for p in parts) / len(cell) / 1e6)
        bill = [usd[p][-1] for p in phases]
        success = mean_std(e.figure("tgc") for split in splits(cell)[:1] for e in finals(cell, split))
        if success is None or success.missing:
            unsolved.append(setting)
        elif None not in bill:
            points.append(Series(setting, (sum(b for b in bill if b is not None),), (success.mean,)))
    spent = [v for column in usd.values() for v in column]
    gap = "a call had no known price" if None in spent else "" if any(spent) else "every call was free (scripted judge)"
    xs = tuple(map(float, range(len(judged))))
    bars = tuple(Series(p, xs, tuple(v or 0.0 for v in usd[p])) for p in phases if not gap)
    amounts = tuple(Series(p, xs, tuple(tokens[p])) for p in phases)
    panels = (
        Panel("USD a run", bars, "pile", tuple(judged), gap),
        Panel("million tokens a run", amounts, "pile", tuple(judged)),
        Panel("TGC (y) against USD a run (x)", () if gap else tuple(points), "scatter", gap=gap),
    )
    note = f"Without a point, for an evaluation has no TGC: {', '.join(unsolved)}." if unsolved and not gap else ""
    title = "F8 · What judging costs, by phase, and against success"
    return _figure("F8_judge_cost", title, ("", ""), panels, notes=(note,), percent=False)


def _judge_replay(data: _Data) -> Figure:
    panels = []
    for run in (r for r in data.runs if r.trained):
        for file in sorted(run.path.glob("judge_replay/*/summary.json")):
            content = json.loads(file.read_text(encoding="utf-8"))
            curves = {
                label: {float(r["first_step"] + 1): r[key] for r in content["windows"] if r.get(key) is not None}
                for key, label in _REPLAYED.items()
            }
            series = tuple(over_seeds(label, [curve]) for label, curve in curves.items() if curve)
            panels.append(Panel(f"{run.path.name}, judged again by {content['judge']}", series))
    gap = "no judge was replayed (draco replay RUN judge=…)"
    axes = ("training step (start of window)", "share")
    return _figure("F9_judge_replay", "F9 · The same calls, judged again", axes, panels, gap)


def _criteria(data: _Data) -> list[Figure]:
    figures = []
    for setting, cell in data.cells.items():
        steps = data.steps(cell)
        counted: Counter[str] = Counter()
        for s in steps:
            counted.update({t: v.passes + v.fails for t, v in s.by_title.items()})
        if not counted:
            continue
        panels = []
        for title, count in counted.most_common(_PANELS):
            curve = _by_window(steps, data.window, _rate_of(title))
            panels.append(Panel(f"{title} ({count})", (over_seeds("pass rate", [curve]),)))
        note = f"Windows of {data.window} steps. In brackets: passes and fails. "
        note += f"The {len(panels)} most frequent of {len(counted)} titles." if len(counted) > len(panels) else ""
        name = "F10_criteria_" + re.sub(r"\W+", "_", setting).strip("_")
        axes = ("training step (start of window)", "pass rate")
        figures.append(_figure(name, f"F10 · Pass rate per criterion, {setting}", axes, panels, notes=(note,)))
    nothing = _figure("F10_criteria", "F10 · Pass rate per criterion", ("", ""), (), "no run with a rubric")
    return figures or [nothing]


def _rate_of(title: str) -> Callable[[Sequence[StepNumbers]], float | None]:
    return lambda steps: total(s.by_title.get(title, Verdicts()) for s in steps).pass_rate


def _inert(data: _Data) -> Figure:
    series = data.lines(lambda run: _by_window(data.numbers[run.path], data.window, inert_share))
    title = "F11 · Inert share: rollouts whose surviving verdicts are unanimous or none"
    axes = ("training step (start of window)", "share of judged rollouts")
    panels = [_panel(series, "no run with a rubric")]
    return _figure("F11_inert_share", title, axes, panels, notes=(f"Windows of {data.window} steps.", data.seeds))


def _citations(data: _Data) -> Figure:
    series, notes = [], []
    for setting, cell in data.cells.items():
        counts: Counter[int] = Counter()
        for s in data.steps(cell):
            counts.update(s.citations)
        n = counts.total()
        if not n:
            continue
        shares = [counts[k] / n for k in range(10)] + [sum(v for k, v in counts.items() if k >= 10) / n]
        series.append(Series(setting, tuple(map(float, range(11))), tuple(shares)))
        ordered = sorted(counts.elements())
        cited = [k for k in ordered if k]
        notes.append(f"{setting}: mean {sum(ordered) / n:.2f} over all steps, {sum(cited) / len(cited):.2f} over "
                     f"cited ones, median {ordered[n // 2]}.")  # fmt: skip
    gap = "no run with step credit: no citations were asked for"
    panels = [_panel(series, gap, kind="bar", ticks=(*map(str, range(10)), "≥10"))]
    title = "F12 · Citations per step by surviving pass/fail verdicts"
    return _figure("F12_citations", title, ("citations", "share of steps"), panels, notes=notes)
