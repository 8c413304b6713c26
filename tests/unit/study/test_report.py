"""Tables and figures: every number against one counted by hand on the two steps of `report_fixture`."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.small_run import HOSTILE, evaluation, write_run

from draco.core.errors import ConfigError
from draco.core.llm.money import Prices
from draco.run.numbers import Verdicts, step_numbers
from draco.study.curves import all_figures
from draco.study.figures import COLOURS, Figure, Panel, Series, write_figure
from draco.study.pieces import TokenPieces
from draco.study.runs import open_run
from draco.study.settings import SETTINGS, by_setting, splits
from draco.study.tables import all_tables, write_table
from draco.study.verbs import report as report_script


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


@pytest.fixture
def figures(run: Path) -> dict[str, Figure]:
    return {f.name: f for f in all_figures([open_run(run)], window=1)}


def points(figure: Figure, label: str, panel: int = 0) -> list[tuple[float, float]]:
    (series,) = [s for s in figure.panels[panel].series if s.label == label]
    return list(zip(series.x, series.y, strict=True))


def test_a_step_is_counted_as_by_hand(run: Path) -> None:
    first, second = step_numbers(run, 0), step_numbers(run, 1)
    # A: + − n.a.; B: + + −; C: + + +.
    assert first.verdicts == Verdicts(6, 2, 1)
    assert first.by_title[f"criterion A {HOSTILE}"] == Verdicts(1, 1, 1)
    # Rollout 0 has passes only, rollout 2 one fail only; rollout 1 has both.
    assert first.inert == 2
    assert first.terminations == {"submitted": 2, "length_limit": 1}
    # Surviving citations of steps 1, 2, 3: rollout 0: 2, 1, 0; rollout 1: 1, 2, 0; rollout 2 has one step: 1.
    assert first.citations == {0: 2, 1: 3, 2: 2}
    assert {p: (c.tokens, c.usd) for p, c in first.calls.items()} == {"score": (220, 0.5), "attribute": (110, 0.5)}
    assert (second.members, second.rollouts, second.inert) == (2, 3, 2)
    assert second.calls["score"].usd is None  # a call without a known price makes the bill unknown, not smaller


def test_figures_hold_these_numbers(figures: dict[str, Figure]) -> None:
    assert points(figures["F3_terminations"], "submitted") == [(1.0, 2 / 3), (2.0, 2 / 3)]
    assert points(figures["F3_terminations"], "environment_error") == [(1.0, 0.0), (2.0, 1 / 3)]
    assert points(figures["F4_pass_rate"], "dynamic+step") == [(1.0, 6 / 8), (2.0, 0.0)]
    # The unknown success of step 0 is in no share.
    assert points(figures["F7_train_success"], "dynamic+step") == [(1.0, 0.5), (2.0, 1.0)]
    assert points(figures["F11_inert_share"], "dynamic+step") == [(1.0, 2 / 3), (2.0, 1.0)]
    # Steps by citations, both steps together: 0: 2+2, 1: 3+2, 2: 2 of 11.
    shares = dict(points(figures["F12_citations"], "dynamic+step"))
    assert (shares[0], shares[1], shares[2], shares[10]) == (4 / 11, 5 / 11, 2 / 11, 0.0)
    titles = {p.title: p for p in figures["F10_criteria_dynamic_step"].panels}
    a = titles[f"criterion A {HOSTILE} (4)"].series[0]
    assert (a.x, a.y) == ((1.0, 2.0), (0.5, 0.0))


def test_pass_k_of_the_evaluation(figures: dict[str, Figure]) -> None:
    # Task e0 succeeded in 1 of 2 runs, e1 in both: pass^1 = .75, pass^2 = .5, pass@1 = .75, pass@2 = 1.
    assert points(figures["F5_pass_k"], "dynamic+step", 0) == [(1.0, 0.75), (2.0, 0.5)]
    assert points(figures["F5_pass_k"], "dynamic+step", 1) == [(1.0, 0.75), (2.0, 1.0)]


def test_missing_data_is_a_stated_gap(figures: dict[str, Figure]) -> None:
    assert "prices=" in figures["F2_success_cost"].panels[0].gap
    assert "no frontier model" in figures["F6_frontier"].panels[0].gap
    assert "no judge was replayed" in figures["F9_judge_replay"].panels[0].gap
    assert figures["F8_judge_cost"].panels[0].gap == "a call had no known price"
    assert "No run was re-scored" in figures["F4_pass_rate"].note
    # Tokens of judge calls are known all the same: 3 + 1 calls of 110.
    assert points(figures["F8_judge_cost"], "score", 1) == [(0.0, 330 / 1e6)]


def test_cost_and_frontier_models(tmp_path: Path, run: Path) -> None:
    (run / "evaluation_after.json").write_text(json.dumps(evaluation((1, 2), cost=0.5)), encoding="utf-8")
    model = tmp_path / "model"
    model.mkdir()
    content = {"agent": "openai/x", "checkpoint": "api", **evaluation((2, 2), cost=4.0)}
    (model / "test_normal-api-n2.json").write_text(json.dumps(content), encoding="utf-8")
    runs = [open_run(run), open_run(model)]
    found = {f.name: f for f in all_figures(runs)}
    assert points(found["F2_success_cost"], "dynamic+step") == [(0.5, 0.75)]
    assert found["F2_success_cost"].panels[0].title == "test_normal (no cost: base)"
    assert points(found["F6_frontier"], "openai/x") == [(2.0, 1.0)]  # two tasks
    assert points(found["F6_frontier"], "dynamic+step") == [(0.25, 0.75)]
    (table,) = [t for t in all_tables(runs) if t.name == "T8_models"]
    assert table.rows[1] == ("dynamic+step", "test_normal", 0.75, 0.5, 3.5, 0.5, 0.25)
    assert table.rows[2][:4] == ("openai/x", "test_normal", 1.0, 1.0)


def test_faults_that_count_as_failed_are_said_of_every_row(tmp_path: Path, run: Path) -> None:
    """A row of a model whose provider was down reads like one of a model that cannot do it."""
    (run / "evaluation_before.json").write_text(json.dumps(evaluation((0, 0)) | {"quarantined": 2}), encoding="utf-8")
    model = tmp_path / "model"
    model.mkdir()
    content = evaluation((0, 1), cost=1.0) | {"agent": "openai/x", "checkpoint": "api", "quarantined": 3}
    (model / "test_normal-api-n2.json").write_text(json.dumps(content | {"unevaluated": 1}), encoding="utf-8")
    runs = [open_run(run), open_run(model)]
    ended = "rollouts ended by a fault (environment, engine or deadline) and count as failed."
    base, other = (f"{who}, test_normal: {n} of 4 {ended}" for who, n in (("base", 2), ("openai/x", 3)))
    notes = {t.name: t.notes for t in all_tables(runs)}
    assert {base, other, "openai/x, test_normal: 1 of 4 rollouts left out: the evaluator failed."} <= {
        *notes["T8_models"]
    }
    for name in ("T2_success", "T3_turns", "T4_success_std", "T5_turns_std", "T6_difficulty", "T9_differences"):
        assert base in notes[name]
    figures = {f.name: f.note for f in all_figures(runs)}
    assert base in figures["F2_success_cost"]
    assert other in figures["F6_frontier"]


def test_a_mean_over_a_part_of_the_evaluations_says_so(tmp_path: Path) -> None:
    """One seed was evaluated once a task, or without prices; it is not in the mean."""
    one, two = (write_run(tmp_path / str(seed), seed=seed) for seed in (0, 1))
    whole = evaluation((1, 2), cost=0.5)
    (one / "evaluation_after.json").write_text(json.dumps(whole), encoding="utf-8")
    part = evaluation((1, 1)) | {"tgc_pass_hat": [0.5], "tgc_pass_at": [0.5], "turns": None}
    (two / "evaluation_after.json").write_text(json.dumps(part), encoding="utf-8")
    runs = [open_run(one), open_run(two)]
    tables = {t.name: t for t in all_tables(runs)}
    said = "Over a part of the evaluations of dynamic+step"
    (row,) = [r for r in tables["T2_success"].rows if r[0] == "dynamic+step"]
    assert row[1:3] == (0.625, 0.5)
    assert f"{said}: test_normal TGC p2 (1 evaluation without it)." in tables["T2_success"].notes
    assert f"{said}: test_normal (1 evaluation without it)." in tables["T3_turns"].notes
    assert f"{said}, test_normal: turns (1 evaluation without it)." in tables["T8_models"].notes
    assert tables["T8_models"].rows[1][-2:] == (None, None)  # a part of them has a cost
    figures = {f.name: f for f in all_figures(runs)}
    assert points(figures["F5_pass_k"], "dynamic+step") == [(1.0, 0.625), (2.0, 0.5)]
    assert "dynamic+step, test_normal: 1 of 2 evaluations have fewer runs a task" in figures["F5_pass_k"].note
    assert figures["F2_success_cost"].panels[0].series == ()
    for path, cost in ((one, 0.1), (two, 0.3)):
        (path / "evaluation_before.json").write_text(json.dumps(evaluation((0, 0), cost=cost)), encoding="utf-8")
    (figure,) = [f for f in all_figures([open_run(one), open_run(two)]) if f.name == "F2_success_cost"]
    assert figure.panels[0].title == "test_normal (no cost: dynamic+step (1 of 2 evaluations))"
    assert points(figure, "base") == [(0.2, 0.0)]


def test_settings_and_splits_stand_in_one_order_everywhere(tmp_path: Path) -> None:
    kinds = (("mine", "step"), ("dynamic", "step"), ("static", "step"))
    paths = [write_run(tmp_path / rubric, rubric, credit) for rubric, credit in kinds]
    (paths[0] / "evaluations").mkdir()
    for split, checkpoint in (("dev", "base"), ("test_challenge", "step=000002")):
        content = evaluation((1, 1)) | {"split": split, "checkpoint": checkpoint}
        (paths[0] / "evaluations" / f"{split}-x-n2.json").write_text(json.dumps(content), encoding="utf-8")
    runs = [open_run(p) for p in paths]
    assert list(by_setting(runs)) == ["static+step", "dynamic+step", "mine+step"]
    assert splits(runs) == ["test_normal", "test_challenge"]
    assert splits(runs, base=True) == ["test_normal", "test_challenge", "dev"]
    assert list(COLOURS)[: len(SETTINGS)] == list(SETTINGS)  # that of legends


def test_what_judging_costs(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for step in (0, 1):
        file = run / "archive" / f"step={step:06d}" / "judge_calls.parquet"
        table = pq.ParquetFile(file).read()
        costs = pa.array([0.25 if c is None else c for c in table["cost_usd"].to_pylist()], pa.float64())
        pq.write_table(table.set_column(table.schema.get_field_index("cost_usd"), "cost_usd", costs), file)
    (figure,) = [f for f in all_figures([open_run(run)]) if f.name == "F8_judge_cost"]
    # Three score calls of 0.25 and one attribution of 0.5; TGC .75.
    assert points(figure, "score", 0) == [(0.0, 0.75)]
    assert points(figure, "attribute", 0) == [(0.0, 0.5)]
    assert points(figure, "dynamic+step", 2) == [(1.25, 0.75)]


def test_tokens_times_prices_where_an_evaluation_has_no_cost(run: Path) -> None:
    content: dict[str, Any] = evaluation((1, 2))
    for record in content["records"]:
        record |= {"input_tokens": 1000, "cached_tokens": 500}
    (run / "evaluation_after.json").write_text(json.dumps(content), encoding="utf-8")
    (final,) = open_run(run).final_evaluations("test_normal")
    assert final.cost_usd(None) is None
    # 4 rollouts of (1000·2 + 500·1 + 10·8) / 1e6, over n = 2 runs of each task
    assert final.cost_usd(Prices(2.0, 8.0, 1.0)) == pytest.approx(2 * 2580 / 1e6)


def test_tables(tmp_path: Path, run: Path) -> None:
    other = write_run(tmp_path / "other", seed=1)
    (other / "evaluation_after.json").write_text(json.dumps(evaluation((2, 2))), encoding="utf-8")
    tables = {t.name: t for t in all_tables([open_run(run), open_run(other)])}
    t2 = tables["T2_success"]
    assert t2.columns[:3] == ("setting", "test_normal TGC p1", "test_normal TGC p2")
    (row,) = [r for r in t2.rows if r[0] == "dynamic+step"]
    # Seed 0: .75, .5; seed 1: 1, 1. n = 2, so p3 is a gap, and the row has no average.
    assert row[1:4] == (0.875, 0.75, None)
    assert row[-1] is None
    assert any("test_normal TGC p3" in n for n in t2.notes)
    (row,) = [r for r in tables["T4_success_std"].rows if r[0] == "dynamic+step"]
    assert row[1] == "87.5 ± 17.7"  # sample std of .75 and 1
    (row,) = [r for r in tables["T3_turns"].rows if r[0] == "dynamic+step"]
    assert row[1] == 3.5
    (row,) = [r for r in tables["T6_difficulty"].rows if r[0] == "dynamic+step"]
    assert row[1:3] == (0.75, 1.0)
    (row,) = tables["T9_differences"].rows
    assert row[1:4] == ("dynamic+step", "base", 87.5)  # points
    assert "rubric=self_judge" in tables["T7_self_judge"].notes[0]
    for table in tables.values():
        write_table(table, tmp_path / "tables")
    with open(tmp_path / "tables" / "T2_success.csv", encoding="utf-8", newline="") as stream:
        rows = list(csv.reader(stream))
    assert rows[2][:4] == ["dynamic+step", "0.875", "0.75", ""]
    assert "| dynamic+step | 87.5% | 75.0% | – |" in (tmp_path / "tables" / "T2_success.md").read_text(encoding="utf-8")


def test_the_notes_say_how_a_tau_bench_was_run(run: Path) -> None:
    folder = run / "evaluations"
    folder.mkdir()
    content = {"checkpoint": "step=000002", **evaluation((2, 2)), "split": "tau_banking", "retrieval": "alltools",
               "user": "openai/u", "max_turns": 100, "quarantined": 3, "tau2": {"version": "tau2 1.0.2"}}  # fmt: skip
    (folder / "tau_banking-step=000002-n2.json").write_text(json.dumps(content), encoding="utf-8")
    (table,) = [t for t in all_tables([open_run(run)]) if t.name == "T2_success"]
    notes = " ".join(table.notes)
    assert "tau_banking: tau2 1.0.2, retrieval alltools, user simulator openai/u, at most 100 agent turns" in notes
    del content["retrieval"], content["user"]  # a results file that does not say
    (folder / "tau_banking-step=000002-n2.json").write_text(json.dumps(content), encoding="utf-8")
    (other,) = [t for t in all_tables([open_run(run)]) if t.name == "T2_success"]
    assert "retrieval not recorded, user simulator not recorded, at most 100 agent turns" in " ".join(other.notes)
    assert "dynamic+step, tau_banking: 3 of 4 rollouts ended by a fault" in notes
    assert "test_normal: 1 seed, 1 checkpoint in all, n = 2 (dynamic+step)." in notes


def test_a_cell_without_a_spread_is_a_bare_mean_and_the_base_says_what_it_pools(tmp_path: Path, run: Path) -> None:
    other = write_run(tmp_path / "other")
    content = evaluation((2, 2)) | {"n": 3, "tgc_pass_hat": [1.0, 1.0, 1.0]}
    (other / "evaluation_before.json").write_text(json.dumps(content), encoding="utf-8")
    (other / "evaluation_after.json").unlink()
    tables = {t.name: t for t in all_tables([open_run(run), open_run(other)])}
    t4 = tables["T4_success_std"]
    rows = {r[0]: r for r in t4.rows}
    assert rows["base"][1] == "50.0 ± 70.7"
    assert rows["base"][3] == "100.0"  # p3: the other evaluation has n = 2
    assert rows["dynamic+step"][1] == "75.0"
    (alone,) = [n for n in t4.notes if n.startswith("One value only")]
    assert "base (test_normal TGC p3)" in alone
    assert alone.endswith(", dynamic+step.")
    (said,) = [n for n in t4.notes if "(base)" in n]
    assert said.startswith("test_normal: 2 evaluations, n = 2 and 3 (base).")
    assert "different n" in said
    (said,) = [n for t in all_tables([open_run(run)]) if t.name == "T4_success_std" for n in t.notes if "(base)" in n]
    assert said == "test_normal: 1 evaluation, n = 2 (base)."


def test_the_script_writes_an_overview(tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib comes with the extra `report`")
    out = tmp_path / "out"
    report_script.main([str(run), f"out={out}", "png=false", "html=false"])
    text = (out / "report.md").read_text(encoding="utf-8")
    assert "| dynamic+step | 75.0% | 50.0% | – |" in text
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert len(links) > 10
    assert all((out / link).is_file() for link in links)
    missing = text[text.index("## Not measured") :]
    assert "F9 · The same calls, judged again: no judge was replayed" in missing
    assert not list(out.rglob("*.png"))
    for wrong in (
        "png=1", "window=0", "audit=x", "html=no", "max_text=-1", "max_text=x", "max_mb=-1", "max_mb=nan",
        "prices=-1,-2", "prices=nan,1", "prices=1",
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"^{wrong.split('=')[0]}(=| is )"):
            report_script.main([str(run), wrong])


def test_the_last_three_checkpoints_with_the_most_runs_are_averaged(run: Path) -> None:
    folder = run / "evaluations"
    folder.mkdir()
    for step in (10, 20, 30, 40):
        content = {"checkpoint": f"step={step:06d}", **evaluation((2, 2))}
        (folder / f"test_normal-step={step:06d}-n2.json").write_text(json.dumps(content | {"n": 3}), encoding="utf-8")
    (folder / "step=000005.json").write_text(json.dumps(evaluation((0, 0))), encoding="utf-8")  # a curve's point
    (folder / "leaderboard.json").write_text("{}", encoding="utf-8")
    assert [e.step for e in open_run(run).final_evaluations("test_normal")] == [20, 30, 40]
    part = {"checkpoint": "step=000040", **evaluation((9,) * 9), "n": 9, "tasks": 1}  # a part does not stand for all
    (folder / "test_normal-step=000040-n9-first1.json").write_text(json.dumps(part), encoding="utf-8")
    assert {(e.step, e.n) for e in open_run(run).final_evaluations("test_normal")} == {(20, 3), (30, 3), (40, 3)}


def test_figures_are_drawn_and_their_numbers_written(tmp_path: Path, figures: dict[str, Figure]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib comes with the extra `report`")
    for name in ("F3_terminations", "F8_judge_cost", "F11_inert_share"):
        write_figure(figures[name], tmp_path)
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
        assert "</svg>" in (tmp_path / f"{name}.svg").read_text(encoding="utf-8")
    with open(tmp_path / "F11_inert_share.csv", encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [(r["series"], r["x"], float(r["y"])) for r in rows] == [
        ("dynamic+step", "1.0", 2 / 3),
        ("dynamic+step", "2.0", 1.0),
    ]
    drawn = (tmp_path / "F8_judge_cost.svg").read_text(encoding="utf-8")
    assert "no data:" in drawn
    write_figure(Figure("empty", "t", "", "", (Panel("", (Series("a", (), ()),)),)), tmp_path)


def test_the_axis_of_terminations_ends_where_something_is_to_be_seen(run: Path) -> None:
    (figure,) = [f for f in all_figures([open_run(run)]) if f.name == "F3_terminations"]
    assert (figure.y_max, figure.note) == (0.5, "The axis ends at 50%: all other rollouts submitted.")
    assert [s.label for s in figure.panels[0].series][-1] == "submitted"


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        open_run(tmp_path)


def test_a_run_whose_options_lie_one_level_below_is_read(tmp_path: Path) -> None:
    path = write_run(tmp_path / "older")
    config = json.loads((path / "config.yaml").read_text(encoding="utf-8"))
    flat = {name: dict(config[name]) for name in ("rubric", "credit")}
    config |= {
        name: {"name": group.pop("name"), "stage": group} for name, group in json.loads(json.dumps(flat)).items()
    }
    (path / "config.yaml").write_text(json.dumps(config), encoding="utf-8")
    assert {name: open_run(path).config[name] for name in flat} == flat


def test_variants_of_a_self_judge_are_settings_of_their_own(tmp_path: Path) -> None:
    runs = []
    for k, thinking in ((3, True), (1, False)):
        path = write_run(tmp_path / f"k{k}", rubric="self_judge")
        config = json.loads((path / "config.yaml").read_text(encoding="utf-8"))
        config["rubric"] |= {"k": k, "thinking": thinking}
        (path / "config.yaml").write_text(json.dumps(config), encoding="utf-8")
        runs.append(open_run(path))
    (table,) = [t for t in all_tables(runs) if t.name == "T7_self_judge"]
    assert [r[1] for r in table.rows] == ["self (k=1, no thinking)", "self (k=3, thinking)"]
    assert table.rows[0][2] == 0.75
    names = {f.name for f in all_figures(runs)}
    assert "F10_criteria_self_judge_k_1_no_thinking_step" in names


def test_a_policy_package_is_not_imported_for_its_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "needs_more"
    package.mkdir()
    (package / "__init__.py").write_text("import something_that_is_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    assert "no tokenizer.json under pkg://needs_more" in TokenPieces("pkg://needs_more").gap
    assert TokenPieces("pkg://no_such_package.inner").gap
    assert TokenPieces("pkg://draco.policy.tiny").of([300])
