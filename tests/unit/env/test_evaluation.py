"""pass^k, pass@k, TGC, SGC: brute force and hand-worked numbers."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.echo import EchoEvaluator
from support.factory import trajectory

from draco.core.llm.money import Prices, Usage
from draco.core.types import Step, Task, Termination
from draco.env.base import Outcome
from draco.env.records import EvalRecord, evaluate_end_state, record_of, token_usage
from draco.env.success import leaderboard, over_checkpoints, pass_at_k, pass_hat_k, summarise

TASK = Task("t", "", "test", "s")


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_k_is_the_mean_over_all_draws(runs: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(runs)))
    draws = list(combinations(runs, k))
    assert pass_hat_k(sum(runs), len(runs), k) == pytest.approx(sum(map(all, draws)) / len(draws), abs=1e-12)
    assert pass_at_k(sum(runs), len(runs), k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


@pytest.mark.parametrize("arguments", [(4, 3, 1), (-1, 3, 1), (1, 3, 0), (1, 3, 4)])
def test_pass_k_bounds(arguments: tuple[int, int, int]) -> None:
    for function in (pass_at_k, pass_hat_k):
        with pytest.raises(ValueError, match="expected 0"):
            function(*arguments)


def record(task: str, scenario: str, sample: int, success: bool | None, **more: Any) -> EvalRecord:
    options = {"difficulty": 1, "termination": "submitted", "turns": 4, "step_tokens": 10} | more
    return EvalRecord(task_id=task, scenario_id=scenario, sample=sample, success=success, **options)


def test_worked_example() -> None:
    # scenario A: tasks a1 (1,1), a2 (1,0); scenario B: b1 (0,1). A holds in run 0 only, B in run 1 only.
    records = [
        record("a1", "A", 0, True), record("a1", "A", 1, True),
        record("a2", "A", 0, True), record("a2", "A", 1, False, faults=("skips_pages",)),
        record("b1", "B", 0, False, difficulty=2, turns=10), record("b1", "B", 1, True, difficulty=2),
    ]  # fmt: skip
    s = summarise(records)
    assert s["tgc"] == pytest.approx(4 / 6)
    assert s["sgc"] == pytest.approx(1 / 2)
    assert s["tgc_pass_hat"] == pytest.approx([4 / 6, 1 / 3])
    assert s["tgc_pass_at"] == pytest.approx([4 / 6, 1.0])
    assert s["sgc_pass_hat"] == pytest.approx([1 / 2, 0.0])
    assert s["sgc_pass_at"] == pytest.approx([1 / 2, 1.0])
    assert s["tgc_by_difficulty"] == pytest.approx({"1": 3 / 4, "2": 1 / 2})
    assert s["turns"] == pytest.approx(5.0)
    assert s["faults"] == pytest.approx({"skips_pages": 1 / 6})
    assert (s["tasks"], s["scenarios"], s["n"], s["unevaluated"]) == (3, 2, 2, 0)


def test_an_unevaluated_run_is_no_zero() -> None:
    s = summarise([record("a", "A", 0, True), record("b", "B", 0, None, error="x")])
    assert (s["tgc"], s["sgc"], s["unevaluated"]) == (1.0, 1.0, 1)
    s = summarise([record("a", "A", 0, None, error="x")])
    assert (s["tgc"], s["sgc"], s["tgc_pass_hat"]) == (None, None, [None])


def test_uneven_runs_are_refused() -> None:
    with pytest.raises(ValueError, match="same number of runs"):
        summarise([record("a", "A", 0, True), record("a", "A", 1, True), record("b", "B", 0, True)])


def test_faults_of_environment_and_evaluator_are_told_apart() -> None:
    class Raises(EchoEvaluator):
        def evaluate(self, task: Task, end_state: str) -> Outcome:
            raise OSError("no")

    good = Termination.SUBMITTED
    assert evaluate_end_state(EchoEvaluator(), TASK, "done", good).success is True
    assert evaluate_end_state(Raises(), TASK, "done", good) == Outcome(None, error="OSError: no")
    assert evaluate_end_state(None, TASK, "done", good).success is None
    assert evaluate_end_state(Raises(), TASK, "", Termination.ENVIRONMENT_ERROR).success is False


def checkpoint_result(name: str, solved: set[str], turns: int) -> dict[str, Any]:
    tasks = [("a1", "A", 1), ("a2", "A", 1), ("b1", "B", 2)]
    records = [
        record(t, s, i, t in solved, difficulty=level, turns=turns, interactions=turns - 1, cost_usd=0.5)
        for t, s, level in tasks for i in range(2)
    ]  # fmt: skip
    return {"split": "test_normal", "checkpoint": name, **summarise(records)}


def test_over_checkpoints_worked_example() -> None:
    results = [
        checkpoint_result("step=000090", {"a1", "a2", "b1"}, 4),
        checkpoint_result("step=000095", {"a1", "a2"}, 6),
        checkpoint_result("step=000100", {"b1"}, 8),
    ]
    found = over_checkpoints(results)
    # TGC 1, 2/3, 1/3; SGC 1, 1/2, 1/2.
    assert found["tgc"]["mean"] == pytest.approx(2 / 3)
    assert found["tgc"]["std"] == pytest.approx(1 / 3)
    assert found["sgc_pass_hat"][1]["mean"] == pytest.approx(2 / 3)
    assert found["sgc_pass_hat"][1]["std"] == pytest.approx((1 / 12) ** 0.5)
    assert found["tgc_by_difficulty"]["2"]["mean"] == pytest.approx(2 / 3)
    assert (found["turns"]["mean"], found["turns"]["std"]) == (6.0, 2.0)
    assert found["cost_usd"] == {"mean": 1.5, "std": 0.0}  # of one pass
    assert found["terminations"]["submitted"] == {"mean": 1.0, "std": 0.0}
    assert found["checkpoints"] == ["step=000090", "step=000095", "step=000100"]
    board = leaderboard({"test_normal": found})["test_normal"]
    assert board["all"] == {"task_goal_completion": 66.7, "scenario_goal_completion": 66.7, "interactions": 5.0}
    assert board["level 2"]["task_goal_completion"] == 66.7
    assert over_checkpoints(results[:1])["tgc"] == {"mean": 1.0, "std": None}
    with pytest.raises(ValueError, match="one split"):
        over_checkpoints([results[0], {**results[1], "split": "dev"}])


def test_usage_of_a_trajectory_counts_what_every_turn_reads() -> None:
    # prompt 10, turn 1 writes 5, glue 3, turn 2 writes 4: turn 2 reads 18 tokens, 10 of them again.
    steps = (Step(1, (10, 15), "a", "o", 1), Step(2, (18, 22), "b", "", 2))
    t = replace(trajectory(task=TASK), steps=steps, prompt_tokens=10)
    assert token_usage(t) == Usage(28, 9, 10)
    evaluated = record_of(t, EchoEvaluator(), token_usage(t), 0.5)
    assert (evaluated.input_tokens, evaluated.cached_tokens, evaluated.step_tokens) == (18, 10, 9)
    assert evaluated.priced(Prices(1.0, 4.0, 0.1)).cost_usd == pytest.approx((18 + 1 + 36) / 1e6)
    assert evaluated.priced(None).cost_usd == 0.5
    assert token_usage(trajectory(steps=0, termination=Termination.ENVIRONMENT_ERROR)) == Usage()
