"""The archive: complete or absent, and rewards and credits follow from it to the last bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.factory import DONE, judged, tasks, typed, verdicts

from callbacks.credit.step import StepLevelCredit
from draco.core.types import Credit, Criterion, Failure, Group
from draco.credit.advantage import standardize
from draco.credit.redistribution import redistribute
from draco.judge.verdicts import dropout, rewards
from draco.policy.chat import ChatFormat
from draco.run.archive import TABLES, read_table, read_trajectories, step_folder, step_folders, write_step


@pytest.fixture
def credit(chat: ChatFormat) -> Credit:
    turns = [["<code>a</code>", "<code>b</code>", DONE], ["<code>abc</code>", DONE], ["<code>é</code>", DONE]]
    scores = [[1, -1, 0], [-1, 1, 1], [1, 1, 1]]
    cited = [[(1,), (2,), ()], [(2, 3), (1,), (2,)], [(1,), (1,), (1,)]]
    table = tuple(
        tuple(replace(v, override=0) if (v.score, v.steps) == (1, (1,)) else v for v in row)
        for row in verdicts(scores, cited, "because")
    )
    criteria = [Criterion(f"criterion {k}", "d", "e") for k in range(3)]
    group = Group(tasks(1)[0], typed(chat, turns), 4, 2)
    return StepLevelCredit().assign_one(judged(group, criteria, table, [Failure(5, "score", "no reply")]))


def test_trajectories_come_back_equal(tmp_path: Path, credit: Credit) -> None:
    group = credit.judgement.group
    write_step(tmp_path, 2, [group], [credit])
    assert read_trajectories(read_table(tmp_path, "trajectories")) == list(group.trajectories)
    assert {p.stem for p in step_folder(tmp_path, 2).iterdir()} == set(TABLES)
    (failure,) = read_table(tmp_path, "failures").to_pylist()
    assert failure == {"step": 2, "group": 4, "sample": 5, "phase": "score", "reason": "no reply"}


def test_rewards_and_credits_follow_from_the_tables_bit_for_bit(tmp_path: Path, credit: Credit) -> None:
    write_step(tmp_path, 2, [credit.judgement.group], [credit])
    verdicts = read_table(tmp_path, "verdicts").to_pylist()
    criteria = read_table(tmp_path, "criteria").to_pylist()
    rows = read_table(tmp_path, "credits").to_pylist()
    scores = torch.tensor([[v["score"] for v in verdicts if v["criterion"] == k] for k in range(len(criteria))])
    kept = dropout(scores)
    assert kept.tolist() == [not c["dropped"] for c in criteria]
    assert rewards(scores, kept).tolist() == [r["reward"] for r in rows]
    advantages = standardize(rewards(scores, kept)).advantages.tolist()
    for i, row in enumerate(rows):
        mine = [v for v in verdicts if v["sample"] == row["sample"] and kept[v["criterion"]]]
        citations = [(0, ()) if v["override"] is not None else (v["score"], v["cited_steps"]) for v in mine]
        again = redistribute(advantages[i], citations, row["step_tokens"])
        assert list(again.per_token) == row["step_advantages"]
        assert list(again.qualities) == row["qualities"]
        assert (again.reason, advantages[i]) == (row["reason"], row["advantage"])


def test_an_overridden_verdict_counts_in_the_reward_and_in_no_quality(credit: Credit) -> None:
    # Criterion 0 passes member 0 at step 1, but the attribution call changed its mind: R keeps it, Q does not.
    assert credit.judgement.rewards[0] == 0.0
    assert credit.qualities[0] == (0.0, 0.0, 0.0)  # what is left: criterion 1, which fails steps 2 and 3


def test_a_half_written_step_is_not_there(tmp_path: Path, credit: Credit) -> None:
    (tmp_path / "archive" / "step=000002.tmp").mkdir(parents=True)
    assert step_folders(tmp_path) == []
    with pytest.raises(FileNotFoundError, match=r"no credits\.parquet"):
        read_table(tmp_path, "credits")
    write_step(tmp_path, 2, [], [credit])
    write_step(tmp_path, 2, [], [credit])  # a restart writes it again
    assert len(step_folders(tmp_path)) == 1
    assert read_table(tmp_path, "credits").num_rows == 3


def test_an_empty_step_can_be_written_and_read(tmp_path: Path) -> None:
    write_step(tmp_path, 0, [], [])
    assert read_table(tmp_path, "trajectories").num_rows == 0
