"""The planner: exact counts, modelled memory against tracked bytes, the judge's bill, what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import hydra
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra

from draco.cli import run
from draco.core.errors import ConfigError
from draco.core.llm.money import Prices, Usage, price_of
from draco.judge.options import prices_of
from draco.run.archive import read_table
from draco.run.launch import processes, sharded
from draco.run.train import train
from draco.study.planner.judge import (
    PAPER_USD_A_CALL,
    STATED,
    Call,
    archive_calls,
    bill,
    calls_a_step,
    expected_calls,
    implied_tokens,
)  # fmt: skip
from draco.study.planner.model import model_config
from draco.study.verbs import plan as plan_script

PRICE = Prices(2.5, 15.0, 0.25)
SMALL_RUN = [
    "steps=1", "tasks_per_step=24", "group_size=2", "eval.before=false", "eval.tasks=1", "report=false",
    "checkpoint.check_disk=false",
]  # fmt: skip


def test_calls_are_those_of_the_method() -> None:
    assert sum(calls_a_step(1, 6, dynamic=True, citations=True).values()) == 20
    assert sum(calls_a_step(1, 6, dynamic=True, citations=False).values()) == 14
    assert sum(calls_a_step(1, 6, dynamic=True, citations=True, lean=True).values()) == 14
    assert calls_a_step(16, 6, dynamic=False, citations=True) == {"score": 96, "attribute": 96}
    assert calls_a_step(2, 3, dynamic=False, citations=False, voters=3) == {"score": 18}
    assert calls_a_step(2, 3, dynamic=False, citations=True, lean=True, voters=3) == {"assess": 18}


def test_the_paper_s_bill_implies_tokens_a_call() -> None:
    assert pytest.approx(0.0502, abs=1e-4) == PAPER_USD_A_CALL
    price = Prices(2.5, 15.0)
    implied = implied_tokens(price, STATED, calls_a_step(16, 6, dynamic=True, citations=True))
    assert (implied["tokens_in"] * price.input + implied["tokens_out"] * price.output) / 1e6 == pytest.approx(
        PAPER_USD_A_CALL
    )
    # By hand: 20 calls of a group are 4,500 + 6·13,500 + 62,000 + 6·13,500 + 6·14,500 = 315,500 tokens in and
    # 1,500 + 6·1,000 + 2,500 + 6·2,800 + 6·2,200 = 40,000 out: 11.25% out.
    share = 40_000 / 355_500
    assert implied["tokens_a_call"] == pytest.approx(PAPER_USD_A_CALL * 1e6 / (2.5 * (1 - share) + 15 * share))


def test_prices_are_given_packaged_or_unknown() -> None:
    assert price_of("openai/gpt-5.4") == Prices(2.5, 15.0, 0.25)
    assert prices_of({"input": 1, "output": 2}) == Prices(1.0, 2.0)
    assert price_of("some/model") is None
    assert bill({"score": 1}, STATED, None)["usd"] is None  # an unknown price is no zero


def archived(run: Path, scored: int) -> None:
    """Two steps of two groups of three rollouts; `scored` of the twelve got a score."""
    for step in (0, 1):
        folder = run / "archive" / f"step={step:06d}"
        folder.mkdir(parents=True)
        mine = scored // 2
        rows = [{"phase": "score", "tokens_in": 100 + step, "tokens_out": 10, "tokens_cached": 50}] * mine
        rows += [{"phase": "merge", "tokens_in": 900, "tokens_out": 50, "tokens_cached": 0}] * 2
        pq.write_table(pa.Table.from_pylist(rows), folder / "judge_calls.parquet")
        places = [{"step": step, "group": g} for g in (0, 1) for _ in range(3)]
        pq.write_table(pa.Table.from_pylist(places), folder / "trajectories.parquet")


def test_calls_and_means_come_from_an_archive(tmp_path: Path) -> None:
    archived(tmp_path, 6)
    means = archive_calls(tmp_path)
    assert means == {"score": Call(100.5, 10.0, 50.0, 0.5), "merge": Call(900.0, 50.0, 0.0, 1.0)}
    most = calls_a_step(16, 6, dynamic=True, citations=True)
    calls = expected_calls(most, means, 16, 6)  # of another size than the archive
    assert calls == {"score": 48.0, "merge": 16.0, "propose_task": 16.0, "propose_rollout": 96.0, "attribute": 96.0}
    total = bill({"score": 48, "merge": 16}, means, Prices(1.0, 10.0, 0.5))
    assert total["usd"] == pytest.approx((48 * (50.5 + 25 + 100) + 16 * (900 + 500)) / 1e6)
    assert bill({"attribute": 2}, means, None)["tokens_in"] == 2 * STATED["attribute"].tokens_in  # not in the archive


def test_the_means_of_one_archive_predict_the_bill_of_another(tmp_path: Path) -> None:
    """Two real runs on desk that differ in seed, tasks and rollouts; at the price of the paper's judge."""
    bills = []
    for seed in (0, 1):
        run = tmp_path / str(seed)
        GlobalHydra.instance().clear()
        with initialize_config_module("conf", version_base="1.3"):
            config = compose("train", [*SMALL_RUN, f"seed={seed}", f"run={run}"])
        train(config)
        rows = read_table(run, "judge_calls")
        tokens = (sum(rows[name].to_pylist()) for name in ("tokens_in", "tokens_out", "tokens_cached"))
        bills.append(PRICE.cost(Usage(*tokens)) / config.steps)
    means, most = archive_calls(tmp_path / "0"), calls_a_step(24, 2, dynamic=True, citations=True)
    calls = expected_calls(most, means, 24, 2)
    assert sum(calls.values()) < sum(most.values())  # some groups need fewer calls than the method has
    predicted = bill(calls, means, PRICE)
    assert predicted["usd"] == pytest.approx(bills[1], rel=0.15)
    assert bill(most, means, PRICE)["usd"] > predicted["usd"]
    assert bills[0] != bills[1]


def test_the_script_prints_one_object_and_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["policy=tiny", "gpus=8", "gpu=h100-80gb", "trainer=fsdp_8gpu"]
    assert plan_script.main([*options, "json=true"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert set(printed["layouts"]) == {"colocated", "split"}
    assert all(layout["fits"] and not layout["advice"] for layout in printed["layouts"].values())
    assert plan_script.main(options) == 0
    said = capsys.readouterr().out
    assert "Memory a GPU" in said
    assert "assumed: mfu=0.35" in said
    assert not re.search(r"\b0\.0\b|[a-z]_[a-z]+ +│|tokens/s", said)  # MB, words, and no speeds of so small a model
    assert " MB │" in said
    assert "no speeds and hours" in said
    assert "no bill" in said  # the scripted judge


@pytest.mark.parametrize("experiment", ["appworld_qwen36_27b", "appworld_qwen25_32b"])
def test_the_paper_s_runs_fit_and_what_to_type_composes(experiment: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_script.main([f"experiment={experiment}", "gpus=8", "gpu=h100-80gb", "json=true"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["judge"]["step"]["calls"] == 320
    for name, layout in plan["layouts"].items():
        assert layout["fits"]
        assert layout["update_bytes"]["total"] + 0 < layout["budget_bytes"]
        assert layout["serve_bytes"]["total"] + layout["resident_bytes"] <= layout["budget_bytes"]
        GlobalHydra.instance().clear()
        with initialize_config_module("conf", version_base="1.3"):
            config = compose("train", [f"experiment={experiment}", *layout["settings"], "run=x"])
        assert sharded(config)
        assert processes(config) == (layout["train_gpus"], 1)
        launch = hydra.utils.instantiate(config.engine.launch)
        assert launch.servers == layout["servers"]
        sets = [int(i) for one in launch.gpus for i in one.split(",")]
        assert sets == list(range(8)) if name == "colocated" else sets == [4, 5, 6, 7]


def test_what_does_not_fit_is_told_which_knob_to_turn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ["policy=qwen25_32b", "gpus=8", "gpu=a100-40gb", "trainer=ddp", "json=true"]
    assert plan_script.main(options) == 1
    found = json.loads(capsys.readouterr().out)["layouts"]["colocated"]
    assert not found["fits"]
    assert found["advice"][0].startswith("trainer=fsdp")
    for wrong, said in (
        (["gpu=abacus"], "expected one of a100-40gb"),
        (["policy=hf", "policy.path=no/such"], "its shape is not shipped"),
        (["policy=tiny", f"judge_from={tmp_path}"], "no judge_calls.parquet"),
    ):
        with pytest.raises(ConfigError, match=said):
            plan_script.main(wrong)
    with pytest.raises(ConfigError):
        model_config("no/such")


@pytest.mark.parametrize(
    ("options", "gpus", "nodes", "local"),
    [(["gpus=16", "trainer=fsdp_multinode"], 16, 2, 8), (["gpus=16"], 16, 2, 8), (["trainer=fsdp_multinode"], 16, 2, 8),
     (["gpus=8", "gpus_per_node=4"], 8, 2, 4), (["gpus=6"], 6, 1, 6)],
)  # fmt: skip
def test_several_nodes_are_planned_node_by_node(
    options: list[str], gpus: int, nodes: int, local: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """No host has a GPU 8: what to type names the GPUs of one node; shards go over all."""
    experiment = "experiment=appworld_qwen36_27b"
    assert plan_script.main([experiment, *options, "json=true"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["experiment"]["gpus"], plan["experiment"]["nodes"]) == (gpus, nodes)
    assert any("ignore the network between nodes" in note for note in plan["notes"]) == (nodes > 1)
    for name, trains, first in (("colocated", local, 0), ("split", local - local // 2, local - local // 2)):
        layout = plan["layouts"][name]
        assert layout["update_bytes"]["weights"] == pytest.approx(2 * 26.896e9 / (trains * nodes), rel=0.01)
        with initialize_config_module("conf", version_base="1.3"):
            config = compose("train", [experiment, *layout["settings"], "run=x"])
        assert sharded(config)
        assert processes(config) == (trains, nodes)
        launch = hydra.utils.instantiate(config.engine.launch)
        assert launch.servers * nodes == layout["servers"]
        named = [int(i) for one in launch.gpus for i in one.split(",")]
        assert set(named) <= set(range(first, local))
        assert len(named) == len(set(named))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("mfu=fast", "mfu is 'fast'; expected an integer or a number"),
        ("gpus=0", "gpus is 0; expected an integer ≥ 1"),
        ("gpus=2.5", "gpus is 2.5; expected an integer ≥ 1"),
        ("gpus=12", "gpus=12: expected at most gpus_per_node=8"),
        ("gpus_per_node=0", "gpus_per_node is 0; expected an integer ≥ 1"),
        ("mfu=2", "mfu is 2; expected a number > 0 and ≤ 1"),
        ("prefill_mfu=nan", "prefill_mfu is nan; expected a number > 0 and ≤ 1"),
        ("decode_efficiency=0", "decode_efficiency is 0; expected a number > 0 and ≤ 1"),
        ("tp_efficiency=1.1", "tp_efficiency is 1.1; expected a number > 0 and ≤ 1"),
        ("sampled_share=-0.1", "sampled_share is -0.1; expected a number > 0 and ≤ 1"),
        ("response_tokens=-9", "response_tokens is -9; expected a number > 0"),
        ("turns=inf", "turns is inf; expected a number > 0"),
        ("reserve=-1", "reserve is -1; expected a number ≥ 0"),
        ("judge_concurrency=1.5", "judge_concurrency is 1.5; expected an integer ≥ 1"),
        ("limits.max_response_tokens=-3", "limits.max_response_tokens is -3; expected an integer ≥ 1"),
        ("foo=1", "'foo': no such option; Valid choices: advantage"),
        ("foo=1", "options of draco plan: decode_efficiency, environment_s, gpu, gpus"),
        ("mfuu=1", "did you mean mfu?"),
        ("+foo=1", "+foo=1 adds an option that nothing reads"),
        ("experiment=nope", "in 'experiment': appworld_paper appworld_qwen25_32b appworld_qwen36_27b"),
    ],
)
def test_what_cannot_be_is_one_line(wrong: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", wrong]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert said in err
    assert err.count("\n") == 1
    assert "search path" not in err
    assert "append" not in err


def test_help_lists_options_and_assumptions(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--help", "-h"):
        assert run(["plan", "policy=tiny", flag]) == 0
        said = capsys.readouterr().out
        assert all(f"    {name} " in said for name in ("gpus", "gpus_per_node", "judge_from", "mfu", "turns"))
        assert "share of peak flops in the update (default: 0.35)" in said
        assert "(default: 17)" in said
        assert "SECTION.OPTION=VALUE" in said
