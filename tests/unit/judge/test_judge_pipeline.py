"""The calls of a group: order, who leaves it, statistics, overrides, citations."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from support.factory import CRITERIA, criterion, group, trajectory
from support.fake_judge import FakeJudge, client

from draco.core.errors import ConfigError, JudgeConfigError
from draco.core.types import Group, Judgement, Termination
from draco.judge.pipeline import JudgePipeline
from draco.judge.records import CallRecord

SECRET = b"0123456789abcdef"


def judge(fake: FakeJudge, g: Group, pipeline_options: dict[str, Any] | None = None, **options: Any) -> Judgement:
    pipeline = JudgePipeline(client(fake), secret=SECRET, **(pipeline_options or {}))
    return asyncio.run(pipeline.judge_group(g, **options))


def test_dynamic_call_order_with_citations(fake: FakeJudge) -> None:
    j = judge(fake, group(6))
    assert fake.phases() == ["propose_task"] + ["propose_rollout"] * 6 + ["merge"] + ["score"] * 6 + ["attribute"] * 6
    assert len(fake.calls) == 20
    assert [c.title for c in j.criteria] == ["Pays ana", "Pays exactly 31"]
    assert j.dropped == (False, True)
    assert j.rewards == (-1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    assert [v.steps for v in j.verdicts[0]] == [(2,)] * 6
    assert [v.steps for v in j.verdicts[1]] == [()] * 6  # dropped: nobody attributed it
    assert j.metrics["judge/calls"] == 20
    assert j.metrics["judge/calls/attribute"] == 6
    assert j.metrics["judge/tokens_in"] == 200
    assert j.metrics["rubric/pass_rate"] == pytest.approx(11 / 12)
    assert j.metrics["rubric/na_share"] == 0.0


def test_dynamic_without_citations_makes_14_calls(fake: FakeJudge) -> None:
    judge(fake, group(6), citations=False)
    assert fake.phases() == ["propose_task"] + ["propose_rollout"] * 6 + ["merge"] + ["score"] * 6


@pytest.mark.parametrize(("citations", "calls"), [(True, ["score"] * 6 + ["attribute"] * 6), (False, ["score"] * 6)])
def test_static_call_order(fake: FakeJudge, citations: bool, calls: list[str]) -> None:
    judge(fake, group(6), criteria=CRITERIA, citations=citations)
    assert fake.phases() == calls


def test_attribution_sees_surviving_criteria_and_their_verdicts_only(fake: FakeJudge) -> None:
    judge(fake, group(2), criteria=CRITERIA)
    text = fake.prompts[-1][1]["content"]
    assert "Pays ana" in text
    assert "Pays exactly 31" not in text
    assert '"score": ' in text


def test_no_attribution_call_when_nothing_survives(fake: FakeJudge) -> None:
    g = group(group(3).trajectories[1:], step=0)
    j = judge(fake, g, criteria=CRITERIA)
    assert fake.phases() == ["score", "score"]
    assert j.rewards == (0.0, 0.0)
    assert j.dropped == (True, True)


def test_shared_prefix_of_calls_on_one_trajectory(fake: FakeJudge) -> None:
    judge(fake, group(2))
    texts = {phase: p for (phase, sample), p in zip(fake.calls, fake.prompts, strict=True) if sample == 1}
    block = texts["score"][1]["content"].split("<<<END")[0]
    assert len(block) > 100
    for phase in ("propose_rollout", "score", "attribute"):
        assert texts[phase][0] == texts["score"][0]
        assert texts[phase][1]["content"].startswith(block)
        instructions = texts[phase][1]["content"].index("# Call:")
        assert texts[phase][1]["content"].index("```json") < instructions


def test_propose_task_sees_the_opening_only_and_merge_all_rollouts(fake: FakeJudge) -> None:
    judge(fake, group(3))
    texts = [p[1]["content"] for p in fake.prompts]
    assert "act 1" not in texts[0]
    assert "be good" in texts[0]
    assert "pay ana 31" in texts[0]
    assert "later" not in texts[0]
    merge = texts[fake.phases().index("merge")]
    assert all(f"act 1 of sample {i}" in merge for i in range(3))
    assert all(f"Found in sample {i}" in merge for i in range(3))


def test_caveats_are_in_every_prompt(fake: FakeJudge) -> None:
    judge(fake, group(2), {"caveats": ("a short closing turn is right",)})
    assert all("a short closing turn is right" in p[0]["content"] for p in fake.prompts)


def test_nothing_about_termination_in_any_prompt(fake: FakeJudge) -> None:
    judge(fake, group(2, termination=Termination.GAVE_UP))
    assert not any("gave_up" in m["content"] or "submitted" in m["content"] for p in fake.prompts for m in p)


def test_quarantined_members_leave_before_any_call(fake: FakeJudge) -> None:
    g = group(3)
    bad = trajectory(1, termination=Termination.DEADLINE)
    j = judge(fake, group((g.trajectories[0], bad, g.trajectories[2])), criteria=CRITERIA)
    assert [t.sample for t in j.group.trajectories] == [0, 2]
    assert [(f.sample, f.phase, f.reason) for f in j.failures] == [(1, "rollout", "deadline")]
    assert j.metrics["judge/failed"] == 0
    assert ("score", 1) not in fake.calls


@pytest.mark.parametrize("phase", ["propose_rollout", "score", "attribute"])
def test_a_failed_call_on_a_member_removes_it_before_statistics(fake: FakeJudge, phase: str) -> None:
    fake.overrides[phase] = lambda text, n: "no" if "of sample 2" in text else None
    j = judge(fake, group(4))
    assert [t.sample for t in j.group.trajectories] == [0, 1, 3]
    assert [(f.sample, f.phase) for f in j.failures] == [(2, phase)]
    assert len(j.rewards) == 3
    assert all(len(row) == 3 for row in j.verdicts)
    assert j.metrics["judge/failed"] == 1
    assert fake.calls.count((phase, 2)) == 2  # the call and one re-ask


def test_dropout_is_recomputed_when_attribution_removes_the_only_member_that_failed(fake: FakeJudge) -> None:
    fake.overrides["attribute"] = lambda text, n: "no" if "of sample 0" in text else None
    j = judge(fake, group(4), criteria=CRITERIA)
    assert [t.sample for t in j.group.trajectories] == [1, 2, 3]
    assert j.dropped == (True, True)
    assert j.rewards == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("phase", ["propose_task", "merge"])
def test_a_failed_proposal_or_merge_skips_the_group(fake: FakeJudge, phase: str) -> None:
    fake.overrides[phase] = lambda text, n: "I cannot"
    j = judge(fake, group(3))
    assert j.group.trajectories == ()
    assert j.rewards == ()
    assert [(f.sample, f.phase) for f in j.failures] == [(i, phase) for i in range(3)]
    assert j.metrics["judge/skipped_groups"] == 1
    assert j.metrics["judge/failed"] == 3


def test_fewer_than_two_left_skips_the_group(fake: FakeJudge) -> None:
    fake.overrides["score"] = lambda text, n: None if "of sample 1" in text else "no"
    j = judge(fake, group(3), criteria=CRITERIA)
    assert j.group.trajectories == ()
    assert {f.sample: f.phase for f in j.failures} == {0: "score", 1: "group", 2: "score"}
    assert j.metrics["judge/skipped_groups"] == 1


def _for(sample: int, item: dict[str, Any]) -> Callable[[str, int], str | None]:
    """An attribution for one sample; the others get the default."""
    return lambda text, n: json.dumps({"attributions": [item]}) if f"of sample {sample}" in text else None


def _override_sample_1(text: str, n: int) -> str | None:
    if "of sample 1" not in text:
        return None
    item = {"title": "Pays ana", "explanation": "x", "verdict": -1, "relevant_steps": [1, 3]}
    return json.dumps({"attributions": [item]})


def test_overrides_are_ignored_in_the_reward_by_default(fake: FakeJudge) -> None:
    fake.overrides["attribute"] = _override_sample_1
    j = judge(fake, group(3), criteria=CRITERIA)
    assert j.rewards == (-1.0, 1.0, 1.0)
    v = j.verdicts[0][1]
    assert (v.score, v.override, v.steps) == (1, -1, (1, 3))
    assert j.metrics["judge/overrides"] == 1
    assert j.metrics["judge/override_rate"] == pytest.approx(1 / 3)


def test_overrides_apply(fake: FakeJudge) -> None:
    fake.overrides["attribute"] = _override_sample_1
    j = judge(fake, group(3), {"attribution_overrides": "apply"}, criteria=CRITERIA)
    assert j.rewards == (-1.0, -1.0, 1.0)
    v = j.verdicts[0][1]
    assert (v.score, v.override, v.steps) == (-1, None, (1, 3))
    assert j.metrics["judge/overrides"] == 1


def test_applied_override_of_the_only_fail_leaves_dropout_alone(fake: FakeJudge) -> None:
    item = {"title": "Pays ana", "explanation": "x", "verdict": 0, "relevant_steps": []}
    fake.overrides["attribute"] = lambda text, n: (
        json.dumps({"attributions": [item]}) if "of sample 0" in text else None
    )
    j = judge(fake, group(3), {"attribution_overrides": "apply"}, criteria=CRITERIA)
    assert j.dropped == (False, True)
    assert j.rewards == (0.0, 1.0, 1.0)
    assert j.metrics["judge/uncited"] == 0  # n.a. needs no step


def test_citations_out_of_range_and_repeated(fake: FakeJudge) -> None:
    item = {"title": "Pays ana", "explanation": "x", "verdict": 1, "relevant_steps": [3, 0, 2, 99, 3, -1]}
    fake.overrides["attribute"] = lambda text, n: (
        json.dumps({"attributions": [item]}) if "of sample 1" in text else None
    )
    j = judge(fake, group(3), criteria=CRITERIA)
    assert j.verdicts[0][1].steps == (2, 3)
    assert j.metrics["judge/dropped_citations"] == 3
    assert fake.calls.count(("attribute", 1)) == 1


def test_uncited_verdict_is_asked_again_once_and_then_counted(fake: FakeJudge) -> None:
    item = {"title": "Pays ana", "explanation": "x", "verdict": 1, "relevant_steps": [99]}
    fake.overrides["attribute"] = lambda text, n: (
        json.dumps({"attributions": [item]}) if "of sample 1" in text else None
    )
    j = judge(fake, group(3), criteria=CRITERIA)
    assert fake.calls.count(("attribute", 1)) == 2
    (again,) = [prompt for prompt in fake.prompts if len(prompt) > 2]
    assert "no step between 1 and 3" in again[-1]["content"]
    assert j.verdicts[0][1].steps == ()
    assert j.rewards == (-1.0, 1.0, 1.0)
    assert j.metrics["judge/uncited_verdict_rate"] == pytest.approx(1 / 3)


def test_uncited_then_broken_keeps_the_first_reply(fake: FakeJudge) -> None:
    item = {"title": "Pays ana", "explanation": "x", "verdict": 1, "relevant_steps": []}
    fake.overrides["attribute"] = lambda text, n: (
        None if "of sample 1" not in text else json.dumps({"attributions": [item]}) if n == 1 else "oops"
    )
    j = judge(fake, group(3), criteria=CRITERIA)
    assert len(j.group.trajectories) == 3
    assert j.metrics["judge/uncited"] == 1


def test_empty_merge_gives_an_inert_group(fake: FakeJudge) -> None:
    fake.overrides["merge"] = lambda text, n: json.dumps({"criteria": []})
    j = judge(fake, group(3))
    assert j.criteria == ()
    assert j.rewards == (0.0, 0.0, 0.0)
    assert "score" not in fake.phases()


def test_propose_cache_run_reuses_the_proposal(fake: FakeJudge) -> None:
    pipeline = JudgePipeline(client(fake), secret=SECRET, propose_cache="run")

    async def twice() -> None:
        await pipeline.judge_group(group(2))
        await pipeline.judge_group(group(2))

    asyncio.run(twice())
    assert fake.phases().count("propose_task") == 1
    assert fake.phases().count("propose_rollout") == 4


def test_configuration_errors_stop_instead_of_removing_members(fake: FakeJudge) -> None:
    import litellm

    fake.overrides["score"] = lambda text, n: litellm.exceptions.AuthenticationError("bad key", "fake-judge", "m")
    with pytest.raises(JudgeConfigError, match="set the provider's key"):
        judge(fake, group(2), criteria=CRITERIA)


def test_records_of_all_calls_reach_the_sink(fake: FakeJudge) -> None:
    records: list[CallRecord] = []
    judge(fake, group(2), {"sink": records.append})
    assert len(records) == len(fake.calls) == 8
    assert {(r.task_id, r.step) for r in records} == {("t1", 7)}
    assert [r.sample for r in records if r.phase == "merge"] == [-1]


@pytest.mark.parametrize(
    "options", [{"secret": b"short"}, {"attribution_overrides": "maybe"}, {"propose_cache": "always"}]
)
def test_bad_options(fake: FakeJudge, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        JudgePipeline(client(fake), **({"secret": SECRET} | options))


def test_more_criteria_than_allowed_is_a_fault(fake: FakeJudge) -> None:
    many = {"criteria": [criterion(f"Title {i}") for i in range(16)]}
    fake.overrides["propose_task"] = lambda text, n: json.dumps(many) if n == 1 else None
    j = judge(fake, group(2))
    assert fake.calls.count(("propose_task", -1)) == 2
    assert "16 criteria, at most 15" in fake.prompts[1][-1]["content"]
    assert len(j.group.trajectories) == 2
