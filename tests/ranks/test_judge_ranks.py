"""Limits and caps of a judge that two processes share."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.chat_model import save_chat_model
from support.loopback_judge import Answer, LoopbackJudge
from support.processes import drive
from support.runs import rows_of, same

from draco.env.desk.judge.reading import read_prompt
from draco.env.desk.judge.replies import reply
from draco.judge.cache import Spent, Store
from draco.run.archive import step_folders
from draco.run.checkpoint import checkpoints

pytestmark = pytest.mark.distributed


class Judge(LoopbackJudge):
    """The scripted one over HTTP; it takes a while for each call, so that calls meet."""

    def __init__(self) -> None:
        super().__init__(self.say)

    def say(self, body: dict[str, Any]) -> Answer:
        return Answer(json.dumps(reply(read_prompt(body["messages"][1]["content"]))), delay_s=0.02)


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with Judge() as made:
        yield made


def run(folder: Path, jobs: list[dict[str, Any]], within_s: float = 600) -> list[tuple[list[int], str]]:
    """Exit statuses of the ranks and everything they said, a job."""
    done = drive("ranks_driver", jobs, str(folder), within_s=within_s, OPENAI_API_KEY="key-12345678")
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    said = ["".join((folder / f"{j['name']}.{r}.log").read_text() for r in range(j["ranks"])) for j in jobs]
    return [(codes, text) for (codes, _), text in zip(results, said, strict=True)]


def options(judge: Judge, *more: str) -> list[str]:
    return [
        "steps=3", "tasks_per_step=2", "group_size=3", "policy.rank=4", "eval.before=false", "eval.tasks=1",
        "limits.max_response_tokens=160", "trainer=ddp", "trainer.accelerator=cpu", "judge=litellm",
        "judge.model=openai/loopback", f"judge.api_base={judge.base}", "report=false", *more,
    ]  # fmt: skip


def spent(folder: Path) -> Spent:
    store = Store(folder / "judge")
    found = store.spent()
    store.close()
    return found


def test_a_cap_holds_over_all_ranks_and_a_higher_one_goes_on(judge: Judge, tmp_path: Path) -> None:
    ((codes, said),) = run(tmp_path, [{"name": "whole", "ranks": 2, "overrides": options(judge, "run=whole")}])
    assert codes == [0, 0], said
    cap = int(spent(tmp_path / "whole").tokens * 0.6)
    capped = options(judge, "run=cut", f"judge.max_tokens_total={cap}")
    ((codes, said),) = run(tmp_path, [{"name": "cut", "ranks": 2, "overrides": capped}])
    assert 0 not in codes
    assert f"judge.max_tokens_total={cap} would be passed" in said
    assert cap / 3 < spent(tmp_path / "cut").tokens <= cap
    assert len(checkpoints(tmp_path / "cut")) > 0
    higher = ["resume=cut", "judge.max_tokens_total=null"]
    ((codes, said),) = run(tmp_path, [{"name": "on", "ranks": 2, "overrides": higher}])
    assert codes == [0, 0], said
    assert same(tmp_path / "whole", tmp_path / "cut")
    calls = [[r["judge/calls"] for r in rows_of(tmp_path / n / "metrics.csv")] for n in ("whole", "cut")]
    assert calls[0] == calls[1]


def test_failed_judgements_are_a_share_of_the_batch_of_all_ranks(
    judge: Judge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judge has nothing to say of one task: its rank loses all it has, which is half of the batch."""
    mute: list[str] = []

    def say(body: dict[str, Any]) -> Answer:
        text = body["messages"][1]["content"]
        if "# Call: propose_task" in text:
            mute[:] = mute or [text]
            if text in mute:
                return Answer("")
        return Judge.say(judge, body)

    monkeypatch.setattr(judge, "answer", say)
    jobs = [
        {
            "name": name,
            "ranks": 2,
            "overrides": options(judge, "steps=1", f"judge.max_failed_share={most}", f"run={name}"),
        }
        for name, most in (("on", 0.5), ("off", 0.4))
    ]
    ((codes, said),) = run(tmp_path, jobs[:1])
    assert codes == [0, 0], said
    (row,) = rows_of(tmp_path / "on" / "metrics.csv")
    assert (float(row["judge/failed"]), float(row["judge/members"]), float(row["group/judged"])) == (3, 6, 1)
    assert float(row["judge/tokens_per_s"]) > 0
    mute.clear()
    ((codes, said),) = run(tmp_path, jobs[1:])
    assert 0 not in codes
    assert "3 of 6 trajectories of this batch lost their judgement" in said
    assert not step_folders(tmp_path / "off")


def test_limits_are_those_of_all_ranks_together(judge: Judge, tmp_path: Path) -> None:
    """20 requests a minute: the groups' deadlines end the run before the first minute does."""
    judge.most_busy = 0
    limits = options(judge, "judge.requests_per_min=20", "judge.concurrency=2", "judge.group_deadline_s=25", "run=slow")
    ((codes, said),) = run(tmp_path, [{"name": "slow", "ranks": 2, "overrides": limits}])
    assert 0 not in codes
    assert "judge.max_failed_share" in said
    assert "judge.group_deadline_s" in said
    sent = []
    for rank in range(2):
        with contextlib.closing(sqlite3.connect(tmp_path / "slow" / "judge" / f"rank={rank:04d}.sqlite")) as database:
            sent.append(database.execute("SELECT COUNT(*) FROM attempts WHERE task_id != 'preflight'").fetchone()[0])
    assert max(sent) == 10  # half of the limit each, whatever the other does
    assert judge.most_busy <= 2
    assert not step_folders(tmp_path / "slow")


def test_a_preflight_of_several_ranks(judge: Judge, tmp_path: Path) -> None:
    """Rank 0 asks the judge; nobody waits for the others there."""
    job = {"name": "pf", "ranks": 2, "overrides": options(judge, "run=pf", "preflight=true")}
    ((codes, said),) = run(tmp_path, [job])
    assert codes == [0, 0], said
    assert "seen by 2 process(es)" in said
    assert "call: attribute" in said
    assert not (tmp_path / "pf").exists()


def test_a_preflight_of_several_ranks_tries_its_self_judge_alone(tmp_path: Path) -> None:
    """The policy's servers are rank 0's: to agree on their ports with ranks that wait elsewhere would never end."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no vllm here >&2\nexit 3\n")
    python.chmod(0o755)
    overrides = [
        "trainer=ddp", "trainer.accelerator=cpu", "policy=hf", f"policy.path={save_chat_model(tmp_path / 'model')}",
        "policy.dtype=float32", "rubric=self_judge", "engine=vllm", f"engine.python={python}", "run=pf",
        "preflight=true", "limits.max_response_tokens=4000",
    ]  # fmt: skip
    ((codes, said),) = run(tmp_path, [{"name": "pf", "ranks": 2, "overrides": overrides}], within_s=240)
    assert 0 not in codes
    assert "preflight: judge failed" in said
    assert "no vllm here" in said
