"""Every combination of configuration groups composes and builds; bad input is named before anything expensive."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.errors import ConfigCompositionException, MissingConfigException
from omegaconf import DictConfig, OmegaConf

from callbacks.credit.step import StepLevelCredit
from callbacks.rollout import AgentRollout
from callbacks.rubric.dynamic import DynamicRubric
from draco.agent import Limits
from draco.env.desk import DeskEnvironment
from draco.errors import ConfigError, StageError
from draco.module import GRPOModule, LossOptions
from draco.run import build
from draco.runfolder import prepare, redacted, resume_config

CONF = Path(__file__).parents[1] / "conf"


def options(group: str) -> list[str]:
    return sorted(p.stem for p in (CONF / group).glob("*.yaml"))


def configuration(*overrides: str) -> DictConfig:
    with initialize_config_module("conf", version_base="1.3"):
        return compose("train", list(overrides))


@pytest.mark.parametrize(("rubric", "credit"), list(product(options("rubric"), options("credit"))))
def test_every_setting_builds(rubric: str, credit: str, tmp_path: Path) -> None:
    policy = ["policy=smollm2"] if rubric == "self_judge" else []  # it refuses the tiny one
    parts = build(configuration(f"rubric={rubric}", f"credit={credit}", f"run={tmp_path}", *policy))
    assert isinstance(parts.module, GRPOModule)
    assert len(parts.callbacks) == 8


@pytest.mark.parametrize(
    ("group", "option"),
    [
        (g, o)
        for g in ("policy", "engine", "judge", "trainer", "logger", "env", "experiment", "placement")
        for o in options(g)
    ],
)
def test_every_option_composes_and_resolves(group: str, option: str, tmp_path: Path) -> None:
    config = configuration(f"{group}={option}", f"run={tmp_path}")
    missing = OmegaConf.missing_keys(config)
    assert missing <= {
        "judge.model", "rubric.stage.judge.model", "policy.path", "engine.servers", "engine.adapter_dir",
    }  # fmt: skip
    filled = [f"{key}=x" for key in missing if "rubric" not in key]
    OmegaConf.to_container(configuration(f"{group}={option}", f"run={tmp_path}", *filled), resolve=True)


def test_defaults_are_the_paper_where_the_policy_does_not_say_otherwise() -> None:
    config = configuration("policy=hf", "policy.path=x")
    assert (config.lr, config.steps, config.tasks_per_step, config.group_size) == (5e-5, 100, 16, 6)
    assert (config.policy.rank, config.policy.alpha, config.loss.kl_coef) == (16, 32, 0.01)
    assert (config.limits.max_turns, config.limits.max_prompt_tokens, config.limits.max_response_tokens) == (
        50, 4096, 24576,
    )  # fmt: skip
    assert (config.optimizer.weight_decay, config["update"].grad_clip, config.temperature) == (0.01, 1.0, 1.0)


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ("rubric=nonsense", MissingConfigException),
        ("nonsense=1", ConfigCompositionException),
        ("loss.nonsense=1", ConfigCompositionException),
    ],
)
def test_unknown_names_are_hydras_errors(override: str, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        configuration(override)
    if "rubric" in override:
        assert "dynamic" in str(caught.value)  # the valid choices


def test_a_stage_that_is_no_stage_is_named() -> None:
    config = configuration()
    config.credit.stage = {"_target_": "callbacks.health.Health"}
    with pytest.raises(StageError, match="exactly one CreditStage"):
        build_with(config)


def build_with(config: DictConfig) -> Any:
    config.run = "unused"
    return build(config)


def test_the_scripted_judge_refuses_another_environment() -> None:
    config = configuration()
    config.env.name = "elsewhere"
    with pytest.raises(ConfigError, match="judge=scripted knows the embedded environment desk alone"):
        build_with(config)


def test_step_credit_without_citations_warns(caplog: pytest.LogCaptureFixture) -> None:
    build_with(configuration("rubric=outcome", "credit=step"))
    assert "rubric=outcome does not give" in caplog.text.replace("which ", "")


def test_parts_are_objects_and_no_configuration_nodes() -> None:
    parts = build_with(configuration())
    rollout = next(c for c in parts.callbacks if isinstance(c, AgentRollout))
    assert type(rollout.limits) is Limits
    assert type(rollout.environment) is DeskEnvironment
    assert type(parts.module.loss_options) is LossOptions


def test_default_is_dynamic_step() -> None:
    kinds = [type(c) for c in build_with(configuration()).callbacks]
    assert DynamicRubric in kinds
    assert StepLevelCredit in kinds


# --- the run folder ---


def test_a_used_folder_is_refused_and_overwrite_deletes_runs_only(tmp_path: Path) -> None:
    run = tmp_path / "run"
    prepare(run, overwrite=False)
    prepare(run, overwrite=False)  # empty: fine
    (run / "precious.txt").write_text("x")
    with pytest.raises(ConfigError, match="exists and is not empty"):
        prepare(run, overwrite=False)
    with pytest.raises(ConfigError, match="holds no draco run"):
        prepare(run, overwrite=True)
    (run / "config.yaml").write_text("")
    prepare(run, overwrite=True)
    assert list(run.iterdir()) == []


def test_secrets_are_redacted() -> None:
    config = OmegaConf.create({"judge": {"api_key": "sk-canary", "model": "m", "max_tokens": 5}, "l": [{"token": "t"}]})
    assert redacted(config) == {
        "judge": {"api_key": "<redacted>", "model": "m", "max_tokens": 5},
        "l": [{"token": "<redacted>"}],
    }


def test_resume_takes_the_runs_own_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("steps: 5\nseed: 3\nresume: null\noverwrite: true\nrun: old\n")
    given = OmegaConf.create({"steps": 9, "seed": 0})
    config = resume_config(tmp_path, given, [f"resume={tmp_path}", "steps=9"])
    assert (config.steps, config.seed, config.overwrite, config.run) == (9, 3, False, str(tmp_path))
    with pytest.raises(ConfigError, match="seed cannot change"):
        resume_config(tmp_path, given, [f"resume={tmp_path}", "seed=1"])
    with pytest.raises(ConfigError, match="no run there"):
        resume_config(tmp_path / "nowhere", given, [])
