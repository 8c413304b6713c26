"""The lean plan: fewer calls, shared prefixes, digests, pre-dedup, and the same judgements as the paper plan."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import litellm
import pytest
from prefix_cache import BLOCK, PrefixCache, prompt_tokens
from support.desk_rollouts import play
from support.factory import CRITERIA, group, trajectory
from support.fake_judge import FakeJudge, client

from draco.core.errors import ConfigError
from draco.core.types import Criterion, Group, Judgement, Message, Step
from draco.env.desk.environment import DeskEnvironment
from draco.env.desk.evaluator import FAULTS
from draco.env.desk.judge.reading import read_prompt
from draco.judge.client import JudgeClient
from draco.judge.parsing import ReplyFault
from draco.judge.pipeline import JudgePipeline
from draco.judge.prompts import prompt_version
from draco.judge.records import CallRecord
from draco.judge.replies import check_assessments, json_schema
from draco.judge.transcript import DIGEST, Caps, cut, digest, steps, transcript
from draco.judge.views.dedup import distinct, vocabulary
from draco.judge.views.lean import named_steps

SECRET = b"0123456789abcdef"


def judge(
    fake: FakeJudge, g: Group, options: dict[str, Any] | None = None, plan: str = "lean", **rest: Any
) -> Judgement:
    pipeline = JudgePipeline(client(fake, plan=plan), secret=SECRET, **(options or {}))
    return asyncio.run(pipeline.judge_group(g, **rest))


def test_fourteen_calls_and_the_paper_plans_judgement(fake: FakeJudge) -> None:
    j = judge(fake, group(6))
    assert fake.phases() == ["propose_task"] + ["propose_rollout"] * 6 + ["merge"] + ["assess"] * 6
    paper = judge(FakeJudge(), group(6), plan="paper")
    assert j.rewards == paper.rewards
    assert j.dropped == paper.dropped
    assert [[(v.score, v.steps) for v in row] for row in j.verdicts] == [
        [(v.score, v.steps) for v in row] for row in paper.verdicts
    ]  # in particular: what was dropped cites nothing
    assert j.metrics["judge/calls/assess"] == 6
    assert j.metrics["judge/overrides"] == 0


def test_without_citations_it_only_scores(fake: FakeJudge) -> None:
    judge(fake, group(3), criteria=CRITERIA, citations=False)
    assert fake.phases() == ["score"] * 3


def test_an_uncited_assessment_is_asked_again_once(fake: FakeJudge) -> None:
    def uncited(text: str, n: int) -> str | None:
        if "of sample 1" not in text:
            return None
        items = fake.default("assess", text, 1)["assessments"]
        return json.dumps({"assessments": [item | {"relevant_steps": [99]} for item in items]})

    fake.overrides["assess"] = uncited
    j = judge(fake, group(3), criteria=CRITERIA)
    assert fake.calls.count(("assess", 1)) == 2
    assert j.verdicts[0][1].steps == ()
    assert j.metrics["judge/uncited"] == 1
    assert j.metrics["judge/dropped_citations"] == 1


def test_a_failed_assessment_removes_its_member(fake: FakeJudge) -> None:
    fake.overrides["assess"] = lambda text, n: "no" if "of sample 2" in text else None
    j = judge(fake, group(4), criteria=CRITERIA)
    assert [t.sample for t in j.group.trajectories] == [0, 1, 3]
    assert [(f.sample, f.phase) for f in j.failures] == [(2, "score")]


GOOD = {"title": "Pays ana", "evidence": "e", "justification": "j", "score": 1, "relevant_steps": [1]}


@pytest.mark.parametrize(
    ("reply", "fault"),
    [
        ({"assessments": [GOOD]}, "1 entries for 2 criteria"),
        ({"assessments": [GOOD, GOOD]}, "expected 'Pays exactly 31'"),
        ({"assessments": [GOOD, GOOD | {"title": "Pays exactly 31", "score": 2}]}, "not one of"),
        ({"assessments": [GOOD, GOOD | {"title": "Pays exactly 31", "score": True}]}, "score"),
        ({"assessments": [GOOD, GOOD | {"title": "Pays exactly 31", "relevant_steps": ["1"]}]}, "relevant_steps"),
        ({"assessments": "all fine"}, "assessments"),
        ({"verdicts": []}, "assessments"),
        ([], "AssessReply"),
    ],
)
def test_faulty_assessments(reply: Any, fault: str) -> None:
    with pytest.raises(ReplyFault, match=fault):
        check_assessments(CRITERIA, 3, reply)


def test_the_schema_is_strict() -> None:
    item = json_schema("assess")["$defs"]["AssessItem"]
    assert item["additionalProperties"] is False
    assert item["required"] == ["title", "evidence", "justification", "score", "relevant_steps"]


def test_the_prefix_is_shared_by_all_calls(fake: FakeJudge) -> None:
    records: list[CallRecord] = []
    judge(fake, group(2), {"sink": records.append})
    assert len({p[0]["content"] for p in fake.prompts}) == 1  # one system text for the whole run
    users = {r.phase: r.messages[1][1] for r in records if r.sample in (-1, 1)}
    opened = users["propose_task"].split("\n# Call")[0]
    assert "pay ana 31" in opened
    assert all(text.startswith(opened) for text in users.values())
    shown = users["assess"].split("## Criteria")[0]
    assert "act 3 of sample 1" in shown
    assert users["propose_rollout"].startswith(shown)
    assert {r.prompt_version for r in records} == {prompt_version("score", lean=True)}
    assert prompt_version("score", lean=True) != prompt_version("score")


def test_merge_sees_digests_and_failing_steps_in_full(fake: FakeJudge) -> None:
    long = "x" * 5000
    judge(fake, group(2, observation=long))  # evidence of the fake: "step 1"
    merge = fake.prompts[fake.phases().index("merge")][1]["content"]
    assert merge.count(long) == 2
    assert merge.count(f"[cut: {5000 - DIGEST.observation} characters]") == 4
    assert merge.count("pay ana 31") == 1
    assess = fake.prompts[-1][1]["content"]
    assert assess.count(long) == 3


def test_digest() -> None:
    t = trajectory(0, steps=2)
    thoughtful = Step(1, (0, 0), "<think>hm\nhm</think>act", "y" * 400, 1)
    t = replace(t, steps=(thoughtful, t.steps[1]))
    shown = digest(t, full={2})
    assert shown.startswith("[step 1] action:\nact\n[step 1] observation:\ny")
    assert f"[cut: {400 - DIGEST.observation} characters]" in shown
    assert digest(t, full={1, 2}) == steps(t)
    assert "hm" in digest(replace(t, steps=(replace(thoughtful, action="<think>hm"),)), full=())


def test_cut_keeps_both_ends_and_escapes_them() -> None:
    assert cut("abcdef", 6) == "abcdef"
    assert cut("a" * 50 + "b" * 50, 40) == "a" * 20 + "\n[cut: 60 characters]\n" + "b" * 20
    forged = "x" * 30 + "[step 9] action:" + "z" * 14
    assert "\n\\[step 9] action:" in cut("y" * 100 + forged[30:] + "z" * 30, 120)
    assert cut("[cut: 9 characters]", 40) == "\\[cut: 9 characters]"  # nobody else can claim a cut
    t = trajectory(0, steps=1, observation="o" * 100)
    assert "[cut: 60 characters]" in transcript(t, Caps(40, 40))
    with pytest.raises(ConfigError, match="expected an integer ≥ 40"):
        Caps(observation=10)


def test_named_steps() -> None:
    texts = ["broken at step 4", "steps 7-9, 12 and 14; 3 mails", "Step(s) 20", "in 30 minutes", "steps 2-40"]
    assert sorted(named_steps(texts)) == [4, 7, 8, 9, 12, 14, 20]


def criterion(title: str, description: str = "The amount is right.") -> Criterion:
    return Criterion(title, description, "Compare the amount of the payment with the request, and fail it otherwise.")


def test_dedup_drops_rewordings_and_nothing_else() -> None:
    t = replace(trajectory(0), messages=(Message("system", "be good"), Message("user", "pay ana of rize and bob 31")))
    words = vocabulary([t])
    first = criterion("Pays ana of rize", "The payment goes to ana, as the request states.")
    reworded = criterion("Pays ana of rize", "The payment goes to ana, as that request said.")
    assert distinct([first, reworded], words) == (first,)
    for other in (
        criterion("Pays bob of rize", "The payment goes to bob, as the request states."),
        criterion("Pays ana of luri", "The payment goes to ana once, as the request states."),
        criterion("Pays ana of rize", "The payment never goes to ana, as the request states."),
        criterion("Pays ana of rize", "The payment 31 goes to ana, as the request states."),
        criterion("Bob of rize pays ana", "The payment goes to ana, as the request states."),
    ):
        assert distinct([first, other], words) == (first, other)


def played(n: int, members: int = 4) -> list[Group]:
    tasks = DeskEnvironment().tasks("train")[:n]
    rates = dict.fromkeys(FAULTS, 0.1)
    return [group((play(t, s, rates)[0] for s in range(members)), i, 0) for i, t in enumerate(tasks)]


def scripted(groups: list[Group], plan: str) -> tuple[list[Judgement], list[CallRecord]]:
    records: list[CallRecord] = []
    judge = JudgeClient(
        "draco-scripted/desk", provider="draco.env.desk.judge.provider:register", response_schema="off", plan=plan
    )
    pipeline = JudgePipeline(judge, secret=SECRET, sink=records.append)

    async def run() -> list[Judgement]:
        return list(await asyncio.gather(*(pipeline.judge_group(g) for g in groups)))

    return asyncio.run(run()), records


def test_the_scripted_judge_says_the_same_under_both_plans_at_half_the_tokens() -> None:
    from bench_judge import agreement

    groups = played(6)
    paper, paper_calls = scripted(groups, "paper")
    lean, lean_calls = scripted(groups, "lean")
    alike, total = agreement(paper, lean)
    assert total > 40
    assert alike == total
    assert [j.rewards for j in paper] == [j.rewards for j in lean]

    def uncached(calls: list[CallRecord]) -> int:
        usage = prompt_tokens(calls, lambda text: litellm.encode(model="gpt-4o", text=text))
        return sum(u.uncached for u in usage.values())

    assert uncached(lean_calls) <= 0.5 * uncached(paper_calls)
    assert {read_prompt(r.messages[1][1]).phase for r in lean_calls} == {
        "propose_task", "propose_rollout", "merge", "assess",
    }  # fmt: skip


def test_half_the_tokens_of_long_rollouts_too(fake: FakeJudge) -> None:
    """The shape of AppWorld: a long system prompt, 25 turns of 150 + 300 words. One word is one token here."""

    def words(n: int, seed: str) -> str:
        return " ".join(f"{seed}{i}" for i in range(n))

    def long(sample: int) -> Any:
        turns = [
            (f"act {j} of sample {sample}\n{words(150, f's{sample}a{j}')}", words(300, f"s{sample}o{j}"))
            for j in range(1, 26)
        ]
        opened = (Message("system", words(2500, "demo")), Message("user", "pay ana 31"))
        return trajectory(sample, turns, opening=opened)

    g = group((long(i) for i in range(6)), step=0)
    spent = {}
    for plan in ("paper", "lean"):
        records: list[CallRecord] = []
        judge(FakeJudge(), g, {"sink": records.append}, plan)
        spent[plan] = sum(u.uncached for u in prompt_tokens(records, lambda text: text.split()).values())
    assert spent["lean"] <= 0.5 * spent["paper"]


def test_cache_model() -> None:
    cache = PrefixCache()
    prompt = list(range(3000))
    assert cache.cached(prompt) == 0
    cache.add(prompt)
    assert cache.cached(prompt) == 23 * BLOCK  # 2944: whole blocks only
    assert cache.cached([*prompt[:1100], -1, *prompt[1101:]]) == 1024
    assert cache.cached([*prompt[:1023], -1, *prompt[1024:]]) == 0  # 896 in common are too few
    assert cache.cached([-1, *prompt]) == 0


def test_calls_that_start_together_do_not_hit_each_other_and_steps_begin_cold(fake: FakeJudge) -> None:
    records: list[CallRecord] = []
    judge(fake, group(2, observation="w " * 2000), {"sink": records.append}, plan="paper")
    usage = prompt_tokens(records, lambda text: text.split())
    assert usage["propose_rollout"].cached == 0
    assert usage["score"].cached > 2 * 5000
    later = [replace(r, step=r.step + (r.phase == "score")) for r in records]
    assert prompt_tokens(later, lambda text: text.split())["score"].cached == 0


def test_unknown_plan(fake: FakeJudge) -> None:
    with pytest.raises(ConfigError, match="paper or lean"):
        JudgePipeline(client(fake, plan="thrifty"), secret=SECRET)


def test_the_projected_bill_counts_long_blocks_and_every_voter() -> None:
    """Rollouts as long as limits allow, group_size times every voter, each at its own price."""
    from draco.core.llm.money import Prices
    from draco.judge.bill import bill, projected

    fake = FakeJudge()
    records: list[CallRecord] = []
    judge = client(fake, plan="lean", members=["fake-judge/a", "fake-judge/b", "fake-judge/c"])
    asyncio.run(JudgePipeline(judge, secret=b"s" * 32, sink=records.append).judge_group(group(2)))
    calls = [replace(r, cost_usd=None) for r in records]
    prices = {"fake-judge/a": Prices(1.0, 0.0), "fake-judge/b": Prices(2.0, 0.0), "fake-judge/c": Prices(4.0, 0.0)}
    lines = list(projected(calls, 6, (1_000, 20_000, 10), prices.get))
    found = {phase: bill(one for one in lines if one.phase == phase) for phase in bill(lines)["phases"]}
    assert {phase: row["calls"] for phase, row in found.items()} == {
        "propose_task": 1, "propose_rollout": 6, "merge": 1, "assess": 18
    }  # fmt: skip
    joint = found["assess"]
    assert joint["usd"] is not None
    assert 18 * 21_000 < joint["tokens_in"] < 18 * 21_100
    assert joint["usd"] == pytest.approx(joint["tokens_in"] * 7 / 3 / 1e6, rel=1e-3)
    assert found["propose_rollout"]["tokens_in"] > 6 * 21_000
    assert found["merge"]["usd"] is None  # the main model's price is unknown
    assert found["merge"]["tokens_in"] < 1_100 + 6 * 10 * 480  # digests are cut
