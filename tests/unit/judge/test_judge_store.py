"""The cache and the sums of attempts: what is asked again and what is not, over processes and ranks."""

from __future__ import annotations

import asyncio
import multiprocessing
import sqlite3
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.factory import CRITERIA, group
from support.fake_judge import FakeJudge, client

from draco.core.errors import ConfigError, TrainingStopped
from draco.core.llm.money import Usage
from draco.core.llm.transport import Reply
from draco.core.types import Group, Judgement
from draco.judge.cache import Store, Stored, key_of
from draco.judge.client import JudgeClient
from draco.judge.pipeline import JudgePipeline
from draco.judge.records import CallRecord, call_metrics

SECRET = b"0123456789abcdef"


def stored(reply: str = "r") -> Stored:
    return Stored(Reply(reply, False, "m-1", "fp", Usage(10, 5, 2), None, 0.5), "m", "ok")


def test_a_database_is_whole_before_other_ranks_can_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They open it to read it at the same moment: of two that begin one SQLite locks one out, without waiting."""
    seen: list[list[str]] = []

    class Watched(sqlite3.Connection):
        def executescript(self, script: str) -> sqlite3.Cursor:
            seen.append([p.name for p in tmp_path.glob("rank=*.sqlite")])
            return super().executescript(script)

    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Watched))
    Store(tmp_path, 3).close()
    assert seen[0] == []
    assert [p.name for p in tmp_path.iterdir()] == ["rank=0003.sqlite"]


def judged(
    fake: FakeJudge, run: Path, g: Group | None = None, rank: int = 0, seed: int = 0, **options: Any
) -> tuple[Judgement, list[CallRecord], JudgeClient]:
    """A group, as a new process would judge it."""
    fake.calls.clear()
    judge = client(fake, **({"cache": "read_write"} | options))
    judge.bind(run, seed, rank)
    records: list[CallRecord] = []
    pipeline = JudgePipeline(judge, secret=SECRET, sink=records.append)
    try:
        return asyncio.run(pipeline.judge_group(g or group(3), CRITERIA)), records, judge
    finally:
        judge.close()


def test_a_second_process_asks_nothing_and_judges_alike(fake: FakeJudge, tmp_path: Path) -> None:
    first, before, _ = judged(fake, tmp_path)
    assert len(fake.calls) == 6
    second, after, _ = judged(fake, tmp_path)
    assert fake.calls == []
    assert (second.rewards, second.verdicts) == (first.rewards, first.verdicts)
    assert all(r.from_cache for r in after)
    facts = ("phase", "sample", "outcome", "tokens_in", "tokens_out", "cost_usd", "reply", "prompt_hash", "messages")
    order = [sorted([getattr(r, f) for f in facts] for r in records) for records in (before, after)]  # type: ignore[type-var]
    assert order[0] == order[1]
    assert call_metrics(after)["judge/cache_hits"] == 6
    assert call_metrics(after)["judge/cache_hit_tokens"] == 6 * 15
    assert "judge/cache_hit_tokens" not in call_metrics(before)


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.2}, {"max_tokens": 9}, {"seed": 1}, {"response_schema": "on"}, {"cache": "off"},
        {"g": group(3, step=8)},
    ],
    ids=["temperature", "max_tokens", "seed", "schema", "off", "step"],
)  # fmt: skip
def test_another_question_is_asked(fake: FakeJudge, tmp_path: Path, change: dict[str, Any]) -> None:
    judged(fake, tmp_path)
    judged(fake, tmp_path, **change)
    assert len(fake.calls) == 6


def test_read_only_reads_and_never_writes(fake: FakeJudge, tmp_path: Path) -> None:
    judged(fake, tmp_path, cache="read_only")
    judged(fake, tmp_path, cache="read_only")
    assert len(fake.calls) == 6
    judged(fake, tmp_path)
    judged(fake, tmp_path, cache="read_only")
    assert fake.calls == []


def test_all_ranks_are_read_whatever_the_world_size(fake: FakeJudge, tmp_path: Path) -> None:
    judged(fake, tmp_path, rank=3)
    judged(fake, tmp_path, rank=0)
    assert fake.calls == []
    assert {p.name for p in (tmp_path / "judge").glob("*.sqlite")} == {"rank=0000.sqlite", "rank=0003.sqlite"}


def test_failures_and_faulty_replies_are_not_kept(fake: FakeJudge, tmp_path: Path) -> None:
    fake.overrides["score"] = lambda text, n: "nonsense" if "of sample 0" in text else None
    judged(fake, tmp_path)
    fake.overrides.clear()
    judgement, _, _ = judged(fake, tmp_path)
    assert ("score", 0) in fake.calls
    assert ("score", 1) not in fake.calls
    assert not judgement.failures


def test_a_stored_reply_that_todays_checks_refuse_is_asked_again(tmp_path: Path, fake: FakeJudge) -> None:
    judged(fake, tmp_path)
    store = Store(tmp_path / "judge")
    store._own.execute("UPDATE replies SET reply = ?", (zlib.compress(b"{}"),))
    store.close()
    judgement, _, _ = judged(fake, tmp_path)
    assert len(fake.calls) == 6
    assert not judgement.failures


def test_the_database_counts_every_request_once_and_survives(fake: FakeJudge, tmp_path: Path) -> None:
    fake.overrides["score"] = lambda text, n: "nonsense" if n == 1 else None
    judged(fake, tmp_path)
    judged(fake, tmp_path)  # from the cache: nothing to pay
    store = Store(tmp_path / "judge")
    spent = store.spent()
    assert (spent.attempts, spent.tokens, spent.unpriced) == (9, 9 * 15, 9)
    rows = store._own.execute("SELECT phase, outcome, COUNT(*) FROM attempts GROUP BY 1, 2 ORDER BY 1, 2").fetchall()
    assert rows == [("attribute", "ok", 3), ("score", "ok", 3), ("score", "reask", 3)]
    store.close()


def test_a_cap_counts_what_earlier_processes_spent_on_all_ranks(fake: FakeJudge, tmp_path: Path) -> None:
    judged(fake, tmp_path, rank=1)  # 6 calls of 15 tokens
    more = group(3, step=9)
    with pytest.raises(TrainingStopped, match="max_tokens_total=100"):
        judged(fake, tmp_path, g=more, max_tokens_total=100)
    assert len(fake.calls) == 0
    judged(fake, tmp_path, g=more, max_tokens_total=100_000)
    assert len(fake.calls) == 6


def _write(folder: str, process: int) -> None:
    store = Store(Path(folder))
    for i in range(50):
        store.put(f"{process}-{i}", stored(f"{process}-{i}"))
        store.put(f"common-{i}", stored("same"))
    store.close()


def test_many_processes_write_one_database(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_write, args=(str(tmp_path), p)) for p in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    store = Store(tmp_path)
    for p in range(4):
        for i in range(50):
            assert store.get(f"{p}-{i}") == stored(f"{p}-{i}")
    assert store.get("common-7") == stored("same")
    assert store.get("nothing") is None
    store.close()


def test_keys_differ_in_every_part() -> None:
    parts: tuple[Any, ...] = ({"model": "m"}, "hash", 0, 1, 2, 0)
    keys = {key_of(*parts)}
    for i, other in enumerate(({"model": "n"}, "hush", 1, 2, 3, 1)):
        keys.add(key_of(*parts[:i], other, *parts[i + 1 :]))
    assert len(keys) == 7


def test_a_damaged_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "rank=0000.sqlite").write_bytes(b"this is no database at all" * 100)
    with pytest.raises(ConfigError, match=r"rank=0000.sqlite cannot be used .*judge.cache=off"):
        Store(tmp_path)


def test_a_changed_model_is_noticed_once_and_across_processes(
    fake: FakeJudge, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = ["v1"]
    inner = FakeJudge.acompletion

    async def named(self: FakeJudge, *args: Any, **kwargs: Any) -> Any:
        response = await inner(self, *args, **kwargs)
        response.model, response.system_fingerprint = name[0], "fp"
        return response

    monkeypatch.setattr(FakeJudge, "acompletion", named)
    judged(fake, tmp_path)
    assert not caplog.records
    name[0] = "v2"
    _, _, judge = judged(fake, tmp_path, seed=1)
    assert judge.router.model_changes == 1
    (message,) = [r.getMessage() for r in caplog.records if "now served" in r.getMessage()]
    assert "v2 / fp, before as v1 / fp" in message
    name[0] = "v3"
    with pytest.raises(TrainingStopped, match="on_model_change=stop"):
        judged(fake, tmp_path, seed=2, on_model_change="stop")
    judged(fake, tmp_path, seed=3, on_model_change="stop")  # a resume accepts it
