"""Tables T2–T9. A figure that nobody measured is an empty cell, and a note says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from draco.core.llm.money import Prices
from draco.core.table import Cell, Table
from draco.study.runs import Evaluation, Run
from draco.study.settings import by_setting, evaluations, fault_notes, finals, many, splits
from draco.study.statistics import Spread, mean_std, paired_bootstrap, task_means

__all__ = ["all_tables", "write_table"]

Rows = Sequence[tuple[str, Sequence[Spread | None]]]  #: (name of the row, a spread a column)


@dataclass(frozen=True, slots=True)
class _Column:
    """One figure of an evaluation file, on one split."""

    name: str
    split: str
    read: Callable[[Evaluation], float | None]


def write_table(table: Table, folder: Path) -> None:
    """NAME.csv and NAME.md."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{table.name}.csv").write_text(table.csv(), encoding="utf-8")
    notes = "\n".join(f"- {note}" for note in table.notes)
    parts = [p for p in (table.markdown(), notes) if p]
    (folder / f"{table.name}.md").write_text("\n".join([f"**{table.title}**\n", *parts]) + "\n", encoding="utf-8")


def all_tables(runs: Sequence[Run], prices: Prices | None = None) -> list[Table]:
    """Every table; one without any figure says so.

    Args:
        runs: run folders, and folders of evaluation files for frontier rows.
        prices: see `Evaluation.cost_usd`.
    """
    trained = [r for r in runs if r.trained]
    spread = "by setting, mean ± std over checkpoints and seeds"
    return [
        _success(trained, "T2_success", "T2 · Success by setting", spread=False),
        _turns(trained, "T3_turns", "T3 · Turns by setting", spread=False),
        _success(trained, "T4_success_std", f"T4 · Success {spread}", spread=True),
        _turns(trained, "T5_turns_std", f"T5 · Turns {spread}", spread=True),
        _difficulty(trained),
        _self_judge(trained),
        _models(runs, prices),
        _differences(trained),
    ]


def _rows(runs: Sequence[Run], columns: Sequence[_Column]) -> Rows:
    """One row a setting; the untrained policy first, where it was evaluated."""
    found = {split: evaluations(runs, split) for split in splits(runs)}
    names = ["base", *by_setting(runs)]
    rows = [(name, [mean_std(map(c.read, found[c.split][name])) for c in columns]) for name in names]
    return [(name, spreads) for name, spreads in rows if name != "base" or any(spreads)]


def _hat(kind: str, k: int) -> Callable[[Evaluation], float | None]:
    def read(e: Evaluation) -> float | None:
        curve: list[float | None] = e.content.get(f"{kind}_pass_hat") or []
        return curve[k - 1] if k <= len(curve) else None

    return read


def _success(runs: Sequence[Run], name: str, title: str, *, spread: bool) -> Table:
    columns: list[_Column] = []
    for split in splits(runs):
        # An environment without scenarios has one success rate.
        grouped = any(e.content.get("scenarios") != e.content.get("tasks") for e in finals(runs, split))
        kinds = (("tgc", "TGC"), ("sgc", "SGC")) if grouped else (("tgc", "SR"),)
        columns += [_Column(f"{split} {label} p{k}", split, _hat(kind, k)) for kind, label in kinds for k in (1, 2, 3)]
    about = "pN = pass^N, the chance that N independent runs of a task all succeed. Faulted rollouts count as failed."
    average = "average = mean over the row's columns; a row with a gap has none."
    return _table(runs, columns, name, title, about, scale=100.0 if spread else None, end=(average,))


def _turns(runs: Sequence[Run], name: str, title: str, *, spread: bool) -> Table:
    columns = [_Column(split, split, lambda e: e.figure("turns")) for split in splits(runs)]
    about, scale = "Mean agent turns a rollout.", 1.0 if spread else None
    return _table(runs, columns, name, title, about, scale=scale, form="{:.1f}")


def _table(
    runs: Sequence[Run], columns: Sequence[_Column], name: str, title: str, about: str, *, scale: float | None,
    form: str = "{:.1%}", end: Sequence[str] = (),
) -> Table:  # fmt: skip
    """Rows by setting: `mean ± std` times `scale`, or without it means in `form` and their average."""
    rows, names = _rows(runs, columns), [c.name for c in columns]
    if not rows:
        return Table(name, title, ("setting",), (), notes=("No evaluation of a trained policy is there.",))
    notes = [about, *_counts(runs), *_gaps(rows, names)]
    cells: list[tuple[Cell, ...]]
    if scale is None:
        cells = [(row, *map(_mean, spreads), _average(spreads)) for row, spreads in rows]
        names, notes = [*names, "average"], [*notes, *end]
    else:
        cells = [(row, *(s.shown(scale) if s else None for s in spreads)) for row, spreads in rows]
        notes += _single(rows, names)
    return Table(name, title, ("setting", *names), tuple(cells), form, tuple(notes))


def _difficulty(runs: Sequence[Run]) -> Table:
    name, title = "T6_difficulty", "T6 · Success by difficulty"
    columns: list[_Column] = []

    def at(key: str, level: str) -> Callable[[Evaluation], float | None]:
        return lambda e: (e.content.get(key) or {}).get(level)

    for split in splits(runs):
        for key, label in (("tgc_by_difficulty", "TGC"), ("sgc_by_difficulty", "SGC")):
            levels = sorted({level for e in finals(runs, split) for level in (e.content.get(key) or {})})
            if len(levels) > 1:  # an environment without difficulties has one level
                columns += [_Column(f"{split} {label} level {level}", split, at(key, level)) for level in levels]
    if not columns:
        return Table(name, title, ("setting",), (), notes=("No evaluation names difficulties.",))
    rows, names = _rows(runs, columns), [c.name for c in columns]
    cells = tuple((row, *map(_mean, spreads)) for row, spreads in rows)
    return Table(name, title, ("setting", *names), cells, notes=(*_counts(runs), *_gaps(rows, names)))


def _self_judge(runs: Sequence[Run]) -> Table:
    name, title = "T7_self_judge", "T7 · Who judges"
    kinds = sorted({(r.setting, r.judge) for r in runs if r.judge})
    if not any(judge.startswith("self") for _, judge in kinds):
        note = "No run was judged by its own policy (rubric=self_judge), so there is nothing to compare."
        return Table(name, title, ("setting", "judge"), (), notes=(note,))
    columns = [
        _Column(f"{split} {label} p1", split, _hat(kind, 1))
        for split in splits(runs)
        for kind, label in (("tgc", "TGC"), ("sgc", "SGC"))
    ]
    found = []
    for setting, judge in kinds:
        cell = [r for r in runs if (r.setting, r.judge) == (setting, judge)]
        found.append((setting, judge, [mean_std(map(c.read, finals(cell, c.split))) for c in columns]))
    names = [c.name for c in columns]
    gaps = _gaps([(f"{setting}, judged by {judge}", spreads) for setting, judge, spreads in found], names)
    rows = tuple((setting, judge, *map(_mean, spreads)) for setting, judge, spreads in found)
    return Table(name, title, ("setting", "judge", *names), rows, notes=(*_counts(runs), *gaps))


def _models(runs: Sequence[Run], prices: Prices | None) -> Table:
    columns = ("model", "split", "TGC", "SGC", "turns", "cost of one pass (USD)", "cost a task (USD)")
    rows: list[tuple[Cell, ...]] = []
    faults: list[str] = []
    gaps: list[tuple[str, list[Spread | None]]] = []
    for split in splits(runs, base=True):
        rows_of = evaluations(runs, split)
        faults += fault_notes(split, rows_of)
        for model, found in rows_of.items():
            if not found:
                continue
            figures = [mean_std(e.figure(key) for e in found) for key in ("tgc", "sgc", "turns")]
            cost = mean_std(e.cost_usd(prices) for e in found)
            usd = cost.mean if cost and not cost.missing else None
            tasks = found[0].content.get("tasks") or 0
            gaps.append((f"{model}, {split}", figures))
            rows.append((model, split, *map(_mean, figures), usd, usd / tasks if usd is not None and tasks else None))
    notes = ["The cost is that of one run of every task, at the prices that the evaluation was given."]
    notes += [*faults, *_gaps(gaps, columns[2:5]), *_scaffolds(runs)]
    if any(row[5] is None for row in rows):
        notes.append("No cost: an evaluation counted no tokens, or no prices were given (prices=READ,WRITTEN).")
    if all(r.trained for r in runs):
        notes.append("No frontier model was evaluated (draco evaluate policy=litellm … out=FOLDER; pass FOLDER too).")
    forms = {"turns": "{:.1f}", columns[5]: "{:.4g}", columns[6]: "{:.3g}"}
    title = "T8 · Models: success and the cost of evaluating them"
    return Table("T8_models", title, columns, tuple(rows), notes=tuple(notes), forms=forms)


def _differences(runs: Sequence[Run]) -> Table:
    """Beyond the paper: every setting against the ones before it, on the same tasks."""
    name, title = "T9_differences", "T9 · Differences on the same tasks, with 95% paired-bootstrap intervals"
    columns = ("split", "setting", "against", "difference in TGC (points)", "low", "high", "tasks")
    rows: list[tuple[Cell, ...]] = []
    notes = [
        "Tasks are drawn with replacement, both settings together (10,000 draws); success is averaged over seeds, "
        "checkpoints and runs of a task first."
    ]
    for split in splits(runs):
        found = evaluations(runs, split)
        means = {row: pooled for row, evaluated in found.items() if (pooled := _pooled(evaluated))}
        notes += fault_notes(split, {row: found[row] for row in means})
        names = list(means)
        for i, one in enumerate(names):
            for other in names[i + 1 :]:
                d = paired_bootstrap(means[one], means[other])
                rows.append((split, other, one, *(100 * v for v in (d.mean, d.low, d.high)), float(d.tasks)))
                if d.only_one:
                    notes.append(f"{split}, {other} against {one}: {many(d.only_one, 'task')} in one of them only.")
    if not rows:
        return Table(name, title, columns, (), notes=("Fewer than two settings are there.",))
    return Table(name, title, columns, tuple(rows), "{:+.1f}", tuple(notes), {"tasks": "{:.0f}"})


def _pooled(found: Sequence[Evaluation]) -> dict[str, float]:
    """Success by task, over all evaluations."""
    by_task: dict[str, list[float]] = {}
    for e in found:
        for task, mean in task_means(e.content.get("records", ())).items():
            by_task.setdefault(task, []).append(mean)
    return {t: sum(v) / len(v) for t, v in by_task.items()}


def _mean(spread: Spread | None) -> float | None:
    return spread.mean if spread else None


def _average(spreads: Sequence[Spread | None]) -> float | None:
    known = [s.mean for s in spreads if s]
    return sum(known) / len(known) if known and len(known) == len(spreads) else None


# -- notes -------------------------------------------------------------------------------------------------------------


def _counts(runs: Sequence[Run]) -> list[str]:
    """How many seeds and checkpoints a row averages (rows alike in one note), its faults, and how τ-bench was run."""
    alike: dict[str, list[str]] = {}
    faults: list[str] = []
    tau: dict[str, None] = {}
    for setting, cell in by_setting(runs).items():
        for split in splits(cell):
            found = finals(cell, split)
            counts = f"{many(len({r.seed for r in cell}), 'seed')}, {many(len(found), 'checkpoint')}"
            alike.setdefault(f"{split}: {counts} in all, n = {found[0].n}", []).append(setting)
            faults += fault_notes(split, {setting: found})
            tau |= {_tau_setup(e): None for e in found if "tau2" in e.content}
    lines = [f"{text} ({', '.join(settings)})." for text, settings in alike.items()]
    return [*lines, *_base_counts(runs), *faults, *tau, *_scaffolds(runs)]


def _base_counts(runs: Sequence[Run]) -> list[str]:
    """How many evaluations the base row averages; different n are named, because all weigh alike."""
    said = []
    for split in splits(runs):
        if not (found := evaluations(runs, split)["base"]):
            continue
        numbers = sorted({e.n for e in found})
        text = f"{split}: {many(len(found), 'evaluation')}, n = {' and '.join(map(str, numbers))} (base)."
        if len(numbers) > 1:
            text += " Evaluations of different n weigh alike in it."
        said += [text, *fault_notes(split, {"base": found})]
    return said


def _tau_setup(e: Evaluation) -> str:
    """tau2's version and retrieval, without which its scores compare with nothing."""
    version = (e.content.get("tau2") or {}).get("version") or "tau2 of unknown version"
    retrieval, user, turns = (e.content.get(k, "not recorded") for k in ("retrieval", "user", "max_turns"))
    return (
        f"{e.split}: {version}, retrieval {retrieval or 'none'}, user simulator {user}, at most {turns} agent turns; "
        "infrastructure errors and missing simulations are failures."
    )


def _scaffolds(runs: Sequence[Run]) -> list[str]:
    """Which agents ran, where the evaluations say."""
    named = sorted({str(e.content["scaffold"]) for r in runs for e in r.evaluations if e.content.get("scaffold")})
    return [f"Agent that ran: {name}." for name in named]


def _gaps(rows: Rows, columns: Sequence[str]) -> list[str]:
    """Cells that nobody measured, and those that are means over a part of their evaluations."""
    missing: dict[str, list[str]] = {}
    partial: dict[str, list[str]] = {}
    for name, spreads in rows:
        for column, spread in zip(columns, spreads, strict=True):
            if spread is None:
                missing.setdefault(name, []).append(column)
            elif spread.missing:
                partial.setdefault(name, []).append(f"{column} ({many(spread.missing, 'evaluation')} without it)")
    return [
        *(f"Not measured for {name}: {', '.join(cells)}." for name, cells in missing.items()),
        *(f"Over a part of the evaluations of {name}: {', '.join(cells)}." for name, cells in partial.items()),
    ]


def _single(rows: Rows, columns: Sequence[str]) -> list[str]:
    """Cells without a std, row by row; of a row that has none at all only the name."""
    alone: list[str] = []
    for name, spreads in rows:
        known = [(c, s) for c, s in zip(columns, spreads, strict=True) if s is not None]
        single = [c for c, s in known if s.std is None]
        if single:
            alone.append(name if len(single) == len(known) else f"{name} ({', '.join(single)})")
    return [f"One value only, so no std: {', '.join(alone)}."] if alone else []
