"""Replays, the matching of criteria and the human audit, on the hand-made run."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from support.factory import call, rewarded
from support.small_run import score_reply, write_run

from callbacks.credit.step import StepLevelCredit
from draco.core.errors import ConfigError, JudgeCallError
from draco.judge.parsing import ReplyFault
from draco.judge.requests import JudgeRequest
from draco.run.archive import step_folder, write_step
from draco.study.audit import read_sheet, write_sheet
from draco.study.curves import all_figures
from draco.study.judge_replay import (
    _Budget,
    load_results,
    replay_calls,
    replayable,
    summarise_replay,
)
from draco.study.judgements import read_groups
from draco.study.matching import check_pairs, criteria_overlap, load_matches, match_criteria
from draco.study.runs import open_run
from draco.study.verbs import calibrate, replay
from draco.study.verbs.replay_judge import show as show_replay


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


# -- draco replay ---------------------------------------------------------------------------------------------


def test_an_untouched_archive_replays(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay.main([str(run)]) == 0
    assert "2 steps, 2 groups, 5 trajectories: every reward and credit is equal to the bit" in capsys.readouterr().out


@pytest.mark.parametrize("column", ["reward", "advantage", "step_advantages", "qualities", "reason"])
def test_one_bit_off_is_found(run: Path, column: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = step_folder(run, 0) / "credits.parquet"
    table = pq.ParquetFile(file).read()
    rows = table.to_pylist()
    old = rows[0][column]
    flip = {str: lambda v: "uncited", float: lambda v: v + 1e-15, list: lambda v: [v[0] + 1e-15, *v[1:]]}[type(old)]
    rows[0][column] = flip(old)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), file)
    assert replay.main([str(run)]) == 1
    assert f"step 0, group 0, sample 0: {column} is" in capsys.readouterr().out


def test_a_changed_verdict_is_found(run: Path) -> None:
    file = step_folder(run, 0) / "verdicts.parquet"
    table = pq.ParquetFile(file).read()
    rows = table.to_pylist()
    rows[0]["score"] = -1
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), file)
    assert replay.main([str(run)]) == 1


@pytest.mark.parametrize(("rubric", "status"), [("dynamic", 1), ("outcome", 0)])
def test_groups_without_criteria(tmp_path: Path, rubric: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A rubric without criteria rewards nobody; the outcome's rewards are success, which no archive holds."""
    run = write_run(tmp_path / "run", rubric=rubric)
    (group,) = read_groups(run, 0)
    group = replace(group, trajectories=group.trajectories[:2], step=2)
    credit = StepLevelCredit().assign_one(rewarded(group, (1.0, 0.0)))
    write_step(run, 2, [group], [credit])
    assert replay.main([str(run)]) == status
    given = "2 rewards are the environment's and were taken as given"
    assert (given in capsys.readouterr().out) == (rubric == "outcome")


# -- draco replay judge=… ---------------------------------------------------------------------------------------


class OtherJudge:
    """Answers every call with the same scores; fails where told."""

    model = "judge/two"

    def __init__(self, answers: dict[int, tuple[int, ...]], usd: float | None = 0.5) -> None:
        self.answers, self.usd, self.asked = answers, usd, []  # type: ignore[var-annotated]

    async def call(self, request: JudgeRequest[Any]) -> Any:
        self.asked.append([dict(m) for m in request.messages])
        scores = self.answers.get(10 * request.step + request.sample)
        if scores is None:
            raise JudgeCallError("gone")
        record = next(iter(RECORDS))
        request.sink(replace(record, cost_usd=self.usd))
        value, _ = request.check(json.loads(score_reply(*scores)))
        return value


RECORDS = [call(0, "score", 0, "{}")]


def test_a_judge_is_replayed_byte_for_byte_and_goes_on(run: Path, tmp_path: Path) -> None:
    calls = [c for c in replayable(run) if c["phase"] == "score"]
    other = OtherJudge({0: (1, -1), 1: (1, 1)})  # the call of step 1 fails
    file = tmp_path / "calls.jsonl"
    counts = asyncio.run(replay_calls(calls, other, file))  # type: ignore[arg-type]
    assert counts == {"sent": 3, "failed": 1, "kept": 0, "left": 0}
    assert other.asked[0] == [
        {"role": "system", "content": "you judge"},
        {"role": "user", "content": "[step 1] action:\nx\n"},
    ]
    with open(file, "a", encoding="utf-8") as stream:
        stream.write('{"key": "cut o')
    again = OtherJudge({10: (1,)})
    assert asyncio.run(replay_calls(calls, again, file)) == {"sent": 1, "failed": 0, "kept": 2, "left": 0}  # type: ignore[arg-type]
    summary = summarise_replay(load_results(file).values(), "judge/two", 1)
    # Reference [1, 1] [−1, 1] [−1] against [1, −1] [1, 1] [1]: 2 of 5 agree,
    # both fails were passed, 1 of 3 passes failed.
    assert summary["all"]["pairs"] == 5
    assert summary["all"]["agreement"] == pytest.approx(2 / 5)
    assert summary["all"]["all_pass_baseline"] == pytest.approx(3 / 5)
    assert (summary["all"]["false_pass"], summary["all"]["false_fail"]) == (1.0, pytest.approx(1 / 3))
    assert [w["first_step"] for w in summary["windows"]] == [0, 1]
    assert summary["windows"][0]["false_pass"] == 1.0
    folder = run / "judge_replay" / "judge_two"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")

    (figure,) = [f for f in all_figures([open_run(run)]) if f.name == "F9_judge_replay"]
    points = {s.label: list(zip(s.x, s.y, strict=True)) for s in figure.panels[0].series}
    assert points["agreement"] == [(1.0, 0.5), (2.0, 0.0)]
    assert points["false pass"] == [(1.0, 1.0), (2.0, 1.0)]


def test_money_stops_a_replay(run: Path, tmp_path: Path) -> None:
    calls = [c for c in replayable(run) if c["phase"] == "score"]
    other = OtherJudge({0: (1, 1), 1: (1, 1), 10: (1,)})
    counts = asyncio.run(replay_calls(calls, other, tmp_path / "c.jsonl", max_usd=0.5))  # type: ignore[arg-type]
    assert (counts["sent"], counts["left"]) == (1, 2)
    with pytest.raises(ConfigError, match="no known price"):
        asyncio.run(replay_calls(calls, OtherJudge({0: (1, 1)}, None), tmp_path / "d.jsonl", max_usd=1.0))  # type: ignore[arg-type]
    assert len(load_results(tmp_path / "d.jsonl")) == 1  # it was paid for


def test_a_call_without_a_price_says_nothing_of_the_next(run: Path, tmp_path: Path) -> None:
    """The price is set after the refusal; and a failure that was paid for is as dear as it was."""
    first = next(c for c in replayable(run) if c["phase"] == "score")
    calls = [{**first, "sample": i, "prompt_hash": str(i)} for i in range(20)]
    file = tmp_path / "c.jsonl"
    with pytest.raises(ConfigError, match="no known price"):
        asyncio.run(replay_calls(calls, OtherJudge({0: (1, 1)}, None), file, max_usd=1.0))  # type: ignore[arg-type]
    counts = asyncio.run(replay_calls(calls, SlowJudge(0.1, {}), file, max_usd=1.0))  # type: ignore[arg-type]
    assert (counts["kept"], counts["sent"]) == (1, 10)

    budget = _Budget(1.0)
    for outcome, usd, rate in (("failed", None, None), ("failed", 0.0, None), ("ok", 0.5, 0.5), ("failed", 0.75, 0.75)):
        budget.learn({"tokens_in": 1, "tokens_out": 0}, outcome, usd)
        assert budget.rate == rate
    assert budget.spent == 1.25
    free = _Budget(1.0)
    free.learn({"tokens_in": 1, "tokens_out": 0}, "ok", 0.0)
    assert free.rate == 0.0


class SlowJudge(OtherJudge):
    """All calls that are sent are under way before the first is answered; the `dear` ones cost more."""

    def __init__(self, usd: float, dear: dict[int, float]) -> None:
        super().__init__(dict.fromkeys(range(30), (1, 1)), usd)
        self.plain, self.dear, self.under_way, self.most = usd, dear, 0, [0]

    async def call(self, request: JudgeRequest[Any]) -> Any:
        self.under_way += 1
        self.most.append(self.under_way)
        for _ in range(100):
            await asyncio.sleep(0)
        self.usd = self.dear.get(request.sample, self.plain)
        self.under_way -= 1
        return await super().call(request)


@pytest.mark.parametrize(
    ("dear", "cap", "sent"),
    [
        ({}, 1.0, 10),
        ({}, 0.95, 9),
        ({0: 0.2}, 1.0, 8),  # .2 + 7 · .1, and another may be as dear as the first
        ({}, 0.05, 1),  # nobody knows before the first
    ],
)
def test_calls_at_once_do_not_pass_the_cap(
    run: Path, tmp_path: Path, dear: dict[int, float], cap: float, sent: int
) -> None:
    first = next(c for c in replayable(run) if c["phase"] == "score")
    calls = [{**first, "sample": i, "prompt_hash": str(i)} for i in range(20)]
    other, file = SlowJudge(0.1, dear), tmp_path / "c.jsonl"
    counts = asyncio.run(replay_calls(calls, other, file, max_usd=cap))  # type: ignore[arg-type]
    assert (counts["sent"], counts["left"]) == (sent, 20 - sent)
    assert other.most[1] == 1  # the first is alone
    assert max(other.most) > 1 or sent == 1
    # Another process goes on with what is left, and knows the price.
    again = SlowJudge(0.1, {})
    counts = asyncio.run(replay_calls(calls, again, file, max_usd=cap + 0.3))  # type: ignore[arg-type]
    assert counts["kept"] == sent
    assert sum(r["usd"] for r in load_results(file).values()) <= max(cap + 0.3, 0.1) + 1e-9


def test_the_steps_that_another_judge_cites_are_compared() -> None:
    def row(reference: list[Any], other: list[Any]) -> dict[str, Any]:
        return {"key": "k", "step": 0, "phase": "attribute", "reference": reference, "other": other}

    rows = [
        row([["a", 1, [1, 2]], ["b", -1, [3]]], [["a", 1, [2]], ["b", -1, [3, 4]]]),
        row([["a", 0, []]], [["a", 0, []]]),
    ]
    found = summarise_replay(rows, "m", 10)
    assert (found["all"]["cited_recall"], found["all"]["cited_precision"]) == (2 / 3, 2 / 3)
    assert (found["all"]["pairs"], found["windows"][0]["calls"]) == (0, 2)
    printed = Console(file=io.StringIO(), width=200)
    show_replay(found | {"matcher": None}, printed)
    assert "cited steps recall" in printed.file.getvalue()  # type: ignore[attr-defined]
    assert "0.667" in printed.file.getvalue()  # type: ignore[attr-defined]
    assert "verdicts" not in printed.file.getvalue()  # type: ignore[attr-defined]


def test_criteria_overlap_pairs_one_to_one() -> None:
    reference = [("Pays the right person", "the payment goes to ana"), ("Reads all pages", "every page is read")]
    other = [
        ("Pays the right person", "payment to ana"),
        ("Pays the right person", "payment to ana"),
        ("Says thanks", "polite"),
    ]
    assert criteria_overlap(reference, other) == (1, 2, 3)


def test_pairs_of_a_matcher_are_checked() -> None:
    assert check_pairs({"pairs": [{"a": 1, "b": 2}, {"a": 2, "b": 1}]}, 2, 2) == 2
    for pairs, fault in (
        ([{"a": 3, "b": 1}], "a=3: expected a number from 1 to 2"),
        ([{"a": 1, "b": 0}], "b=0: expected"),
        ([{"a": 1, "b": 1}, {"a": 2, "b": 1}], "criterion of B is in two pairs"),
        ([{"a": "1", "b": 1}], "pairs.0.a"),
        (None, "pairs"),
    ):
        with pytest.raises(ReplyFault, match=fault):
            check_pairs({"pairs": pairs}, 2, 2)


def test_what_a_matcher_failed_on_is_in_no_rate(tmp_path: Path) -> None:
    class Failing:
        async def call(self, request: JudgeRequest[Any]) -> int:
            if "good" not in request.messages[1]["content"]:
                raise JudgeCallError("down")
            return request.check({"pairs": [{"a": 2, "b": 1}]})[0]  # type: ignore[no-any-return]

    rows = [
        {"key": "k1", "step": 0, "phase": "merge", "reference": [["good", "x"], ["b", "y"]], "other": [["c", "z"]]},
        {"key": "k2", "step": 0, "phase": "merge", "reference": [["bad", "x"]], "other": [["c", "z"]]},
        {"key": "k3", "step": 0, "phase": "propose_rollout", "reference": [], "other": [["c", "z"]]},
        {"key": "k4", "step": 0, "phase": "score", "reference": [["t", 1]], "other": [["t", 1]]},
    ]
    file = tmp_path / "m.jsonl"
    counts = asyncio.run(match_criteria(rows, Failing(), file))  # type: ignore[arg-type]
    assert counts == {"asked": 2, "failed": 1, "kept": 0}
    assert load_matches(file) == {"k1": 1, "k3": 0}
    found = summarise_replay(rows, "m", 10, load_matches(file))["all"]
    assert (found["model_recall"], found["model_precision"]) == (1 / 2, 1 / 2)  # k1: 1 of 2 and 1; k3: 0 of 0 and 1


def test_replay_takes_one_run_with_a_judge_and_options_of_a_judge_only_then(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"^no run is given: draco replay runs/NAME$"):
        replay.main([])
    with pytest.raises(ConfigError, match="2 run folders are given; expected one run folder"):
        replay.main([str(run), str(run), "judge=litellm", "judge.model=m"])
    with pytest.raises(ConfigError, match="without judge= nothing is sent"):
        replay.main([str(run), "max_usd=3"])


# -- the human audit -----------------------------------------------------------------------------------------------


def test_the_sheet_is_blind_and_comes_back(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sheet = write_sheet(run, 100)
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    with open(sheet, encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 9 + 2  # every verdict there is
    assert "because" not in sheet.read_text(encoding="utf-8")  # no justification
    assert "[step 1] action:" in rows[0]["transcript"]
    with pytest.raises(ConfigError, match="no verdict is rated"):
        read_sheet(run, sheet)
    # Rate criterion A of step 0 as the judge did, but for rollout 0: there the person says fail.
    ratings = {"0/0/0/0": "fail", "0/0/0/1": "Fail", "0/0/0/2": "n.a."}
    for row in rows:
        row["rating"] = ratings.get(row["id"], "")
    with open(sheet, "w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    result = read_sheet(run, sheet)
    assert (result.agreement.pairs, result.unrated) == (3, 8)
    assert result.agreement.agreement == pytest.approx(2 / 3)
    assert result.agreement.false_pass == 0.5
    calibrate.main([str(run)])
    assert "3 verdicts rated, 8 left blank" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="holds ratings"):
        write_sheet(run, 5)


def test_a_wrong_rating_is_named(run: Path) -> None:
    (run / "audit.csv").write_text("id,rating\n0/0/0/0,maybe\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="row 1: rating 'maybe'"):
        read_sheet(run, run / "audit.csv")
    (run / "audit.csv").write_text("id,rating\n0/9/0/0,pass\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="0/9/0/0 is no verdict"):
        read_sheet(run, run / "audit.csv")
