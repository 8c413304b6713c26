"""Tables T2–T8 as numbers, CSV and Markdown. A figure that nobody measured is an empty cell and a stated gap."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from draco.core.llm.money import Prices
from draco.study.rows import bases, by_setting, fault_notes, finals, many, splits
from draco.study.runs import Evaluation, Run
from draco.study.statistics import Spread, mean_std, paired_bootstrap, task_means

__all__ = ["Table", "all_tables", "write_table"]

Cell = float | str | None


@dataclass(frozen=True, slots=True)
class Table:
    """One table; numbers stay numbers."""

    name: str  #: of its files
    title: str
    columns: tuple[str, ...]  #: the first one names the row
    rows: tuple[tuple[Cell, ...], ...]
    form: str = "{:.1%}"  #: of a number in Markdown; CSV holds it in full
    notes: tuple[str, ...] = ()  #: what the figures are, and the gaps
    forms: dict[str, str] = field(default_factory=dict)  #: columns that are shown otherwise


def write_table(table: Table, folder: Path) -> None:
    """NAME.csv and NAME.md."""
    folder.mkdir(parents=True, exist_ok=True)
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(table.columns)
    writer.writerows(["" if c is None else c for c in row] for row in table.rows)
    (folder / f"{table.name}.csv").write_text(text.getvalue(), encoding="utf-8")
    lines = [f"**{table.title}**", ""]
    if table.rows:
        lines += ["| " + " | ".join(table.columns) + " |", "|---" * len(table.columns) + "|"]
        forms = [table.forms.get(c, table.form) for c in table.columns]
        lines += ["| " + " | ".join(_shown(c, f) for c, f in zip(row, forms, strict=True)) + " |" for row in table.rows]
        lines.append("")
    lines += [f"- {note}" for note in table.notes]
    (folder / f"{table.name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _shown(cell: Cell, form: str) -> str:
    if cell is None:
        return "–"
    return cell.replace("|", "\\|").replace("\n", " ") if isinstance(cell, str) else form.format(cell)


#: a figure of an evaluation file: (column, reader)
Reader = Callable[[Evaluation], float | None]


def all_tables(runs: Sequence[Run], prices: Prices | None = None) -> list[Table]:
    """Every table; one without any figure says so.

    Args:
        runs: run folders, and folders of evaluation files for frontier rows.
        prices: of the policy's tokens; see `Evaluation.cost_usd`.
    """
    trained = [r for r in runs if r.trained]
    return [
        _success(trained, "T2_success", "T2 · Success by setting", spread=False),
        _turns(trained, "T3_turns", "T3 · Turns by setting", spread=False),
        _success(
            trained, "T4_success_std", "T4 · Success by setting, mean ± std over checkpoints and seeds", spread=True
        ),
        _turns(trained, "T5_turns_std", "T5 · Turns by setting, mean ± std over checkpoints and seeds", spread=True),
        _difficulty(trained),
        _self_judge(trained),
        _models(runs, prices),
        _differences(trained),
    ]


def _hat(kind: str, k: int) -> Reader:
    def read(e: Evaluation) -> float | None:
        curve: list[float | None] = e.content.get(f"{kind}_pass_hat") or []
        return curve[k - 1] if k <= len(curve) else None

    return read


def _rows(runs: Sequence[Run], readers: Sequence[tuple[str, str, Reader]]) -> list[tuple[str, list[Spread | None]]]:
    """One row a setting, the untrained policy first: [(name, spreads by reader)]. A reader is (column, split, read)."""
    rows: list[tuple[str, list[Spread | None]]] = []
    base = [mean_std(read(e) for e in bases(runs, split)) for _, split, read in readers]
    if any(base):
        rows.append(("base", base))
    for setting, cell in by_setting(runs).items():
        rows.append((setting, [mean_std(read(e) for e in finals(cell, split)) for _, split, read in readers]))
    return rows


def _success(runs: Sequence[Run], name: str, title: str, *, spread: bool) -> Table:
    readers: list[tuple[str, str, Reader]] = []
    for split in splits(runs):
        # An environment without scenarios has one success rate.
        grouped = any(e.content.get("scenarios") != e.content.get("tasks") for e in finals(runs, split))
        kinds = (("tgc", "TGC"), ("sgc", "SGC")) if grouped else (("tgc", "SR"),)
        readers += [(f"{split} {label} p{k}", split, _hat(kind, k)) for kind, label in kinds for k in (1, 2, 3)]
    rows = _rows(runs, readers)
    columns = [c for c, _, _ in readers]
    notes = [
        "pN = pass^N, the chance that N independent runs of a task all succeed. Faulted rollouts count as failed.",
        *_counts(runs),
        *_gaps(rows, columns),
    ]
    if not rows:
        return Table(name, title, ("setting",), (), notes=("No evaluation of a trained policy is there.",))
    if spread:
        cells = tuple((n, *(_plus_minus(s) for s in spreads)) for n, spreads in rows)
        return Table(name, title, ("setting", *columns), cells, notes=(*notes, *_single(rows, columns)))
    means = tuple((n, *(s.mean if s else None for s in spreads), _average(spreads)) for n, spreads in rows)
    notes.append("average = mean over the row's columns; a row with a gap has none.")
    return Table(name, title, ("setting", *columns, "average"), means, notes=tuple(notes))


def _turns(runs: Sequence[Run], name: str, title: str, *, spread: bool) -> Table:
    readers: list[tuple[str, str, Reader]] = [(split, split, lambda e: e.figure("turns")) for split in splits(runs)]
    rows = _rows(runs, readers)
    columns = [c for c, _, _ in readers]
    if not rows:
        return Table(name, title, ("setting",), (), notes=("No evaluation of a trained policy is there.",))
    notes = ["Mean agent turns a rollout.", *_counts(runs), *_gaps(rows, columns)]
    form = "{:.1f}"
    if spread:
        cells = tuple((n, *(_plus_minus(s, 1.0) for s in spreads)) for n, spreads in rows)
        return Table(name, title, ("setting", *columns), cells, form, (*notes, *_single(rows, columns)))
    means = tuple((n, *(s.mean if s else None for s in spreads), _average(spreads)) for n, spreads in rows)
    return Table(name, title, ("setting", *columns, "average"), means, form, tuple(notes))


def _difficulty(runs: Sequence[Run]) -> Table:
    name, title = "T6_difficulty", "T6 · Success by difficulty"
    readers: list[tuple[str, str, Reader]] = []

    def at(key: str, level: str) -> Reader:
        return lambda e: (e.content.get(key) or {}).get(level)

    for split in splits(runs):
        found = finals(runs, split)
        for key, label in (("tgc_by_difficulty", "TGC"), ("sgc_by_difficulty", "SGC")):
            levels = sorted({level for e in found for level in (e.content.get(key) or {})})
            if len(levels) < 2:
                continue  # an environment without difficulties has one level
            readers += [(f"{split} {label} level {level}", split, at(key, level)) for level in levels]
    rows = _rows(runs, readers)
    if not readers:
        return Table(name, title, ("setting",), (), notes=("No evaluation names difficulties.",))
    columns = [c for c, _, _ in readers]
    cells = tuple((n, *(s.mean if s else None for s in spreads)) for n, spreads in rows)
    return Table(name, title, ("setting", *columns), cells, notes=(*_counts(runs), *_gaps(rows, columns)))


def _self_judge(runs: Sequence[Run]) -> Table:
    name, title = "T7_self_judge", "T7 · Who judges"
    judged = [r for r in runs if r.judge]
    if not any(r.judge.startswith("self") for r in judged):
        note = "No run was judged by its own policy (rubric=self_judge), so there is nothing to compare."
        return Table(name, title, ("setting", "judge"), (), notes=(note,))
    kinds = sorted({(r.setting, r.judge) for r in judged})
    columns = [f"{split} {label} p1" for split in splits(runs) for label in ("TGC", "SGC")]
    found: list[tuple[str, str, list[Spread | None]]] = []
    for setting, judge in kinds:
        cell = [r for r in judged if (r.setting, r.judge) == (setting, judge)]
        spreads = [
            mean_std(_hat(kind, 1)(e) for e in finals(cell, split)) for split in splits(runs) for kind in ("tgc", "sgc")
        ]
        found.append((setting, judge, spreads))
    rows = tuple((setting, judge, *(s.mean if s else None for s in spreads)) for setting, judge, spreads in found)
    gaps = _gaps([(f"{setting}, judged by {judge}", spreads) for setting, judge, spreads in found], columns)
    return Table(name, title, ("setting", "judge", *columns), rows, notes=(*_counts(runs), *gaps))


def _models(runs: Sequence[Run], prices: Prices | None) -> Table:
    name, title = "T8_models", "T8 · Models: success and the cost of evaluating them"
    columns = ("model", "split", "TGC", "SGC", "turns", "cost of one pass (USD)", "cost a task (USD)")
    rows: list[tuple[Cell, ...]] = []
    faults: list[str] = []
    gaps: list[tuple[str, list[Spread | None]]] = []
    for split in splits(runs, base=True):
        found = {"base": bases([r for r in runs if r.trained], split)}
        found |= {setting: finals(cell, split) for setting, cell in by_setting(runs).items()}
        faults += fault_notes(split, found)
        for model, evaluations in found.items():
            if not evaluations:
                continue
            figures = [mean_std(e.figure(key) for e in evaluations) for key in ("tgc", "sgc", "turns")]
            cost = mean_std(e.cost_usd(prices) for e in evaluations)
            usd = cost.mean if cost and not cost.missing else None
            tasks = evaluations[0].content.get("tasks") or 0
            gaps.append((f"{model}, {split}", figures))
            means = (f.mean if f else None for f in figures)
            rows.append((model, split, *means, usd, usd / tasks if usd is not None and tasks else None))
    notes = ["The cost is that of one run of every task, at the prices that the evaluation was given."]
    notes += [*faults, *_gaps(gaps, columns[2:5]), *_scaffolds(runs)]
    if any(row[5] is None for row in rows):
        notes.append("No cost: an evaluation counted no tokens, or no prices were given (prices=READ,WRITTEN).")
    if not any(not r.trained for r in runs):
        notes.append(
            "No frontier model was evaluated (scripts/evaluate.py policy=litellm … out=FOLDER; pass FOLDER too)."
        )
    forms = {"turns": "{:.1f}", columns[5]: "{:.4g}", columns[6]: "{:.3g}"}
    return Table(name, title, columns, tuple(rows), notes=tuple(notes), forms=forms)


def _differences(runs: Sequence[Run]) -> Table:
    """Beyond the paper: every setting against the first, on the same tasks."""
    name, title = "T9_differences", "T9 · Differences on the same tasks, with 95% paired-bootstrap intervals"
    columns = ("split", "setting", "against", "difference in TGC (points)", "low", "high", "tasks")
    rows: list[tuple[Cell, ...]] = []
    notes = ["Tasks are drawn with replacement, both settings together (10,000 draws); success is averaged over seeds, "
             "checkpoints and runs of a task first."]  # fmt: skip
    for split in splits(runs):
        found = {"base": bases(runs, split)} | {s: finals(cell, split) for s, cell in by_setting(runs).items()}
        means = {name: pooled for name, evaluations in found.items() if (pooled := _pooled(evaluations))}
        notes += fault_notes(split, {name: found[name] for name in means})
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


def _pooled(evaluations: Sequence[Evaluation]) -> dict[str, float]:
    by_task: dict[str, list[float]] = {}
    for e in evaluations:
        for task, mean in task_means(e.content.get("records", ())).items():
            by_task.setdefault(task, []).append(mean)
    return {t: sum(v) / len(v) for t, v in by_task.items()}


def _average(spreads: Sequence[Spread | None]) -> float | None:
    known = [s.mean for s in spreads if s]
    return sum(known) / len(known) if known and len(known) == len(spreads) else None


def _plus_minus(spread: Spread | None, scale: float = 100.0) -> str | None:
    if spread is None:
        return None
    mean = f"{scale * spread.mean:.1f}"
    return mean if spread.std is None else f"{mean} ± {scale * spread.std:.1f}"


def _counts(runs: Sequence[Run]) -> list[str]:
    """What stands behind the rows, settings with the same said once; faults of each; how a τ-bench was run."""
    same: dict[str, list[str]] = {}
    said: list[str] = []
    tau: dict[str, None] = {}
    for setting, cell in by_setting(runs).items():
        for split in splits(cell):
            found = finals(cell, split)
            seeds, checkpoints = len({r.seed for r in cell}), len(found)
            kinds = f"{seeds} seed{'s' * (seeds > 1)}, {checkpoints} checkpoint{'s' * (checkpoints > 1)} in all"
            same.setdefault(f"{split}: {kinds}, n = {found[0].n}", []).append(setting)
            said += fault_notes(split, {setting: found})
            tau |= {_tau_setup(e): None for e in found if "tau2" in e.content}
    return [
        *(f"{text} ({', '.join(who)})." for text, who in same.items()),
        *_base_counts(runs),
        *said,
        *tau,
        *_scaffolds(runs),
    ]


def _tau_setup(e: Evaluation) -> str:
    """tau2's version and retrieval, without which its scores compare with nothing."""
    version = (e.content.get("tau2") or {}).get("version") or "tau2 of unknown version"
    retrieval, user, turns = (e.content.get(k, "not recorded") for k in ("retrieval", "user", "max_turns"))
    return (
        f"{e.split}: {version}, retrieval {retrieval or 'none'}, user simulator {user}, at most {turns} agent turns; "
        "infrastructure errors and missing simulations are failures."
    )


def _scaffolds(runs: Sequence[Run]) -> list[str]:
    """Which agents played, where the evaluations say."""
    named = sorted({str(e.content["scaffold"]) for r in runs for e in r.evaluations if e.content.get("scaffold")})
    return [f"Agent that ran: {name}." for name in named]


def _gaps(rows: Sequence[tuple[str, Sequence[Spread | None]]], columns: Sequence[str]) -> list[str]:
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


def _single(rows: Sequence[tuple[str, Sequence[Spread | None]]], columns: Sequence[str]) -> list[str]:
    """Cells without a std, row by row; a row that has none at all is named alone."""
    alone: list[str] = []
    for name, spreads in rows:
        known = [(c, s) for c, s in zip(columns, spreads, strict=True) if s is not None]
        single = [c for c, s in known if s.std is None]
        if single:
            alone.append(name if len(single) == len(known) else f"{name} ({', '.join(single)})")
    return [f"One value only, so no std: {', '.join(alone)}."] if alone else []


def _base_counts(runs: Sequence[Run]) -> list[str]:
    """What stands behind the base row; evaluations of different n are named, for they are averaged alike."""
    said = []
    for split in splits(runs):
        found = bases(runs, split)
        if not found:
            continue
        numbers = sorted({e.n for e in found})
        text = f"{split}: {many(len(found), 'evaluation')}, n = {' and '.join(map(str, numbers))} (base)."
        if len(numbers) > 1:
            text += " Evaluations of different n weigh alike in it."
        said += [text, *fault_notes(split, {"base": found})]
    return said
