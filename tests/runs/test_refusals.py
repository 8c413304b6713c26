"""What a user types wrong is one line, before anything is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.runs import QUICK, shell, train

from draco.core.errors import ConfigError
from draco.env.desk import DeskEnvironment


@pytest.mark.parametrize(
    ("argument", "code", "message"),
    [
        ("rubric=nonsense", 2, "dynamic"),
        ("loss.klcoef=1", 2, "did you mean loss.kl_coef?"),
        ("+stepz=3", 2, "nothing reads; did you mean steps?"),
        ("steps=", 2, "error: steps is ''"),
        (f"run={__file__}", 2, "test_refusals.py cannot be made: File exists"),
    ],
)
def test_bad_input_is_one_message_and_a_status(argument: str, code: int, message: str, tmp_path: Path) -> None:
    where = [] if argument.startswith("run=") else [f"run={tmp_path / 'run'}"]
    printed = shell(argument, *where, code=code)
    assert message in printed
    assert "Traceback" not in printed
    assert len(printed.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


BAD = [
    ("group_size=1", "group_size is 1"),
    ("eval.split=nowhere", "test_challenge"),
    ("tasks_per_step=91", "set tasks_per_step to 90 or less"),
    ("limits.max_prompt_tokens=1", "raise the limit"),
    ("limits.max_response_tokens=2048", r"policy\.tiny was made for 2048; set limits\.max_response_tokens=20\d\d"),
    ("policy.adapter=/nowhere", "not a PEFT adapter"),
    ("policy.path=/nowhere", r"policy\.path="),
    ("policy.chat_template=/nowhere", r"policy\.chat_template='/nowhere' cannot be read"),
    ("resume=/nowhere", "no run there"),
    ("loss.zero_signal=maybe", "zero_signal"),
    ("env.step=word", "code_block"),
    ("rubric.criteria=/nowhere", "no static rubric"),
    ("rubric=outcome env.evaluator=null", "rubric=outcome needs the environment's evaluator"),
]


@pytest.mark.parametrize(("argument", "message"), BAD, ids=[a for a, _ in BAD])
def test_bad_input_is_named_before_any_rollout(argument: str, message: str, tmp_path: Path) -> None:
    rubric = ["rubric=static"] if "criteria" in argument else []
    with pytest.raises(ConfigError, match=message):
        train(*rubric, *argument.split(), f"run={tmp_path / 'run'}")
    assert not (tmp_path / "run").exists()  # so that the corrected command may use the name


def test_the_scripted_judge_refuses_a_static_rubric_that_it_has_no_rule_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rubric = tmp_path / "mine.yaml"
    own = "{title: Speaks Latin, description: d, evaluator_instruction: e}"
    rubric.write_text(f"criteria: [{own}]", encoding="utf-8")
    chosen = ("rubric=static", f"rubric.criteria={rubric}", f"run={tmp_path / 'run'}")
    with pytest.raises(ConfigError, match="has a rule for none of the static rubric's criteria"):
        train(*chosen)
    known = "{title: Fetches complete data, description: d, evaluator_instruction: e}"
    rubric.write_text(f"criteria: [{own}, {known}]", encoding="utf-8")
    with pytest.raises(ConfigError, match="set tasks_per_step to 90"):
        train(*chosen, "tasks_per_step=91")
    assert "has no rule for Speaks Latin" in caplog.text


def test_what_a_refused_run_has_started_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment's server, for one: the next job of a sweep runs in the same process."""
    closed: list[Any] = []
    monkeypatch.setattr(DeskEnvironment, "close", lambda environment: closed.append(environment))
    with pytest.raises(ConfigError, match="was made for 2048"):
        train(*QUICK, "limits.max_response_tokens=2048", f"run={tmp_path / 'run'}")
    assert len(closed) == 1


def test_a_group_that_is_null_on_the_command_line_is_one_line() -> None:
    said = shell("experiment=appworld_qwen36_27b", "placement=null", code=2)
    assert "Traceback" not in said
    assert "leave a group out with ~GROUP, here perhaps ~placement" in said
