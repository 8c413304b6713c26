"""The numbers of figures F2–F12, from run folders. Nothing is interpolated; a panel without data says why."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from draco.core.llm.money import Prices
from draco.core.types import Termination
from draco.run.numbers import StepNumbers, Verdicts, archive_numbers, total, windows
from draco.study.figures import Figure, Panel, Series
from draco.study.rows import bases, by_setting, fault_notes, finals, splits
from draco.study.runs import Evaluation, Run
from draco.study.statistics import mean_std

__all__ = ["all_figures", "over_seeds"]

_Cost = Callable[[Evaluation], float | None]
_PHASES = ("propose_task", "propose_rollout", "merge", "score", "attribute")
_PANELS = 12  #: criteria shown in F10
_USUAL = "submitted"  #: how a rollout should end
_SMOOTH = 5  #: steps of the moving average that F4 and F7 draw of a run of at least four times as many


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
    cells = by_setting(trained)
    seeds = max((len(c) for c in cells.values()), default=0)
    note = "Line: mean over the seeds that have the step; band: lowest to highest of them." if seeds > 1 else ""
    return [
        _cost_success(cells, prices),
        _terminations(cells, numbers),
        _pass_rate(cells, numbers, note),
        _pass_k(cells),
        _frontier(runs, cells, prices),
        _train_success(cells, note),
        _judge_cost(cells, numbers),
        _judge_replay(trained),
        *_criteria(cells, numbers, window),
        _inert(cells, numbers, window, note),
        _citations(cells, numbers),
    ]


def over_seeds(label: str, curves: Sequence[Mapping[float, float]], **style: object) -> Series:
    """Mean over seeds at every x that any seed has; the band runs from the lowest to the highest of them."""
    xs = sorted(set().union(*curves)) if curves else []
    columns = [[c[x] for c in curves if x in c] for x in xs]
    means = tuple(sum(c) / len(c) for c in columns)
    if len(curves) < 2:
        return Series(label, tuple(xs), means, **style)  # type: ignore[arg-type]
    low, high = tuple(min(c) for c in columns), tuple(max(c) for c in columns)
    return Series(label, tuple(xs), means, low, high, **style)  # type: ignore[arg-type]


def _curve(steps: Sequence[StepNumbers], value: Callable[[StepNumbers], float | None]) -> dict[float, float]:
    # The archive counts batches from 0, every log from 1: the step after which the number holds.
    return {float(s.step + 1): v for s in steps if (v := value(s)) is not None}


def _scatter(split: str, rows: Mapping[str, Sequence[Evaluation]], cost: _Cost) -> Panel:
    """TGC against cost. A point is a mean over all evaluations of its name; whoever lacks one is named, not drawn."""
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
    gap = "" if series else "no evaluation has a cost; give prices=READ,WRITTEN here or to scripts/evaluate.py"
    return Panel(split + (f" ({without})" if series and without else ""), tuple(series), "scatter", gap=gap)


def _cost_success(cells: Mapping[str, list[Run]], prices: Prices | None) -> Figure:
    panels, said = [], list[str]()
    trained = [r for c in cells.values() for r in c]
    for split in splits(trained, base=True):
        rows = {"base": bases(trained, split)} | {s: finals(cell, split) for s, cell in cells.items()}
        panels.append(_scatter(split, rows, lambda e: e.cost_usd(prices)))
        said += fault_notes(split, rows)
    return Figure("F2_success_cost", "F2 · Success against the cost of evaluation", "USD for one run of every task",
                  "TGC", tuple(panels) or (_nothing("no evaluation"),), note=" ".join(said))  # fmt: skip


def _terminations(cells: Mapping[str, list[Run]], numbers: Mapping[Path, list[StepNumbers]]) -> Figure:
    panels, said, worst = [], list[str](), 0.0
    for setting, cell in cells.items():
        counts: dict[int, Counter[str]] = defaultdict(Counter)
        silent = 0
        for run in cell:
            for s in numbers[run.path]:
                known = {k: n for k, n in s.terminations.items() if k != Termination.UNKNOWN}
                counts[s.step + 1].update(known)
                silent += s.rollouts - sum(known.values())
        # The usual end on top: what goes wrong stands on the axis, where it can be read.
        kinds = sorted(sum(counts.values(), Counter()), key=lambda k: (k == _USUAL, k))
        xs = sorted(s for s in counts if counts[s].total())
        worst = max([worst, *(1 - counts[x][_USUAL] / counts[x].total() for x in xs)])
        series = [Series(k, tuple(map(float, xs)), tuple(counts[x][k] / counts[x].total() for x in xs)) for k in kinds]
        gap = "its log does not say how trajectories ended" if silent else "no archived step"
        panels.append(Panel(setting, tuple(series), "stack", gap="" if xs else gap))
        if silent and xs:
            said.append(f"{setting}: {silent} rollouts whose log does not say how they ended are left out.")
    end = 1.0 if not worst else next(m for m in (0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if 1.1 * worst <= m or m == 1.0)
    said += [] if end == 1 else [f"The axis ends at {end:.0%}: all other rollouts {_USUAL}."]
    return Figure("F3_terminations", "F3 · How training rollouts end", "training step", "share of rollouts",
                  tuple(panels) or (_nothing("no run"),), note=" ".join(said), y_max=end)  # fmt: skip


def _pass_rate(cells: Mapping[str, list[Run]], numbers: Mapping[Path, list[StepNumbers]], note: str) -> Figure:
    series, without, rescored = [], [], False
    for setting, cell in cells.items():
        curves = [_curve(numbers[r.path], lambda s: s.verdicts.pass_rate) for r in cell]
        if any(curves):
            series.append(over_seeds(setting, [c for c in curves if c]))
        else:
            without.append(setting)
        for folder in sorted({p for r in cell for p in r.path.glob("rescored/*")}):
            curve = _curve(archive_numbers(folder), lambda s: s.verdicts.pass_rate)
            if curve:
                label = f"{setting} (rollouts re-scored: {folder.name})"
                series.append(Series(label, tuple(curve), tuple(curve.values()), dotted=True, colour=setting))
                rescored = True
    said = [note] if note else []
    smooth, how = _smoothing(series)
    said += [how] if how else []
    said += [f"No rubric: {', '.join(without)}."] if without else []
    said += [] if rescored else ["No run was re-scored on a static set (scripts/rescore.py RUN --rubric static)."]
    panel = Panel("", tuple(series), gap="" if series else "no run with a rubric")
    return Figure("F4_pass_rate", "F4 · Pass rate of the training rubric", "training step",
                  "passes / (passes + fails)", (panel,), note=" ".join(said), smooth=smooth)  # fmt: skip


def _smoothing(series: Sequence[Series]) -> tuple[int, str]:
    """Width of the moving average to draw, and what to say of it."""
    if max((len(s.x) for s in series), default=0) < 4 * _SMOOTH:
        return 1, ""
    return _SMOOTH, f"Drawn: moving averages over {_SMOOTH} steps; the CSV has every step."


def _pass_k(cells: Mapping[str, list[Run]]) -> Figure:
    panels, said = [], list[str]()
    trained = [r for c in cells.values() for r in c]
    for split in splits(trained, base=True):
        groups = {"base": bases(trained, split)} | {s: finals(cell, split) for s, cell in cells.items()}
        for key, label in (
            ("tgc_pass_hat", "pass^k: all k runs succeed"),
            ("tgc_pass_at", "pass@k: at least one does"),
        ):
            series = []
            for setting, found in groups.items():
                curves = [{float(k): v for k, v in enumerate(e.content[key], 1) if v is not None} for e in found]
                if any(len(c) > 1 for c in curves):
                    series.append(over_seeds(setting, [c for c in curves if c]))
                    fewer = sum(len(c) < max(map(len, curves)) for c in curves)
                    if fewer and key == "tgc_pass_hat":
                        said.append(f"{setting}, {split}: {fewer} of {len(curves)} evaluations have fewer runs a task "
                                    "and are not in the points at larger k.")  # fmt: skip
            gap = "" if series else "every evaluation is of one run a task (n = 1); evaluate with n=3"
            panels.append(Panel(f"{split}, {label}", tuple(series), gap=gap))
    if any(s.low for p in panels for s in p.series):
        said.insert(0, "Line: mean over seeds and checkpoints; band: lowest to highest.")
    return Figure("F5_pass_k", "F5 · pass^k against pass@k", "k", "TGC",
                  tuple(panels) or (_nothing("no evaluation"),), note=" ".join(said))  # fmt: skip


def _frontier(runs: Sequence[Run], cells: Mapping[str, list[Run]], prices: Prices | None) -> Figure:
    models = [r for r in runs if not r.trained]
    title = "F6 · Frontier models and trained policies by cost"
    if not models:
        gap = "no frontier model was evaluated (scripts/evaluate.py policy=litellm model=… out=FOLDER)"
        return Figure("F6_frontier", title, "USD a task", "TGC", (_nothing(gap),))
    panels, said = [], list[str]()

    def a_task(e: Evaluation) -> float | None:
        usd, tasks = e.cost_usd(prices), e.content["tasks"]
        return usd / tasks if usd is not None and tasks else None

    for split in splits(models):
        rows = {s: finals(cell, split) for s, cell in {**by_setting(models), **cells}.items()}
        panels.append(_scatter(split, rows, a_task))
        said += fault_notes(split, rows)
    return Figure("F6_frontier", title, "USD a task", "TGC", tuple(panels), note=" ".join(said))


def _train_success(cells: Mapping[str, list[Run]], note: str) -> Figure:
    series = []
    for setting, cell in cells.items():
        curves = [{float(s + 1): good / known for s, (good, known) in r.train_success.items()} for r in cell]
        if any(curves):
            series.append(over_seeds(setting, [c for c in curves if c]))
    panel = Panel("", tuple(series), gap="" if series else "no train_success.csv: the environment has no evaluator")
    title = "F7 · Success on training tasks (after the fact; never a reward)"
    smooth, how = _smoothing(series)
    return Figure("F7_train_success", title, "training step", "share of rollouts", (panel,),
                  note=" ".join(t for t in (note, how) if t), smooth=smooth)  # fmt: skip


def _judge_cost(cells: Mapping[str, list[Run]], numbers: Mapping[Path, list[StepNumbers]]) -> Figure:
    judged = {s: c for s, c in cells.items() if any(n.calls for r in c for n in numbers[r.path])}
    if not judged:
        return Figure("F8_judge_cost", "F8 · What judging costs", "", "", (_nothing("no run with a judge"),), False)
    ticks = tuple(judged)
    seen = {p for c in judged.values() for r in c for n in numbers[r.path] for p in n.calls}
    phases = [*(p for p in _PHASES if p in seen), *sorted(seen - {*_PHASES})]
    usd: dict[str, list[float | None]] = {p: [] for p in phases}
    tokens: dict[str, list[float]] = {p: [] for p in phases}
    points, unsolved = [], list[str]()
    for setting, cell in judged.items():
        for phase in phases:
            parts = [n.calls[phase] for r in cell for n in numbers[r.path] if phase in n.calls]
            costs = [p.usd for p in parts]
            usd[phase].append(None if None in costs else sum(c for c in costs if c is not None) / len(cell))
            tokens[phase].append(sum(p.tokens for p in parts) / len(cell) / 1e6)
        bill = [usd[p][-1] for p in phases]
        success = mean_std(e.figure("tgc") for split in splits(cell)[:1] for e in finals(cell, split))
        if success is None or success.missing:
            unsolved.append(setting)
        elif None not in bill:
            points.append(Series(setting, (sum(b for b in bill if b is not None),), (success.mean,)))
    unknown = any(v is None for column in usd.values() for v in column)
    free = not unknown and not any(v for column in usd.values() for v in column)
    gap = "a call had no known price" if unknown else "every call was free (scripted judge)" if free else ""
    xs = tuple(float(i) for i in range(len(ticks)))
    bars = tuple(Series(p, xs, tuple(v or 0.0 for v in usd[p])) for p in phases if not gap)
    amounts = tuple(Series(p, xs, tuple(tokens[p])) for p in phases)
    panels = (
        Panel("USD a run", bars, "pile", ticks, gap),
        Panel("million tokens a run", amounts, "pile", ticks),
        Panel("TGC (y) against USD a run (x)", () if gap else tuple(points), "scatter", gap=gap),
    )
    note = f"Without a point, for an evaluation has no TGC: {', '.join(unsolved)}." if unsolved and not gap else ""
    title = "F8 · What judging costs, by phase, and against success"
    return Figure("F8_judge_cost", title, "", "", panels, False, note)


def _judge_replay(runs: Sequence[Run]) -> Figure:
    panels = []
    for run in runs:
        for file in sorted(run.path.glob("judge_replay/*/summary.json")):
            content = json.loads(file.read_text(encoding="utf-8"))
            rows = content["windows"]
            names = (("agreement", "agreement"), ("all_pass_baseline", "all-pass baseline"),
                     ("false_pass", "false pass"),
                     ("false_fail", "false fail"), ("recall", "criteria recall"),
                     ("precision", "criteria precision"), ("model_recall", "criteria recall, by a model"),
                     ("model_precision", "criteria precision, by a model"),
                     ("cited_recall", "recall of cited steps"),
                     ("cited_precision", "precision of cited steps"))  # fmt: skip
            series = []
            for key, label in names:
                points = [(float(r["first_step"] + 1), r[key]) for r in rows if r.get(key) is not None]
                if points:
                    series.append(Series(label, tuple(x for x, _ in points), tuple(y for _, y in points)))
            panels.append(Panel(f"{run.path.name}, judged again by {content['judge']}", tuple(series)))
    gap = "no judge was replayed (scripts/replay_judge.py RUN --judge …)"
    return Figure("F9_judge_replay", "F9 · The same calls, judged again", "training step (start of window)", "share",
                  tuple(panels) or (_nothing(gap),))  # fmt: skip


def _criteria(cells: Mapping[str, list[Run]], numbers: Mapping[Path, list[StepNumbers]], window: int) -> list[Figure]:
    figures = []
    for setting, cell in cells.items():
        counted: Counter[str] = Counter()
        for run in cell:
            for s in numbers[run.path]:
                counted.update({t: v.passes + v.fails for t, v in s.by_title.items()})
        if not counted:
            continue
        panels = []
        steps = [s for r in cell for s in numbers[r.path]]
        for title, _ in counted.most_common(_PANELS):
            points = []
            for w in windows(steps, window):
                found = total(s.by_title.get(title, Verdicts()) for s in w)
                if found.pass_rate is not None:
                    points.append((float(w[0].step // window * window + 1), found.pass_rate))
            line = Series("pass rate", tuple(x for x, _ in points), tuple(y for _, y in points))
            panels.append(Panel(f"{title} ({counted[title]})", (line,)))
        note = f"Windows of {window} steps. In brackets: passes and fails. "
        note += f"The {len(panels)} most frequent of {len(counted)} titles." if len(counted) > len(panels) else ""
        figures.append(
            Figure(
                "F10_criteria_" + re.sub(r"\W+", "_", setting).strip("_"),
                f"F10 · Pass rate per criterion, {setting}",
                "training step (start of window)",
                "pass rate",
                tuple(panels),
                note=note,
            )
        )
    return figures or [
        Figure("F10_criteria", "F10 · Pass rate per criterion", "", "", (_nothing("no run with a rubric"),))
    ]


def _inert(cells: Mapping[str, list[Run]], numbers: Mapping[Path, list[StepNumbers]], window: int, note: str) -> Figure:
    series = []
    for setting, cell in cells.items():
        curves = []
        for run in cell:
            curve = {}
            for w in windows(numbers[run.path], window):
                known = [s for s in w if s.inert is not None and s.members]
                if known:
                    share = sum(s.inert or 0 for s in known) / sum(s.members for s in known)
                    curve[float(w[0].step // window * window + 1)] = share
            if curve:
                curves.append(curve)
        if curves:
            series.append(over_seeds(setting, curves))
    panel = Panel("", tuple(series), gap="" if series else "no run with a rubric")
    return Figure("F11_inert_share", "F11 · Inert share: rollouts whose surviving verdicts are unanimous or none",
                  "training step (start of window)", "share of judged rollouts", (panel,),
                  note=" ".join(t for t in (f"Windows of {window} steps.", note) if t))  # fmt: skip


def _citations(cells: Mapping[str, list[Run]], numbers: Mapping[Path, list[StepNumbers]]) -> Figure:
    ticks = (*map(str, range(10)), "≥10")
    series, said = [], []
    for setting, cell in cells.items():
        counts: Counter[int] = Counter()
        for run in cell:
            for s in numbers[run.path]:
                counts.update(s.citations)
        whole = counts.total()
        if not whole:
            continue
        shares = [counts[k] / whole for k in range(10)] + [sum(v for k, v in counts.items() if k >= 10) / whole]
        series.append(Series(setting, tuple(float(i) for i in range(11)), tuple(shares)))
        ordered = sorted(counts.elements())
        cited = [k for k in ordered if k]
        said.append(f"{setting}: mean {sum(ordered) / whole:.2f} over all steps, {sum(cited) / len(cited):.2f} over "
                    f"cited ones, median {ordered[whole // 2]}.")  # fmt: skip
    gap = "no run with step credit: no citations were asked for"
    panel = Panel("", tuple(series), "bar", ticks, "" if series else gap)
    title = "F12 · Citations per step by surviving pass/fail verdicts"
    return Figure("F12_citations", title, "citations", "share of steps",
                  (panel,), note=" ".join(said))  # fmt: skip


def _nothing(why: str) -> Panel:
    return Panel("", (), gap=why)
