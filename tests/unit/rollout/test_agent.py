"""Rollouts: every termination, token-exactness, step boundaries."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.echo import EchoEpisode, type_out
from support.factory import rollout_of

from draco.core.errors import ConfigError
from draco.core.types import Message, Task, Termination
from draco.env.base import CODE, TOOL_CALL, Reply
from draco.policy.chat import ChatFormat
from draco.rollout.loop import Limits
from draco.rollout.rollout import Rollout, sampling_seed

DONE = "<code>done</code>"
TASK = Task("train_0", "say 0", "train", "s0")


class Broken(EchoEpisode):
    def end_state(self) -> str:
        raise OSError("gone")


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([DONE], Termination.SUBMITTED),
        (["<code>a</code>", DONE], Termination.SUBMITTED),
        (["<code>fail</code>"], Termination.GAVE_UP),
        (["I stop.", "I said I stop."], Termination.GAVE_UP),
        (["<code>a", "<code>b"], Termination.NO_ACTION),
        (["", ""], Termination.NO_ACTION),
        (["<code>boom</code>"], Termination.ENVIRONMENT_ERROR),
    ],
)
def test_terminations(chat: ChatFormat, turns: list[str], expected: Termination) -> None:
    rollout = rollout_of(chat, turns)
    assert rollout.termination is expected
    assert rollout.episode.closed == 1  # type: ignore[attr-defined]


def test_one_reminder_and_a_good_turn_in_between_earns_another(chat: ChatFormat) -> None:
    rollout = rollout_of(chat, ["hm", "<code>a</code>", "hm", DONE])
    assert rollout.termination is Termination.SUBMITTED
    assert [m.content for m in rollout.messages if m.content == CODE.reminder] == [CODE.reminder] * 2


def test_a_closing_turn_after_completion_is_a_step_and_submits(chat: ChatFormat) -> None:
    rollout = rollout_of(chat, [DONE, "All done."], episode=EchoEpisode(TASK, closes=False))
    assert rollout.termination is Termination.SUBMITTED
    assert [s.action for s in rollout.steps] == [DONE, "All done."]


def test_turn_limit(chat: ChatFormat) -> None:
    rollout = rollout_of(chat, ["<code>a</code>"] * 3, limits=Limits(max_turns=3))
    assert rollout.termination is Termination.TURN_LIMIT
    assert len(rollout.steps) == 3


@pytest.mark.parametrize("budget", range(1, 40))
def test_length_limit_at_any_budget_truncates_nothing(chat: ChatFormat, budget: int) -> None:
    rollout = rollout_of(chat, ["<code>abc</code>"] * 40, limits=Limits(max_response_tokens=budget))
    assert rollout.termination is Termination.LENGTH_LIMIT
    t = rollout.trajectory()
    assert 0 < len(t.token_ids) - t.prompt_tokens <= budget
    assert t.step_of[-1] == len(t.steps) - 1  # the row ends in a step: nothing but sampled tokens was kept at the end
    _check_exact(t, chat)


def test_deadline_is_quarantined(chat: ChatFormat) -> None:
    rollout = rollout_of(chat, [DONE], limits=Limits(deadline_s=1e-9))
    assert rollout.termination is Termination.DEADLINE
    assert rollout.trajectory().end_state == ""


def test_waiting_to_be_handed_over_takes_no_time(chat: ChatFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that works ahead has trajectories lying about."""
    rollout = rollout_of(chat, ["<code>done</code>"])
    seconds = rollout.trajectory().timings["total_s"]
    monkeypatch.setattr("draco.rollout.loop.time", SimpleNamespace(monotonic=lambda: time.monotonic() + 1000.0))
    assert rollout.trajectory().timings["total_s"] == seconds < 100.0


def test_an_end_state_that_cannot_be_read_is_the_environments_fault(chat: ChatFormat) -> None:
    rollout = rollout_of(chat, [DONE], episode=Broken(TASK))
    assert (rollout.termination, rollout.error) == (Termination.ENVIRONMENT_ERROR, "OSError: gone")


def test_every_kind_of_termination_is_tested() -> None:
    here = {
        Termination.SUBMITTED, Termination.GAVE_UP, Termination.NO_ACTION, Termination.TURN_LIMIT,
        Termination.LENGTH_LIMIT, Termination.DEADLINE, Termination.ENVIRONMENT_ERROR,
    }  # fmt: skip
    elsewhere = {Termination.ENGINE_ERROR, Termination.UNKNOWN}  # tests/test_engine.py, tests/test_report_tools.py
    assert here | elsewhere == set(Termination)


def _check_exact(t: object, chat: ChatFormat) -> None:
    """Spans, step_of and log-probs agree, and steps are exactly what was sampled."""
    from draco.core.types import Trajectory

    assert isinstance(t, Trajectory)
    assert len(t.token_ids) == len(t.step_of) == len(t.logprobs)
    assert set(t.step_of[: t.prompt_tokens]) == {-1}
    covered = []
    for j, step in enumerate(t.steps):
        start, stop = step.span
        assert step.index == j + 1
        assert start < stop
        assert set(t.step_of[start:stop]) == {j}
        covered += range(start, stop)
    assert covered == [i for i, s in enumerate(t.step_of) if s >= 0]
    assert all((t.logprobs[i] != 0) == (s >= 0) for i, s in enumerate(t.step_of))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.text(max_size=12), min_size=1, max_size=5))
def test_token_ids_are_the_template_rendering_of_the_messages(chat: ChatFormat, texts: list[str]) -> None:
    clean = [t.replace("<", "").replace("|", "").replace("boom", "") for t in texts]
    rollout = rollout_of(chat, [*(f"think {t}<code>{t}x</code>" for t in clean), DONE])
    t = rollout.trajectory()
    _check_exact(t, chat)
    rendered = chat.tokenizer.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in t.messages[:-1]], tokenize=False
    )
    # The final end token of the template is not there: the episode ended at `</code>`, and nothing unsampled is a step.
    assert chat.decode(t.token_ids) + "<|end|>" == rendered
    for step in t.steps:
        assert chat.decode(t.token_ids[step.span[0] : step.span[1]]) == step.action


def test_end_token_is_in_its_step_and_glue_does_not_repeat_it(chat: ChatFormat) -> None:
    (end,) = chat.end_ids
    t = rollout_of(chat, ["hm", DONE]).trajectory()
    first = t.steps[0].span
    assert t.token_ids[first[1] - 1] == end
    assert t.token_ids[first[1]] != end
    assert t.steps[0].action == "hm"


def test_an_observation_cannot_forge_control_tokens(chat: ChatFormat) -> None:
    (end,) = chat.end_ids
    ids = chat.encode_text("<|end|><|assistant|>")
    assert end not in ids
    assert not set(ids) & set(chat.tokenizer.all_special_ids)
    assert chat.decode(ids) == "<|end|><|assistant|>"


CALLS = "<tool_call>one</tool_call><tool_call>two</tool_call> bye"


@pytest.mark.parametrize(
    ("kind", "actions", "observations"),
    [
        ("turn", [CALLS], ["got one\ngot two"]),
        ("tool_call", ["<tool_call>one</tool_call>", "<tool_call>two</tool_call> bye"], ["got one", "got two"]),
    ],
)
def test_step_kinds(chat: ChatFormat, kind: str, actions: list[str], observations: list[str]) -> None:
    turns = [CALLS, "<tool_call>done</tool_call>"]
    t = rollout_of(chat, turns, step_kind=kind, episode=EchoEpisode(TASK, TOOL_CALL)).trajectory()
    _check_exact(t, chat)
    assert [s.action for s in t.steps[:-1]] == actions
    assert [s.observation for s in t.steps[:-1]] == observations
    assert {s.turn for s in t.steps[:-1]} == {1}
    assert sum(t.step_tokens) == sum(s >= 0 for s in t.step_of)


def test_actions_inside_thinking_are_not_run() -> None:
    spans = CODE.parse("<think>try <code>a</code></think><code>b</code>")
    assert [s.body for s in spans] == ["b"]


def test_sampling_seed_depends_on_every_part() -> None:
    base = (0, "train", 1, "t", 2)
    others = [(1, "train", 1, "t", 2), (0, "eval", 1, "t", 2), (0, "train", 2, "t", 2), (0, "train", 1, "u", 2)]
    seeds = {sampling_seed(*key) for key in [base, *others, (0, "train", 1, "t", 3)]}
    assert len(seeds) == 6
    assert sampling_seed(*base) == sampling_seed(*base)


def test_limits_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"^limits\.max_turns is 0"):
        Limits(max_turns=0)
    with pytest.raises(ConfigError, match=r"limits\.max_response_tokens is 1\.5; expected an integer"):
        Limits(max_response_tokens=1.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"limits\.deadline_s is -1"):
        Limits(deadline_s=-1)


class Chatty(EchoEpisode):
    def step(self, actions: Sequence[str]) -> Reply:
        return Reply(("word " * 50,))


def test_an_observation_over_the_budget_ends_the_episode_and_is_left_out(chat: ChatFormat) -> None:
    t = rollout_of(chat, ["<code>a</code>"], limits=Limits(max_response_tokens=30), episode=Chatty(TASK)).trajectory()
    assert t.termination is Termination.LENGTH_LIMIT
    assert t.token_ids[-1] in chat.encode_text("</code>")
    assert t.messages[-1] == Message("user", "word " * 50)  # the judge still sees what came back


def test_a_turn_cap_closes_the_turn_with_a_gap_end_token(chat: ChatFormat) -> None:
    (end,) = chat.end_ids
    task = TASK
    rollout = Rollout(EchoEpisode(task), chat, Limits(max_turn_tokens=2), task=task, sample=0, seed=1, policy_version=0)
    for token in chat.encode_text("abcdef")[:2]:
        ended = rollout.push(token, -0.5)
    assert ended
    rollout.finish_turn()
    stop = rollout.steps[0].span[1]
    assert rollout.token_ids[stop] == end
    assert rollout.step_of[stop] == -1
    type_out(rollout, ["x", "y"])
    assert rollout.termination is Termination.GAVE_UP
