"""Votes of several judges: rules, ties, reasons, citations, agreement."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import litellm
import pytest
from support.factory import CRITERIA, group
from support.fake_judge import FakeJudge, client

from callbacks.rubric.dynamic import DynamicRubric
from draco.core.errors import ConfigError
from draco.judge.agreement import agreement_rates, count_votes
from draco.judge.client import JudgeClient, JudgeConfigError
from draco.judge.pipeline import JudgePipeline
from draco.judge.records import CallRecord, add_metrics, with_rates
from draco.judge.replies import Attributed, Scored
from draco.judge.votes import RULES, Panel, Voter, panel_of

SECRET = b"0123456789abcdef"


@pytest.mark.parametrize(
    ("rule", "votes", "verdict"),
    [
        ("majority", [1, 1, -1], 1),
        ("majority", [1, 0, -1], -1),  # a tie goes to the lower one
        ("majority", [1, 0], 0),
        ("majority", [0, 0, -1], 0),
        ("unanimous", [1, 1, 1], 1),
        ("unanimous", [1, 1, 0], 0),
        ("unanimous", [1, 1, -1], -1),
        ("unanimous", [0, 0, -1], -1),
    ],
)
def test_rules(rule: str, votes: list[int], verdict: int) -> None:
    assert RULES[rule](votes, [1.0] * len(votes)) == verdict


def test_voters_that_never_agree_weigh_nothing_and_the_lowest_vote_holds() -> None:
    assert RULES["weighted"]([1, 0], [0.0, 0.0]) == 0
    panel = Panel(tuple(Voter(repeat=i) for i in range(2)), "weighted")
    decided = panel.decide({0: [(scored(1, -1, name="a"), None), (scored(-1, 0, name="b"), None)]})
    assert [s.score for s in decided.scored[0]] == [-1, -1]


def scored(*scores: int, name: str) -> tuple[Scored, ...]:
    return tuple(Scored(s, f"e{name}", f"j{name}") for s in scores)


def panel(n: int, rule: str, **options: Any) -> Panel:
    return Panel(tuple(Voter(repeat=i) for i in range(n)), rule, **options)


def test_weighted_votes_count_by_agreement() -> None:
    """Two agree on nearly all of ten cells, the third with nobody: it weighs nothing."""
    a = [1, 1, 1, 1, 1, -1, -1, -1, 1, 0]
    b = [1, 1, 1, 1, 1, -1, -1, -1, -1, 0]
    c = [-1, -1, -1, -1, 0, 1, 1, 1, 0, -1]
    ballots = {0: [(scored(*row, name=n), None) for row, n in ((a, "a"), (b, "b"), (c, "c"))]}
    verdicts = [s.score for s in panel(3, "weighted").decide(ballots).scored[0]]
    assert verdicts == [1, 1, 1, 1, 1, -1, -1, -1, -1, 0]  # cell 9: 1, −1, 0 with weights .45, .45, 0: the lower one
    d = [1, 1, 1, 1, 1, -1, -1, -1, 1, 1]
    ballots[0].append((scored(*d, name="d"), None))
    assert panel(4, "weighted").decide(ballots).scored[0][8].score == 1


def test_reasons_come_from_the_first_voter_that_agrees_or_from_the_first() -> None:
    ballots = {0: [(scored(1, name="a"), None), (scored(-1, name="b"), None), (scored(-1, name="c"), None)]}
    assert panel(3, "majority").decide(ballots).scored[0][0] == Scored(-1, "eb", "jb")
    assert panel(3, "unanimous", first_justifies=True).decide(ballots).scored[0][0] == Scored(-1, "ea", "ja")


def test_citations_are_those_of_half_of_the_agreeing_voters() -> None:
    def ballot(score: int, *steps: int) -> Any:
        return scored(score, name="x"), (Attributed(score, steps, "why", 0),)

    def cited(*ballots: Any) -> tuple[int, ...]:
        return panel(len(ballots), "majority").decide({0: list(ballots)}).attributed[0][0].steps

    assert cited(ballot(1, 2, 3), ballot(1, 3), ballot(-1, 9)) == (2, 3)
    assert cited(ballot(1, 2), ballot(1, 3), ballot(1, 3, 4)) == (3,)
    assert cited(ballot(1, 2), ballot(1, 3), ballot(1, 4)) == (2,)
    assert cited(ballot(0), ballot(0), ballot(1, 4)) == ()


def test_agreement_golden() -> None:
    """Four items, three raters, by hand: P_i = 1, 1, 1/3, 0 → P_a = 7/12; votes 6, 4, 2 of 12."""
    counters = count_votes([[1, 1, 1], [-1, -1, -1], [1, 1, 0], [1, 0, -1]])
    shares = [6 / 12, 4 / 12, 2 / 12]
    chance = sum(p * p for p in shares)
    gwet = sum(p * (1 - p) for p in shares) / 2
    rates = agreement_rates(counters)
    assert rates["judge/vote_agreement"] == pytest.approx(7 / 12)
    assert rates["judge/kappa"] == pytest.approx((7 / 12 - chance) / (1 - chance))
    assert rates["judge/ac1"] == pytest.approx((7 / 12 - gwet) / (1 - gwet))
    assert agreement_rates({}) == {}
    alike = agreement_rates(count_votes([[1, 1], [1, 1]]))
    assert alike == {"judge/vote_agreement": 1.0, "judge/ac1": 1.0}  # κ is 0/0
    halves = with_rates(add_metrics([count_votes([[1, 1, 1], [-1, -1, -1]]), count_votes([[1, 1, 0], [1, 0, -1]])]))
    assert halves["judge/kappa"] == pytest.approx(rates["judge/kappa"])
    assert with_rates(halves)["judge/kappa"] == pytest.approx(rates["judge/kappa"])


def test_members_score_and_the_main_judge_does_the_rest() -> None:
    """Three members; one of them passes everything, two fail sample 1 as well."""
    fake = FakeJudge()
    main = client(fake, members=["fake-judge/a", "fake-judge/b", "fake-judge/c"], ensemble="majority")

    def score(text: str, n: int) -> str | None:
        if "of sample 1" not in text or fake.arguments[-1]["model"] == "c":
            return None
        items = fake.default("score", text, 1)["verdicts"]
        return json.dumps({"verdicts": [item | {"score": -1} for item in items]})

    fake.overrides["score"] = score
    records: list[CallRecord] = []
    judge = JudgePipeline(main, secret=SECRET, sink=records.append)
    j = asyncio.run(judge.judge_group(group(2)))
    assert [[v.score for v in row] for row in j.verdicts] == [[-1, -1], [1, -1]]
    by_phase = {p: {r.model for r in records if r.phase == p} for p in ("merge", "score", "attribute")}
    assert by_phase == {
        "merge": {"fake-judge/m"},
        "score": {"fake-judge/a", "fake-judge/b", "fake-judge/c"},
        "attribute": {"fake-judge/m"},
    }
    assert j.metrics["judge/vote_items"] == 4
    assert j.metrics["judge/vote_agreement"] == pytest.approx((1 + 1 + 1 / 3 + 1 / 3) / 4)
    assert {"judge/kappa", "judge/ac1"} <= j.metrics.keys()


@pytest.mark.parametrize("plan", ["paper", "lean"])
def test_a_failed_member_fails_the_trajectory(plan: str) -> None:
    fake = FakeJudge()
    main = client(fake, members=["fake-judge/a", "fake-judge/b"], plan=plan)
    bad = lambda text, n: "no" if "of sample 2" in text and fake.arguments[-1]["model"] == "b" else None  # noqa: E731
    fake.overrides |= {"score": bad, "assess": bad}
    j = asyncio.run(JudgePipeline(main, secret=SECRET).judge_group(group(3), criteria=CRITERIA))
    assert [t.sample for t in j.group.trajectories] == [0, 1]
    assert [(f.sample, f.phase) for f in j.failures] == [(2, "score")]


@pytest.mark.parametrize(
    "options", [{"members": ["a"]}, {"members": ["a", "a"]}, {"members": ["a", "b"], "ensemble": "mean"}]
)
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        JudgePipeline(client(FakeJudge(), **options), secret=SECRET)


def test_one_judge_logs_no_agreement() -> None:
    j = asyncio.run(JudgePipeline(client(FakeJudge()), secret=SECRET).judge_group(group(2), criteria=CRITERIA))
    assert not any("vote" in name or "kappa" in name for name in j.metrics)


def test_the_call_before_a_run_asks_every_member() -> None:
    fake = FakeJudge()
    stage = DynamicRubric(client(fake, members=["fake-judge/m", "fake-judge/n", "fake-judge/o"]))
    inner = fake.acompletion

    async def by_model(*args: Any, **kwargs: Any) -> Any:
        if gone and kwargs["model"] == "o":
            raise litellm.NotFoundError("no such model", "o", "fake-judge")
        return await inner(*args, **kwargs)

    fake.acompletion = by_model  # type: ignore[method-assign]
    gone = False
    record = stage.ping()
    assert record is not None
    assert record.model == "fake-judge/m"
    assert [a["model"] for a in fake.arguments] == ["m", "n", "o"]
    gone = True
    with pytest.raises(JudgeConfigError, match=r"fake-judge/o.*no such model"):
        stage.check()
    stage.close()


HERE = "http://127.0.0.1:9/v1"


def test_members_are_asked_where_the_judge_is() -> None:
    """A member without an address must never be asked elsewhere than its judge: transcripts would leave the site."""
    own = {"model": "hosted_vllm/b", "api_base": "http://127.0.0.1:8/v1"}
    keyed = {"model": "hosted_vllm/c", "api_key": "c-key-12345"}
    judge = JudgeClient("hosted_vllm/a", api_base=HERE, api_key="a-key-12345", members=["hosted_vllm/a", own, keyed])
    voters = panel_of(judge.members).voters
    places = [(v.endpoint.model, v.endpoint.api_base, v.endpoint.api_key) for v in voters if v.endpoint]
    assert places == [
        ("hosted_vllm/a", HERE, "a-key-12345"),
        ("hosted_vllm/b", "http://127.0.0.1:8/v1", None),  # nobody else gets the judge's key
        ("hosted_vllm/c", HERE, "c-key-12345"),
    ]
    assert judge.redact("c-key-12345") == "[redacted]"
    assert "c-key" not in repr(judge.options)


def test_members_requests_carry_the_address() -> None:
    fake = FakeJudge()
    members = ["fake-judge/m", {"model": "fake-judge/b", "api_base": "http://127.0.0.1:8/v1"}]
    stage = DynamicRubric(client(fake, api_base=HERE, members=members))
    stage.check()
    asked = [(a["model"], a["api_base"]) for a in fake.arguments]
    assert asked == [("m", HERE), ("b", "http://127.0.0.1:8/v1")]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"model": "hosted_vllm/a"}, "judge.api_base"),
        ({"model": "m/a", "members": ["hosted_vllm/a", "hosted_vllm/b"]}, "judge.members"),
        ({"model": "m/a", "fallbacks": ["hosted_vllm/a"]}, "judge.fallbacks"),
    ],
)
def test_a_server_of_ones_own_needs_an_address(
    options: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOSTED_VLLM_API_BASE", raising=False)
    with pytest.raises(ConfigError, match=f"without its address.*{named}"):
        JudgeClient(**options)


@pytest.mark.parametrize("entry", [3, {"name": "x"}, {"model": None}, ""])
def test_a_bad_member_is_named(entry: Any) -> None:
    with pytest.raises(ConfigError, match=r"judge\.members must be"):
        client(FakeJudge(), members=[entry, "b"])
