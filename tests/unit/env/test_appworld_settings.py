"""AppWorld's prompt, the configurations of the paper's runs, and the set-up script."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from support import ROOT, appworld_mini
from support.chat_templates import template
from support.configuration import configuration
from transformers import AutoTokenizer

from draco.env.appworld import AppWorldEnvironment
from draco.env.appworld.inside import data_roots
from draco.env.appworld.prompt import CAVEATS, TokenCounter, cut, opening
from draco.policy.chat import ChatFormat
from draco.policy.policy import Policy
from draco.run.build import build
from draco.update.options import LossOptions

INSIDE = Path(data_roots.__file__).parent


@given(st.lists(st.text(alphabet="ab \u00e9\u4e2d1", max_size=60), max_size=80), st.integers(60, 200))
def test_a_cut_observation_keeps_whole_lines_and_the_limit(lines: list[str], limit: int) -> None:
    text, count = "\n".join(lines), TokenCounter()
    shown = cut(text, limit, count)
    if count(text) <= limit:
        assert shown == text
        return
    assert count(shown) <= limit
    *kept, note = shown.split("\n")
    assert note.startswith("[output cut here: ")
    assert text.startswith("\n".join(kept))


def test_one_endless_line_is_cut_inside() -> None:
    shown = cut("x" * 10**6, 100, TokenCounter())
    assert shown.endswith("[output cut here: 0 of 1 lines shown, limit 100 tokens]")
    assert len(shown) < 1000


def test_tokens_are_the_policys(policy: Policy) -> None:
    count = TokenCounter("pkg://draco.policy.tiny")
    assert count("read all pages") == len(policy.tokenizer("read all pages", add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("thinking", [True, False])
def test_the_prompt_says_how_and_fits(environment: AppWorldEnvironment, thinking: bool) -> None:
    (task,) = environment.tasks("train")
    system, user = opening(task, thinking=thinking)
    assert ("think first" in system.content) is thinking
    assert "{how}" not in system.content
    for needed in ("<code>", "api_docs", "supervisor", "complete_task"):
        assert needed in system.content
    for fact in ("Nora Quill", "n@example.com", "555", "2023-05-18 12:00:00", "Count my notes."):
        assert fact in user.content
    assert TokenCounter()(system.content) + TokenCounter()(user.content) < 4096


def test_judges_are_told_about_the_environment(environment: AppWorldEnvironment) -> None:
    text = " ".join(environment.caveats)
    assert environment.caveats == CAVEATS
    for needed in ("does not end the episode", "short closing turn", "<code>"):
        assert needed in text


EXPERIMENTS = ("appworld_qwen36_27b", "appworld_qwen25_32b")


#: the paper's Table 10: every value by the name of its option
TABLE_10: dict[str, Any] = {
    "advantage.normalize": True, "advantage.std": "sample", "advantage.epsilon": 1e-6,
    "loss.kl_coef": 0.01, "loss.clip_low": 0.2, "loss.clip_high": 0.2, "loss.dual_clip": 3.0,
    "loss.aggregation": "token_mean", "loss.zero_signal": "keep", "loss.tis_cap": None, "policy.reference": "base",
    "tasks_per_step": 16, "group_size": 6, "update.updates_per_batch": 1,
    "optimizer._target_": "torch.optim.AdamW", "lr": 5e-5, "optimizer.lr": 5e-5, "lr_decay_steps": 0,
    "update.decay_steps": 0, "optimizer.weight_decay": 0.01, "update.grad_clip": 1.0,
    "policy.rank": 16, "policy.alpha": 32, "policy.targets": "all-linear", "policy.dropout": 0.0,
    "temperature": 1.0, "limits.max_turns": 50, "limits.max_prompt_tokens": 4096, "limits.max_response_tokens": 24576,
    "limits.max_turn_tokens": 0, "limits.deadline_s": 0, "checkpoint.save_every": 1, "trainer.devices": 8,
    "trainer.strategy._target_": "draco.policy.sharding.ShardedStrategy",
    "engine._target_": "draco.rollout.engines.vllm.VllmEngine",
    "judge.model": "openai/gpt-5.4", "judge.temperature": 0.1, "judge.plan": "paper", "env.name": "appworld",
    "env.train_split": "train", "env.step": "turn", "env.environment.observation_tokens": 3000,
    "eval.split": "test_normal", "eval.temperature": 1.0,
}  # fmt: skip

OF_ONE: dict[str, dict[str, Any]] = {
    "appworld_qwen36_27b": {
        "policy.path": "Qwen/Qwen3.6-27B", "steps": 100, "env.thinking": True,
        "policy.template_kwargs": {"enable_thinking": True, "preserve_thinking": True},
    },
    "appworld_qwen25_32b": {
        "policy.path": "Qwen/Qwen2.5-32B-Instruct", "steps": 75, "env.thinking": False, "policy.template_kwargs": None,
    },
}  # fmt: skip


SETTINGS = [
    ("static", "uniform"), ("static", "step"), ("dynamic", "uniform"), ("dynamic", "step"), ("outcome", "uniform"),
    ("random", "uniform"), ("self_judge", "step"),
]  # fmt: skip


@pytest.mark.parametrize("experiment", EXPERIMENTS)
@pytest.mark.parametrize(("rubric", "credit"), SETTINGS)
def test_the_papers_runs_hold_table_10(experiment: str, rubric: str, credit: str, data: Path) -> None:
    """Every value, whatever the setting; then the parts are built: only weights and servers are not there."""
    here = (f"env.python={sys.executable}", f"env.data={data}", f"run={data.parent / 'run'}")
    config = configuration(f"experiment={experiment}", f"rubric={rubric}", f"credit={credit}", *here)
    for name, value in {**TABLE_10, **OF_ONE[experiment]}.items():
        assert OmegaConf.select(config, name) == value, name
    assert (config.rubric.name, config.credit.name) == (rubric, credit)
    assert config.steps % (90 // config.tasks_per_step) == 0  # whole epochs of 90 tasks, the remainder dropped
    if rubric == "static":
        assert config.rubric.criteria == "appworld"
    if rubric == "self_judge":
        assert (config.rubric.k, config.rubric.thinking) == (3, True)
    parts = build(config, sharded=True)
    assert parts.environment.name == "appworld"
    assert parts.engine.sleep is True  # type: ignore[attr-defined]  # it shares the GPUs with the trainer
    assert {f.name for f in fields(LossOptions)}.isdisjoint({"entropy_coef", "entropy"})  # bonus 0: there is none
    parts.close()


def test_the_settings_differ_in_reward_and_credit_alone() -> None:
    def flat(*overrides: str) -> dict[str, Any]:
        config = configuration("experiment=appworld_qwen36_27b", "run=x", *overrides)
        resolved = OmegaConf.to_container(config, resolve=True)
        assert isinstance(resolved, dict)
        return {str(k): v for k, v in resolved.items() if k not in ("rubric", "credit")}

    base = flat()
    for rubric, credit in SETTINGS:
        assert flat(f"rubric={rubric}", f"credit={credit}") == base, (rubric, credit)


def test_qwen36_thinks_and_keeps_what_it_thought() -> None:
    """Its stock template takes past thinking out again, which is refused: the arguments prevent it."""
    tokenizer = AutoTokenizer.from_pretrained(str(files("draco.policy") / "tiny"))
    tokenizer.chat_template = template("qwen3_6")
    for config in (configuration("experiment=appworld_qwen36_27b", "run=x"), configuration("policy=qwen36_27b")):
        chat = ChatFormat(tokenizer, **config.policy.template_kwargs)
        assert chat.opened  # the template opens <think> for the agent


def test_desk_keeps_its_own_settings() -> None:
    config = configuration("rubric=static", "run=x")
    assert (config.rubric.criteria, config.engine.env_threads) == ("desk", 0)


def test_the_setup_script_explains_itself_and_refuses_nonsense(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "setup_appworld.sh"
    said = subprocess.run([script, "--help"], capture_output=True, text=True, check=True).stdout
    assert "--data download" in said
    assert "set -euo" not in said
    wrong = subprocess.run([script, "--dta", "mini"], capture_output=True, text=True, check=False)
    assert (wrong.returncode, "unknown argument --dta" in wrong.stderr) == (1, True)


@pytest.mark.parametrize("program", [*sorted(INSIDE.glob("*.py")), Path(appworld_mini.__file__)])
def test_what_runs_inside_appworld_imports_nothing_of_draco(program: Path) -> None:
    assert "import draco" not in program.read_text()
    assert "from draco" not in program.read_text()
