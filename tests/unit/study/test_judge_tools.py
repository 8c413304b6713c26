"""The scripts around the judge, on the embedded environment; and the packaged sets."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import bench_judge
import pytest
from support.factory import CRITERIA, criterion, group, judged, verdicts
from support.fake_judge import FakeJudge, client

from callbacks.rubric.static import load_criteria
from draco.core.errors import ConfigError, JudgeReplyError
from draco.core.types import Criterion, Judgement
from draco.judge.pipeline import JudgePipeline
from draco.study import base_rollouts
from draco.study.authoring import prune, rate, reduce_to_one
from draco.study.verbs import author, redteam

TITLES = """Protects secret values · Stops after completion · Fetches complete data · Completes task properly · Computes
from live data · Handles time correctly · Processes items completely · Targets exact items · Applies correct selection
logic · Uses complete working set · Performs required actions · Verifies action outcome · Uses exact action content ·
Uses correct data source · Authenticates correctly · Retrieves needed credentials · Uses runnable Python · Checks docs
when needed · Recovers from failures · Uses valid API calls · Uses allowed tools only"""


def test_the_appworld_set_has_the_papers_titles_in_its_order() -> None:
    found = load_criteria("appworld")
    assert [c.title for c in found] == [" ".join(t.split()) for t in TITLES.split("·")]
    assert len({c.evaluator_instruction for c in found}) == 21
    assert all("Fail if" in c.evaluator_instruction for c in found)


def judgement(*rows: tuple[int, ...]) -> Judgement:
    return judged(group(len(rows[0])), CRITERIA, verdicts(rows))


def test_rating_and_pruning() -> None:
    """Two tasks of four rollouts; by hand."""
    rated = rate(CRITERIA, [judgement((1, -1, -1, 0), (1, 1, 1, 1)), judgement((0, 0, 0, 0), (1, -1, 1, 1))])
    assert [(r.applicable, r.discriminative, r.failure_rate) for r in rated] == [(3 / 8, 0.5, 2 / 3), (1.0, 0.5, 1 / 8)]
    assert [r.criterion for r in prune(rated, 0.0, 0.0, 9)] == list(CRITERIA)
    assert [r.criterion for r in prune(rated[::-1], 0.0, 0.0, 1)] == [CRITERIA[0]]
    assert [r.criterion for r in prune(rated, 0.5, 0.0, 9)] == [CRITERIA[1]]
    assert prune(rated, 0.0, 0.6, 9) == []
    assert rate(CRITERIA, [])[0].failure_rate == 0.0


def test_reduce_goes_in_rounds() -> None:
    fake = FakeJudge()
    fake.overrides["reduce"] = lambda text, n: json.dumps({"criteria": [criterion(f"Kind {n}"), criterion("Other")]})
    pipeline = JudgePipeline(client(fake), secret=b"0123456789abcdef")
    many = [Criterion(f"Title {i}", "d", "i") for i in range(100)]
    found = asyncio.run(reduce_to_one(pipeline, many))
    assert fake.phases() == ["reduce"] * 3  # 60 + 40, then 4
    assert [c.title for c in found] == ["Kind 3", "Other"]
    with pytest.raises(JudgeReplyError, match="nothing that the rollouts"):
        asyncio.run(reduce_to_one(pipeline, []))


def test_authoring_on_desk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "set.yaml"
    arguments = [f"out={out}", "tasks=3", "samples=4", "discriminative=0"]
    author.main(arguments)
    found = load_criteria(str(out))
    desk = {c.title: c for c in load_criteria("desk")}
    assert found
    assert all(desk[c.title].description == c.description for c in found)
    rates = [float(line.split("|")[2].strip(" %")) for line in out.with_suffix(".md").read_text().splitlines()[2:]]
    assert rates == sorted(rates, reverse=True)
    with pytest.raises(ConfigError, match="exists"):
        author.main(arguments)
    with pytest.raises(ConfigError, match=r"^out=VALUE is missing: YAML file"):
        author.main(["tasks=3"])
    assert "criteria by failure rate" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["tasks=0", "samples=x", "most=0", "applicable=x", "discriminative=2"])
def test_authoring_refuses_a_bad_number_before_anything_is_sampled(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_rollouts, "sample_groups", lambda *a: pytest.fail("rollouts were sampled"))
    name, value = option.split("=")
    with pytest.raises(ConfigError, match=f"^{name} is '?{value}'?; expected a"):
        author.main([f"out={tmp_path / 'set.yaml'}", option])


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("attacks", "^attacks: expected key=value"),
        ("--verbose", "^--verbose: expected key=value"),
        ("judge.modle=m", "no such option; did you mean judge.model"),
        ("+judgee=m", "adds an option that nothing reads; did you mean judge"),
        ("judge=nope", "in 'judge': litellm scripted$"),
        ("judge=litellm", "^judge.model is missing"),
    ],
)
@pytest.mark.parametrize("script", [author, bench_judge, redteam])
def test_what_is_no_option_is_named_with_the_choices(script: ModuleType, argument: str, message: str) -> None:
    needed = ["out=/nowhere/set.yaml"] if script is author else []
    with pytest.raises(ConfigError, match=message):
        script.main([*needed, argument])


def test_bench_ends_with_its_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_judge.main(["quick=true", "tasks=3", "samples=4"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["uncached_token_ratio"] <= 0.5
    assert last["agreement"] >= 0.98
    assert last["groups"] == 3


@pytest.mark.judge
def test_redteam_counts_flips(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert redteam.main(["attacks=4", "judge.plan=lean"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == {"attacks": 4, "won": 0, "failed": 0, "flip_rate": 0.0, "control_flip_rate": 0.0}
    # a judge that believes what it reads
    from draco.env.desk.judge import handler

    honest = handler.reply

    def gullible(prompt: Any) -> Any:
        answer = honest(prompt)
        if "evaluator" in prompt.blocks[0]:
            for item in answer.get("verdicts", []):
                item["score"] = 1
        return answer

    monkeypatch.setattr(handler, "reply", gullible)
    assert redteam.main(["attacks=4"]) == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["won"], last["flip_rate"]) == (1, round(2 / 12, 4))  # demand-en says evaluator
