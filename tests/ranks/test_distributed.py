"""One process and two (gloo, DDP) make the same steps from the same archived trajectories."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ddp_driver
from support.factory import DONE, tasks, typed
from support.models import relative
from support.processes import environment

from draco.core.types import Group, TaskBatch
from draco.policy.policy import Policy
from draco.run.archive import write_step
from draco.update.metrics import merge_metrics

TIMES = ("time/", "update/micro_batches")


def archive(policy: Policy, run: Path) -> None:
    """Groups of unlike length: ranks differ in tokens."""
    groups = []
    for index, task in enumerate(tasks(ddp_driver.TASKS)):
        turns = [["<code>" + "x" * (1 + 7 * index) + "</code>"] * (s + index) for s in range(ddp_driver.MEMBERS)]
        members = typed(policy.chat, [[*t, DONE] for t in turns])
        groups.append(Group(task, tuple(replace(t, task=task) for t in members), index))
    write_step(run, 0, groups, [])


@pytest.fixture(scope="module")
def results(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """[one process, rank 0 of two, rank 1 of two], each with 1 and 2 updates a batch."""
    run = tmp_path_factory.mktemp("ddp")
    archive(policy, run)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(Path(ddp_driver.__file__)), str(run), str(run / "out")],
        env=environment(), capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    one = [ddp_driver.replay(run, 1, updates) for updates in (1, 2)]
    return [one, *(torch.load(run / f"out.{rank}", weights_only=False) for rank in (0, 1))]


@pytest.mark.parametrize("updates", [1, 2])
def test_gradients_and_weights_are_those_of_one_process(results: list[Any], updates: int) -> None:
    one, rank0, rank1 = (r[updates - 1] for r in results)
    assert torch.equal(rank0["weights"], rank1["weights"])
    assert len(one["gradients"]) == len(rank0["gradients"]) == {1: 3, 2: 6}[updates]
    assert relative(rank0["gradients"][0], one["gradients"][0]) < 1e-6
    for ours, theirs in zip(rank0["gradients"], one["gradients"], strict=True):
        assert relative(ours, theirs) < 5e-6  # later ones at weights that differ by rounding, which Adam scales up
    assert relative(rank0["weights"], one["weights"]) < 1e-6


@pytest.mark.parametrize("updates", [1, 2])
def test_steps_are_made_or_skipped_on_every_rank(results: list[Any], updates: int) -> None:
    # 1 update: batch 2 has no token, batch 3 is NaN. 2 updates: batch 1 has one share, batch 3 one good and one NaN.
    expected = {1: (5, 3, 0), 2: (5, 6, 0)}[updates]
    assert [r[updates - 1]["counters"] for r in results] == [expected] * 3


def test_the_records_of_all_ranks_are_one(results: list[Any]) -> None:
    one, rank0, rank1 = (r[0] for r in results)
    assert one["archived"] == rank0["archived"] == [[0, 1, 2]] * 5
    assert str(rank1["metrics"]) == str(rank0["metrics"])  # NaN included
    for ours, theirs in zip(rank0["metrics"], one["metrics"], strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            if not name.startswith(TIMES) and name != "rollout/turns":
                assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-9, nan_ok=True), name


def test_metrics_of_ranks_merge() -> None:
    a = {"rollout/count": 2.0, "rollout/turns": 3.0, "time/rollout_s": 1.0, "judge/calls": 4.0, "judge/cost_usd": 1.0,
         "judge/latency_total_s": 8.0, "judge/latency_s": 2.0}  # fmt: skip
    b = {"rollout/count": 6.0, "rollout/turns": 5.0, "time/rollout_s": 2.0, "judge/calls": 1.0, "judge/cost_usd": 0.5,
         "judge/latency_total_s": 2.0, "judge/latency_s": 2.0}  # fmt: skip
    merged = merge_metrics([a, b])
    assert merged == {
        "rollout/count": 8.0, "rollout/turns": 4.5, "time/rollout_s": 2.0, "judge/calls": 5.0, "judge/cost_usd": 1.5,
        "judge/latency_total_s": 10.0, "judge/latency_s": 2.0,
    }  # fmt: skip
    del b["judge/cost_usd"]
    assert "judge/cost_usd" not in merge_metrics([a, b])  # unknown on one rank is unknown


def test_tasks_are_dealt_out_by_rank() -> None:
    batch = TaskBatch(0, tuple(tasks(5)), 2)
    parts = [batch.shard(rank, 3) for rank in range(3)]
    assert [[t.id for t in p.tasks] for p in parts] == [["t0", "t3"], ["t1", "t4"], ["t2"]]
    assert [[p.position(i) for i in range(len(p.tasks))] for p in parts] == [[0, 3], [1, 4], [2]]
    assert batch.shard(0, 1) is batch
    assert batch.shard(5, 6).tasks == ()
    assert batch.shard(1, 2).shard(1, 2).position(0) == 3
