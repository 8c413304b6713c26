"""Runs of several processes: the adapter of one process, resumes on other numbers of them, and how faults end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.models import relative
from support.processes import drive

from draco.run.archive import read_table, step_folders
from draco.run.checkpoint import checkpoints, read_stages
from draco.run.loggers import read_metrics

pytestmark = pytest.mark.distributed

SMALL = [
    "steps=5", "tasks_per_step=3", "group_size=3", "policy.rank=4", "eval.before=false", "eval.tasks=1",
    "limits.max_response_tokens=160", "trainer.accelerator=cpu",
]  # fmt: skip
#: 4 tasks on 2 ranks would be even; with 3, one rank has twice the work of the other
REPLAY = [
    *SMALL, "rubric=random", "credit=uniform",
    "rollout._target_=support.ranks_driver.Replay", "+rollout.archive=source",
    "rubric._target_=support.ranks_driver.Rewards", "update.micro_batch_tokens=300", "loss.kl_coef=0.1",
]  # fmt: skip
DDP = [*REPLAY, "trainer=ddp"]
FSDP = [*REPLAY, "trainer=fsdp", "distributed.gather_for_rollouts=true"]
DDP_ON_CPU = ["trainer=ddp", "trainer.accelerator=cpu"]
LOW = ["policy.dtype=bfloat16", "+policy.gradient_checkpointing=true", "steps=2"]
FAULT = [*DDP, "distributed.timeout_s=15"]


def at2(rank: int, kind: str) -> dict[str, Any]:
    return {"rank": rank, "step": 2, "kind": kind}


JOBS: list[dict[str, Any]] = [
    {"name": "source", "ranks": 1, "overrides": [*SMALL, "rubric=random", "credit=uniform", "run=source"]},
    {"name": "one", "ranks": 1, "overrides": [*REPLAY, "run=one"]},
    {"name": "ddp", "ranks": 2, "overrides": [*DDP, "run=ddp"]},
    {"name": "fsdp", "ranks": 2, "overrides": [*FSDP, "run=fsdp"]},
    {"name": "alone", "ranks": 1, "overrides": [*DDP, "run=alone"]},
    {"name": "low1", "ranks": 1, "overrides": [*REPLAY, *LOW, "run=low1"]},
    {"name": "low2", "ranks": 2, "overrides": [*FSDP, *LOW, "run=low2"]},
    # across numbers of processes and strategies: 2 (FSDP) → 1 → 2 (DDP)
    {"name": "moved1", "ranks": 2, "overrides": [*FSDP, "steps=2", "run=moved"]},
    {"name": "moved2", "ranks": 1, "overrides": ["resume=moved", "steps=3", "trainer=cpu"]},
    {"name": "moved3", "ranks": 2, "overrides": ["resume=moved", "steps=5", *DDP_ON_CPU]},
    {"name": "raised", "ranks": 2, "overrides": [*FAULT, "run=raised"], "fault": at2(1, "raise")},
    {"name": "killed", "ranks": 2, "overrides": [*FAULT, "run=killed"], "fault": at2(1, "kill")},
    {"name": "first", "ranks": 2, "overrides": [*FAULT, "run=first"], "fault": at2(0, "kill")},
    {
        "name": "slow", "ranks": 2, "overrides": [*FAULT, "steps=2", "run=slow"],
        "fault": {"rank": 1, "step": 1, "kind": "slow", "seconds": 20},
    },
    {
        "name": "guard", "ranks": 2, "overrides": [*FAULT, "checkpoint.save_every=50", "run=guard"],
        "fault": {"step": 2, "kind": "guard"},
    },
    {
        "name": "refused", "ranks": 2,
        "overrides": ["trainer=ddp", "trainer.accelerator=cpu", "engine=vllm", "engine.python=none", "run=refused"],
    },
    {"name": "apart", "ranks": 2, "overrides": [*DDP, "run=apart"], "fault": {"rank": 1, "kind": "elsewhere"}},
]  # fmt: skip


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, tuple[list[int], float]]]:
    folder = tmp_path_factory.mktemp("ranks")
    done = drive("ranks_driver", JOBS, str(folder), within_s=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    return folder, {job["name"]: (codes, s) for job, (codes, s) in zip(JOBS, results, strict=True)}


def said(folder: Path, name: str, rank: int) -> str:
    return (folder / f"{name}.{rank}.log").read_text()


def logs(folder: Path, name: str) -> str:
    """The ends of all ranks' logs, for the message of a failed assertion."""
    return "\n".join(f"--- {f.name}\n{f.read_text()[-3000:]}" for f in sorted(folder.glob(f"{name}.*.log")))


def flat(run: Path, file: str = "adapter/adapter_model.safetensors", *, part: str = "") -> torch.Tensor:
    tensors = load_file(checkpoints(run)[-1] / file)
    return torch.cat([tensors[k].flatten().double() for k in sorted(tensors) if part in k])


@pytest.mark.parametrize("name", ["ddp", "fsdp", "moved"])
def test_the_adapter_is_that_of_one_process(ran: Any, name: str) -> None:
    folder, results = ran
    for job, (codes, _) in results.items():
        if job.startswith(name) or job in ("one", "source"):
            assert set(codes) == {0}, logs(folder, job)
    assert relative(flat(folder / name), flat(folder / "one")) < 1e-5
    # The second factors begin at zero: all that is in them was learned.
    learned, expected = (flat(folder / n, part="lora_B") for n in (name, "one"))
    assert float(expected.norm()) > 0.1
    assert relative(learned, expected) < 1e-5
    assert relative(*(flat(folder / n, "optimizer.safetensors") for n in (name, "one"))) < 1e-4
    assert [f.name for f in step_folders(folder / name)] == [f.name for f in step_folders(folder / "one")]
    rows, wanted = (read_metrics(folder / n / "metrics.csv")[1] for n in (name, "one"))
    assert [r["step"] for r in rows] == ["1", "2", "3", "4", "5"]
    for ours, theirs in zip(rows, wanted, strict=True):
        assert float(ours["update/grad_norm"]) == pytest.approx(float(theirs["update/grad_norm"]), rel=1e-3)
        assert ours["update/step_tokens"] == theirs["update/step_tokens"]
    assert read_table(folder / name, "credits").equals(read_table(folder / "one", "credits"))


def test_a_world_of_one_is_a_run_without_distribution_to_the_bit(ran: Any) -> None:
    folder, results = ran
    assert results["alone"][0] == [0], logs(folder, "alone")
    for file in ("adapter/adapter_model.safetensors", "optimizer.safetensors"):
        assert torch.equal(flat(folder / "alone", file), flat(folder / "one", file))


def test_sixteen_bits_and_checkpointed_layers_shard(ran: Any) -> None:
    """FSDP2 multiplies the adapter in bfloat16, one device in float32: alike to the precision of bfloat16."""
    folder, results = ran
    for name in ("low1", "low2"):
        assert set(results[name][0]) == {0}, logs(folder, name)
    norms = [
        [float(r["update/grad_norm"]) for r in read_metrics(folder / n / "metrics.csv")[1]] for n in ("low1", "low2")
    ]
    assert norms[1][0] == pytest.approx(norms[0][0], rel=2e-3)
    learned, expected = (flat(folder / n, part="lora_B") for n in ("low2", "low1"))
    assert float(torch.cosine_similarity(learned, expected, dim=0)) > 0.99
    saved = load_file(checkpoints(folder / "low2")[-1] / "adapter" / "adapter_model.safetensors")
    assert {t.dtype for t in saved.values()} == {torch.float32}


def test_a_checkpoint_holds_every_rank(ran: Any) -> None:
    folder, _ = ran
    for name in ("ddp", "fsdp"):
        saved = checkpoints(folder / name)[-1]
        assert [list(s["Rewards"]["proposals"]) for s in read_stages(saved)] == [["rank 0"], ["rank 1"]]
        streams = [load_file(saved / p / "rng.safetensors") for p in (".", "rank=0001")]
        assert streams[0].keys() == streams[1].keys()
    one = load_file(checkpoints(folder / "one")[-1] / "adapter" / "adapter_model.safetensors")
    many = load_file(checkpoints(folder / "fsdp")[-1] / "adapter" / "adapter_model.safetensors")
    assert {k: v.shape for k, v in one.items()} == {k: v.shape for k, v in many.items()}


def test_ranks_leave_one_run_folder(ran: Any) -> None:
    folder, _ = ran
    names = {p.name for p in (folder / "one").iterdir()}
    assert {p.name for p in (folder / "ddp").iterdir()} == {p.name for p in (folder / "fsdp").iterdir()} == names
    assert "nearest even: 2 or 4" in said(folder, "ddp", 0)
    assert said(folder, "ddp", 1) == ""  # rank 0 speaks


@pytest.mark.parametrize(
    ("name", "victim", "message"),
    [("raised", 1, "RuntimeError: the judge is lost"), ("killed", 1, "killed"), ("first", 0, "gone|killed")],
)
def test_a_fault_of_one_rank_ends_all_with_its_message(ran: Any, name: str, victim: int, message: str) -> None:
    folder, results = ran
    codes, seconds = results[name]
    assert 0 not in codes
    assert seconds < 60  # after the first; how long they took before that says nothing
    log = said(folder, name, 1 - victim)
    assert f"because rank {victim} on" in log
    assert any(m in log for m in message.split("|"))
    assert len(checkpoints(folder / name)) == 2  # what was done is kept


def test_waiting_for_a_slow_rank_is_no_collective(ran: Any) -> None:
    folder, results = ran  # 20 s of silence, a time-out of 15
    assert results["slow"][0] == [0, 0], logs(folder, "slow")


def test_a_run_folder_that_is_not_shared_is_refused(ran: Any) -> None:
    folder, results = ran
    assert 0 not in results["apart"][0]
    logs = said(folder, "apart", 0) + said(folder, "apart", 1)
    assert "is not shared" in logs
    assert "set run= to a folder on a file system that all nodes mount" in logs


def test_what_all_ranks_refuse_rank_0_says_and_nothing_is_left(ran: Any) -> None:
    folder, results = ran
    assert results["refused"][0] == [2, 2]
    assert said(folder, "refused", 0).startswith("error: engine.python=none: no such interpreter")
    assert "because rank 0 on" in said(folder, "refused", 1)
    assert not (folder / "refused").exists()


def test_a_guard_of_all_ranks_leaves_rank_0_the_time_to_save(ran: Any) -> None:
    folder, results = ran
    assert 0 not in results["guard"][0]
    assert [c.name for c in checkpoints(folder / "guard")] == ["step=000002"]
    assert "saved guard/checkpoints/step=000002" in said(folder, "guard", 0)
    assert "because rank 0 on" in said(folder, "guard", 1)
