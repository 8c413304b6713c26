"""A policy in shards rolls out on a server: two processes, a loopback server, adapters that change every step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.fake_vllm import FakeVllm
from support.policies import TINY
from support.processes import drive

from draco.core.background import BackgroundLoop
from draco.policy.policy import Policy
from draco.run.archive import read_table
from draco.run.loggers import read_metrics

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("trainer", ["fsdp", "ddp"])
def test_ranks_share_a_server(trainer: str, staleness: int, tmp_path: Path) -> None:
    server = FakeVllm(Policy(TINY), ["<code>apis.mail.list(page=1)</code>", "<code>apis.notes.list(page=1)</code>"])
    overrides = [
        f"trainer={trainer}", "trainer.accelerator=cpu", "engine=vllm", f"engine.servers=[{server.url}]", "run=run",
        "steps=3", "tasks_per_step=3", "group_size=2", "lr=1e-3", "eval.before=true", "eval.tasks=1", "report=false",
        "rubric=random", "credit=uniform", "limits.max_turns=2", "limits.max_prompt_tokens=500",
        *([f"engine.staleness={staleness}", "loss.tis_cap=2.0", "eval.every=1"] if staleness else []),
    ]  # fmt: skip
    try:
        jobs = [{"name": trainer, "ranks": 2, "overrides": overrides}]
        done = drive("ranks_driver", jobs, str(tmp_path), within_s=600)
    finally:
        server.stop()
        BackgroundLoop.shared().close()
    said = "".join(file.read_text() for file in tmp_path.glob("*.log"))
    assert json.loads(done.stdout.splitlines()[-1])[0][0] == [0, 0], said[-4000:] + done.stderr[-2000:]
    _, rows = read_metrics(tmp_path / "run/metrics.csv")
    # Every rank's rollouts were sampled from the weights that it trained, which were others at every step, or, if they
    # were begun a step ahead, from those before.
    assert len(rows) == 3
    same = rows[:1] if staleness else rows
    assert all(0 < float(row["engine/mismatch_abs"]) < 1e-4 for row in same)
    assert all(row["engine/mismatch_abs"] == "" and float(row["engine/stale_abs"]) > 0 for row in rows[len(same) :])
    sampled = [set(read_table(tmp_path / "run", "trajectories", [s])["policy_version"].to_pylist()) for s in range(3)]
    assert sampled == ([{0}, {0}, {1}] if staleness else [{0}, {1}, {2}])
    assert len(set(server.loads)) == 4
    assert sorted(f.name for f in (tmp_path / "run/adapters").iterdir()) == sorted(server.adapters)
