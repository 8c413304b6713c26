"""The embedded environment: tasks, calls, state check, faults and their causal steps."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import combinations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draco.core.errors import ConfigError
from draco.core.types import Task
from draco.env.base import CODE, TOOL_CALL
from draco.env.desk import DeskEnvironment, DeskEvaluator
from draco.env.desk.__main__ import main
from draco.env.desk.agent import Agent, call
from draco.env.desk.apps import APIS, APPS
from draco.env.desk.environment import DeskEpisode
from draco.env.desk.evaluator import FAULTS
from draco.env.desk.parse import BadCall, Call, parse, write
from draco.env.desk.scenarios import FAMILIES, SPLITS, gold_task, pools, task_ids

ENV, EVALUATOR = DeskEnvironment(), DeskEvaluator()
TASKS = [task for split in ENV.splits for task in ENV.tasks(split)]
SIZES = {"train": 90, "dev": 60, "test_normal": 168, "test_challenge": 168}


def play(task: Task, rates: dict[str, float] | None = None, key: str = "") -> tuple[Agent, DeskEpisode]:
    """Let the scripted agent play a task to its end."""
    agent, episode = Agent(gold_task(task.id), rates, Random(key)), ENV.open(task, seed=0)
    observed: list[str] = []
    while not agent.done:
        reply = episode.step([action.body for action in episode.format.parse(agent.turn(observed))])
        observed = list(reply.observations)
    assert reply.done
    assert reply.completed
    return agent, episode


def run(task_id: str, *calls: Call, status: str = "done") -> tuple[DeskEpisode, list[str]]:
    """Run calls one a turn, then complete."""
    gold = gold_task(task_id)
    episode, said = DeskEpisode(gold), []
    for one in (*calls, call("desk.complete", status)):
        said += episode.step([gold.style.parse(write(one, gold.style))[0].body]).observations
    return episode, said


def find(kind: str, split: str = "train") -> tuple[str, int]:
    """A task that has a block of this kind, and the block's position."""
    for task_id in task_ids(split):
        for index, block in enumerate(gold_task(task_id).blocks):
            if block.kind == kind:
                return task_id, index
    raise AssertionError(kind)


def test_there_are_enough_of_everything() -> None:
    assert len(APPS) >= 6
    assert len(APIS) >= 20
    assert len(SPLITS["train"].families) >= 8
    assert {split: len(ENV.tasks(split)) for split in ENV.splits} == SIZES
    assert len({task.id for task in TASKS}) == len(TASKS)
    for split in ENV.splits:
        tasks = ENV.tasks(split)
        scenarios = [task.scenario_id for task in tasks]
        assert {scenarios.count(scenario) for scenario in scenarios} == {3}
        assert {task.difficulty for task in tasks} == {1, 2, 3}
        assert all(task.id.startswith(f"{task.scenario_id}_") for task in tasks)
    styles = {task.metadata["family"]: task.metadata["action_style"] for task in TASKS}
    assert [family for family, style in styles.items() if style == TOOL_CALL.name] == ["unlock_refund"]


def test_the_gold_agent_succeeds_everywhere_in_8_to_20_turns() -> None:
    for task in TASKS:
        agent, episode = play(task)
        outcome = EVALUATOR.evaluate(task, episode.end_state())
        assert outcome.success is True, task.id
        assert outcome.faults == ()
        assert outcome.causal_steps == ()
        assert 8 <= json.loads(episode.end_state())["calls"][-1]["turn"] <= 20
        assert agent.made == []


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_alone_fails_and_is_found_at_its_step(fault: str) -> None:
    made = 0
    for task in TASKS:
        agent, episode = play(task, {fault: 0.5}, f"{fault} {task.id}")
        outcome = EVALUATOR.evaluate(task, episode.end_state())
        expected = tuple(sorted({step for _, step in agent.made}))
        assert outcome.success is not bool(agent.made), task.id
        assert outcome.faults == ((fault,) if agent.made else ()), task.id
        assert outcome.causal_steps == expected, task.id
        made += bool(agent.made)
    assert made >= 50


def test_success_means_no_fault_when_faults_mix() -> None:
    rates = dict.fromkeys(FAULTS, 0.15)
    wins = 0
    for task in TASKS:
        agent, episode = play(task, rates, task.id)
        outcome = EVALUATOR.evaluate(task, episode.end_state())
        assert outcome.success == (not outcome.faults)
        assert outcome.success == (not agent.made)
        assert {step for _, step in agent.made} >= set(outcome.causal_steps)
        wins += bool(outcome.success)
    assert 0 < wins < len(TASKS)


def test_splits_share_no_parameter() -> None:
    for one, other in combinations(ENV.splits, 2):
        for mine, theirs in zip(pools(one), pools(other), strict=True):
            assert not set(mine) & set(theirs)

    def parameters(split: str) -> set[str]:
        texts = [task.instruction for task in ENV.tasks(split)]
        for task in ENV.tasks(split):
            texts += [c["observation"] for c in json.loads(play(task)[1].end_state())["calls"]]
        words = {word for text in texts for word in re.findall(r"[a-z]*\d+|\b[a-z]{4}\b", text)}
        # Ids, a letter and a number, are labels and may be the same.
        return {w for w in words if w in pools(split)[0] or (w.isdigit() and len(w) > 1)}

    train = parameters("train")
    assert len(train) > 100
    for split in ("test_normal", "test_challenge"):
        assert not train & parameters(split)


def test_challenge_families_bring_together_apps_that_training_never_does() -> None:
    def pairs(split: str) -> dict[str, set[tuple[str, ...]]]:
        return {t.metadata["family"]: set(combinations(sorted(t.metadata["apps"]), 2)) for t in ENV.tasks(split)}

    seen = {pair for split in ("train", "dev", "test_normal") for ps in pairs(split).values() for pair in ps}
    challenge = pairs("test_challenge")
    assert len(challenge) >= 8
    assert all(found - seen for found in challenge.values())


def test_tasks_are_the_same_in_another_process() -> None:
    code = (
        "from draco.env.desk import DeskEnvironment as E; import hashlib;"
        "print(hashlib.sha256(repr([E().tasks(s) for s in E().splits]).encode()).hexdigest())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


def test_unknown_names_are_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match="test_challenge"):
        ENV.tasks("nope")
    with pytest.raises(ConfigError, match="train_003_2"):
        gold_task("train_999_1")
    with pytest.raises(ConfigError, match="tool_call"):
        DeskEvaluator(step="word")


def test_task_metadata_tells_nothing_about_success() -> None:
    assert {frozenset(task.metadata) for task in TASKS} == {frozenset({"action_style", "family", "apps"})}


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("apis.pay.confirm(id=open('x'))", "literals only"),
        ("apis.pay.confirm(id='a' + 'b')", "literals only"),
        ("apis.pay.confirm(id=f'{1}')", "literals only"),
        ("apis.pay.confirm(**{'id': 'p12'})", "literals only"),
        ("apis.pay.confirm('p12')", "write one call"),
        ("apis.pay.confirm(id='p1'); apis.pay.confirm(id='p2')", "write one call"),
        ("__import__('os').system(id='x')", "write one call"),
        ("apis.pay.confirm", "write one call"),
        ("", "write one call"),
        ("\0", "write one call"),
        ("apis.mail.read(id=" + "[" * 1000 + ")", "write one call"),
        ("-" * 1999 + "1", "write one call"),
        ("x" * 1_000_000, "too long"),
        ("apis.mail.fly(id='m12')", "no such api"),
        ("apis.mail.read(name='m12')", "bad arguments"),
        ("apis.mail.read(id=12)", "bad arguments"),
        ("apis.mail.list(page=True)", "bad arguments"),
        ("apis.mail.list(page='9' * 9)", "literals only"),
        ("apis.mail.list(page=1.0)", "bad arguments"),
        ("apis.mail.list(page=10**9)", "literals only"),
        ("apis.mail.list(page=1000000000)", "bad arguments"),
    ],
)
def test_bad_code_is_refused(body: str, error: str) -> None:
    with pytest.raises(BadCall, match=error):
        parse(body, CODE)


@pytest.mark.parametrize("body", ["", "[]", '{"name": 1}', '{"name": "mail.read", "arguments": []}', "[" * 1500])
def test_bad_json_is_refused(body: str) -> None:
    with pytest.raises(BadCall, match="write one JSON call"):
        parse(body, TOOL_CALL)


@pytest.mark.parametrize("style", [CODE, TOOL_CALL])
@given(data=st.data())
def test_what_is_written_is_parsed_back(style: object, data: st.DataObject) -> None:
    api = data.draw(st.sampled_from(sorted(APIS)))
    word = st.text("abcdefghijklmnop0123456789 ", max_size=12)
    args = {p: data.draw(st.integers(0, 9999) if p in ("page", "amount", "key") else word) for p in APIS[api]}
    fmt = CODE if style is CODE else TOOL_CALL
    assert parse(fmt.parse(write(Call(api, args), fmt))[0].body, fmt) == Call(api, args)


@settings(max_examples=150, deadline=None)
@given(bodies=st.lists(st.one_of(st.text(), st.binary().map(repr), st.sampled_from([f"apis.{a}()" for a in APIS]))))
def test_no_input_raises_and_every_action_gets_one_observation(bodies: list[str]) -> None:
    for task_id in ("train_000_1", "train_008_1"):
        episode = DeskEpisode(gold_task(task_id))
        reply = episode.step(bodies)
        assert len(reply.observations) == len(bodies)
        assert all(text.startswith("error: ") for text in reply.observations)
        assert EVALUATOR.evaluate(gold_task(task_id).task, episode.end_state()).success is False


def test_mistakes_change_nothing_and_come_back_as_observations() -> None:
    task_id, index = find("pay")
    facts = gold_task(task_id).blocks[index].facts
    _, said = run(
        task_id,
        call("pay.confirm", "p00"),
        call("pay.send", "nobody", 5),
        call("mail.read", "m00"),
        call("contacts.find", "nobody"),
        call("mail.list", 99),
        call("calendar.book", facts["name"], "t00"),
        call("desk.complete", "maybe"),
    )
    assert said[:7] == [*["error: no such id"] * 3, "none", said[4], "error: no such id", "error: no such status"]
    assert said[4] in ("error: no such page", "none")


def test_nothing_can_be_done_after_completion() -> None:
    task_id, _ = find("pay")
    episode, _ = run(task_id)
    before = json.loads(episode.end_state())["effects"]
    reply = episode.step(['apis.notes.add(text="x")'])
    assert reply.observations == ("error: already completed",)
    assert reply.done
    assert json.loads(episode.end_state())["effects"] == before


def test_deleting_moves_no_page() -> None:
    task_id, index = find("clean")
    ids = gold_task(task_id).blocks[index].facts["ids"]
    _, said = run(
        task_id, call("mail.list", 2), call("mail.delete", ids[0]), call("mail.list", 2), call("mail.list", 1)
    )
    assert said[0] == said[2]
    assert ids[0] not in said[3]


def test_a_cancelled_mistake_does_no_harm() -> None:
    task_id, index = find("pay")
    gold = gold_task(task_id)
    facts = gold.blocks[index].facts
    held = gold.world.fresh["p"][0]
    episode, said = run(task_id, call("pay.send", facts["wrong"], facts["amount"]), call("pay.cancel", held))
    assert said[:2] == [f"held {held}", "cancelled"]
    outcome = EVALUATOR.evaluate(gold.task, episode.end_state())
    assert outcome.faults == ("stops_early",)


def test_giving_up_and_never_finishing_are_told_apart() -> None:
    task_id, _ = find("pay")
    episode, _ = run(task_id, status="fail")
    assert episode.step(["apis.mail.list(page=1)"]).failed
    assert EVALUATOR.evaluate(gold_task(task_id).task, episode.end_state()).faults == ("gave_up",)
    idle = DeskEpisode(gold_task(task_id))
    assert EVALUATOR.evaluate(gold_task(task_id).task, idle.end_state()).faults == ("unfinished",)


def test_a_secret_is_found_however_it_is_spelled() -> None:
    task_id, index = find("vault")
    facts = gold_task(task_id).blocks[index].facts
    spelled = "-".join(str(facts["key"]))
    episode, _ = run(task_id, call("notes.add", f"it is {spelled}!"))
    assert "restates_secret" in EVALUATOR.evaluate(gold_task(task_id).task, episode.end_state()).faults


def test_keys_are_checked() -> None:
    task_id, index = find("vault")
    facts = gold_task(task_id).blocks[index].facts
    _, said = run(task_id, call("files.open", facts["name"], facts["key"] + 1), call("files.open", "nobody", 1))
    assert said[:2] == ["error: wrong key", "error: no such id"]


def test_steps_are_counted_by_turn_or_by_call() -> None:
    task_id = next(t.id for t in ENV.tasks("train") if t.metadata["action_style"] == TOOL_CALL.name)
    gold = gold_task(task_id)
    for key in range(20):
        agent, episode = play(gold.task, {"restates_secret": 1.0}, str(key))
        turn = EVALUATOR.evaluate(gold.task, episode.end_state()).causal_steps
        single = DeskEvaluator(step="tool_call").evaluate(gold.task, episode.end_state()).causal_steps
        calls = json.loads(episode.end_state())["calls"]
        assert turn == tuple(step for _, step in agent.made)
        assert [calls[at - 1]["turn"] for at in single] == list(turn)
        assert all(calls[at - 1]["api"] == "mail.send" for at in single)


def test_a_turn_without_actions_counts_as_a_step() -> None:
    task_id, _ = find("pay")
    episode = DeskEpisode(gold_task(task_id))
    episode.idle()
    episode.step(['apis.desk.complete(status="done")'])
    outcome = EVALUATOR.evaluate(gold_task(task_id).task, episode.end_state())
    assert outcome.causal_steps == (2,)


@pytest.mark.parametrize("state", ["", "{}", "[]", "null", '{"task": "other"}'])
def test_an_unreadable_end_state_is_no_verdict(state: str) -> None:
    outcome = EVALUATOR.evaluate(gold_task("train_000_1").task, state)
    assert outcome.success is None
    assert outcome.error


def test_the_verbose_prompt_lists_every_call() -> None:
    for task_id in ("train_000_1", "train_008_1"):
        system, user = DeskEnvironment(verbose_prompt=True).open(gold_task(task_id).task, seed=0).opening
        assert all(f"apis.{api}(" in system.content for api in APIS)
        assert CODE.open in system.content or TOOL_CALL.open in system.content
        assert user.content == gold_task(task_id).task.instruction


def test_a_person_can_play(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = iter(["what?", '<code>apis.desk.complete(status="done")</code>'])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    assert main(["play", "train_000_1"]) == 0
    shown = capsys.readouterr().out
    assert "error: write one call" in shown
    assert "failure: stops_early (step 2)" in shown
    assert "{" not in shown.splitlines()[-1]
    assert main(["list"]) == main(["list", "dev"]) == 0
    assert main(["list", "nope"]) == main(["play", "nope"]) == main([]) == 2


def test_families_are_told_apart_by_name() -> None:
    assert len(FAMILIES) == len(SPLITS["train"].families) + len(SPLITS["test_challenge"].families)
