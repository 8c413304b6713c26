"""Every combination of configuration groups composes and builds; bad input is named before anything expensive."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from support import ROOT
from support.configuration import configuration

from callbacks.credit.step import StepLevelCredit
from callbacks.rollout import AgentRollout
from callbacks.rubric.dynamic import DynamicRubric
from draco.config.choices import explained, refuse_beside_self_judge, refuse_unread
from draco.config.rules import check
from draco.core.errors import ConfigError, StageError
from draco.env.desk import DeskEnvironment
from draco.module import GRPOModule
from draco.policy.policy import Policy
from draco.rollout.loop import Limits
from draco.run.build import build, check_optimizer
from draco.run.folder import prepare, redacted, resume_config
from draco.run.loader import select_tasks
from draco.run.train import train
from draco.update.options import LossOptions

CONF = ROOT / "conf"


def options(group: str) -> list[str]:
    return sorted(p.stem for p in (CONF / group).glob("*.yaml"))


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
    given = [f"{group}={option}", f"run={tmp_path}"]
    if option == "appworld_paper":  # the environment's tokenizer is the policy's, which this base does not name
        given.append("policy.path=x")
    missing = OmegaConf.missing_keys(configuration(*given))
    assert missing <= {"judge.model", "rubric.judge.model", "policy.path"}
    filled = [f"{key}=x" for key in missing if "rubric" not in key]
    OmegaConf.to_container(configuration(*given, *filled), resolve=True)


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


def said(*overrides: str) -> str:
    """What the command line says about a configuration that Hydra or draco refuses."""
    try:
        refuse_unread(configuration(*overrides), overrides, ())
    except ConfigError as error:
        return str(error)
    except HydraException as error:
        return explained(error, overrides)
    return ""


@pytest.mark.parametrize("given", [["--config-dir", "examples/conf"], ["--config-dir=examples/conf"]])
def test_an_unknown_option_of_a_group_of_ones_own_is_answered_from_that_group(
    given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CONF.parent)
    error = ConfigCompositionException("Could not override 'credit.normalize'.")
    answer = explained(error, [*given, "credit=discounted", "credit.normalize=false"])
    assert answer.endswith("no such option; Valid choices in credit: gamma, name, std")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("stepz=3",), ("Could not override 'stepz'", "did you mean steps?", "group_size", "experiment")),
        (("crdit=step",), ("did you mean credit?", "Valid choices: ")),
        (("loss.klcoef=1",), ("did you mean loss.kl_coef?", "Valid choices in loss: aggregation, ")),
        # the options of the policy that was chosen, not of the default one
        (("policy=smollm2", "policy.gguf=x"), ("did you mean policy.gguf_file?",)),
        (("rubric=nonsense",), ("Could not find 'rubric/nonsense'", "dynamic outcome random self_judge static")),
        (("+stepz=3",), ("+stepz=3 adds an option that nothing reads; did you mean steps?",)),
        (("++crdit=step",), ("did you mean credit?",)),
        (("+nothing.like=it",), ("nothing reads",)),
        (("+eval.task=3",), ("did you mean eval.tasks? Valid choices in eval: before, every",)),
    ],
)
def test_an_unknown_option_is_answered_with_the_valid_ones(overrides: tuple[str, ...], words: tuple[str, ...]) -> None:
    text = said(*overrides)
    assert "\n" not in text
    assert "use +" not in text  # Hydra's advice: it would be ignored
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("judge.concurrency=2", ": rubric.judge.concurrency=…"),
        ("++judge.max_usd=5", ": +rubric.judge.max_usd=…"),
        ("judge.prices={input: 1, output: 2}", ": +rubric.judge.prices=…"),
        ("judge.max_failed_share=0.5", ": rubric.max_failed_share=…"),
    ],
)
def test_a_judges_options_are_refused_where_the_policy_judges(override: str, instead: str) -> None:
    given = ("rubric=self_judge", "policy=smollm2", "judge.plan=lean", override)
    with pytest.raises(ConfigError) as caught:
        refuse_beside_self_judge(configuration(*given), given)
    assert str(caught.value).startswith(f"{override}: with rubric=self_judge the policy is the judge")
    assert str(caught.value).endswith(instead)
    for fine in (given[:3], (*given[:3], "rubric.judge.concurrency=2"), ("rubric=dynamic", override)):
        refuse_beside_self_judge(configuration(*fine), fine)


@pytest.mark.parametrize(
    "overrides",
    [
        ("+callbacks.mine={_target_: callbacks.health.Health}",),
        ("+policy.template_kwargs={enable_thinking: false}",),
        ("+optimizer.betas=[0.9,0.95]",),
        ("++steps=3",),
        ("+rate=1e-4", "lr=${rate}"),
        ("experiment=desk_quick",),
    ],
)
def test_additions_that_something_reads_stay(overrides: tuple[str, ...]) -> None:
    assert said(*overrides) == ""


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps=", r"^steps is ''; expected an integer ≥ 0$"),
        ("steps=abc", "^steps is 'abc'"),
        ("tasks_per_step=0", "^tasks_per_step is 0"),
        ("group_size=2.5", "^group_size is 2.5; expected an integer ≥ 2$"),
        ("seed=-1", "^seed is -1; expected an integer from 0 to 4294967295$"),
        ("seed=abc", "^seed is 'abc'"),
        ("lr=x", "^lr is 'x'; expected a number ≥ 0 and ≤ 1$"),
        ("lr=-1", "^lr is -1"),
        ("lr=5", "^lr is 5"),
        ("temperature=0", "^temperature is 0; expected a number > 0$"),
        ("eval.temperature=-1", r"^eval\.temperature is -1"),
        ("eval.tasks=-1", r"^eval\.tasks is -1; expected an integer ≥ 1, or null$"),
        ("eval.n=0", r"^eval\.n is 0"),
        ("eval.before=no", r"^eval\.before is 'no'; expected true or false$"),
        ("checkpoint.keep_last=0", r"^checkpoint\.keep_last is 0"),
        ("loss.kl_coef=${nope}", "nope"),
        ("judge=litellm", r"^judge\.model is not set.*add judge\.model=VALUE$"),
        ("policy=hf", r"^policy\.path is not set"),
    ],
)
def test_bad_top_level_options_are_one_line(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        train(configuration(override, f"run={tmp_path / 'run'}"))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_judge_that_nobody_asks_may_be_incomplete() -> None:
    check(configuration("judge=litellm", "rubric=outcome", "run=unused"))


@pytest.mark.parametrize("override", ["optimizer.lr=5", "optimizer.weight_decay=-1"])
def test_the_optimizer_is_tried_before_anything_runs(override: str) -> None:
    parts = build_with(configuration(override, "policy.rank=1"))
    parts.module.configure_model()
    with pytest.raises(ConfigError, match="optimizer"):
        check_optimizer(parts.module)


def test_a_stage_that_is_no_stage_is_named() -> None:
    config = configuration()
    config.credit = {"name": "step", "_target_": "callbacks.health.Health"}
    with pytest.raises(StageError, match="exactly one CreditStage"):
        build_with(config)


def test_a_stage_set_to_null_is_missing() -> None:
    with pytest.raises(StageError, match="exactly one RubricStage among the callbacks, found no") as caught:
        build_with(configuration("~rubric", "judge=litellm"))
    assert "NoneType" not in str(caught.value)


def test_options_that_messages_name_can_be_set() -> None:
    config = configuration("policy.chat_template=x.jinja", "trainer.strategy=ddp", "policy.targets=all-linear")
    assert (config.policy.chat_template, config.trainer.strategy) == ("x.jinja", "ddp")


class Lengths:
    """A policy to which every prompt is 10 tokens."""

    path = "small"

    def __init__(self, context: int | None = None) -> None:
        self.context = context

    def prompt_tokens(self, opening: Any) -> int:
        return 10


def test_a_rollout_fits_into_the_policys_context() -> None:
    """What counts is the longest prompt that there is, not the longest that may be."""

    def select(context: int | None, max_response: int, **more: bool) -> int:
        policy: Any = Lengths(context)
        return len(select_tasks(DeskEnvironment(), policy, "train", 3, 4096, max_response, **more))

    assert select(None, 24576) == select(2048, 2038) == 3
    with pytest.raises(ConfigError, match=r"take 2049 .*small was made for 2048; set limits\.max_response_tokens=2038"):
        select(2048, 2039)
    with pytest.raises(ConfigError, match=r"set a smaller limits\.max_prompt_tokens, or choose a policy with a longer"):
        select(10, 1)
    assert select(2048, 2039, may_outgrow=True) == 3  # a resume, whose limits are what they were


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({}, None),
        ({"max_position_embeddings": 2048, "rope_parameters": {"rope_type": "default"}}, 2048),
        ({"max_position_embeddings": 32768, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 131072),
        (  # Llama 3.1 names what it was stretched to
            {
                "max_position_embeddings": 131072,
                "rope_parameters": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_parameters": {"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192},
            },
            131072,
        ),
    ],
)
def test_a_context_that_was_stretched_counts(config: dict[str, Any], context: int | None) -> None:
    policy: Any = SimpleNamespace(model=SimpleNamespace(config=SimpleNamespace(**config)))
    assert Policy.context.fget(policy) == context  # type: ignore[attr-defined]


def test_overlong_prompts_are_counted_and_the_first_named(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="raise the limit"):
        select_tasks(DeskEnvironment(), Lengths(), "train", None, 5, 5)  # type: ignore[arg-type]
    (record,) = caplog.records
    assert record.getMessage().endswith(" and 85 more")
    assert len(record.getMessage()) < 250


def build_with(config: DictConfig) -> Any:
    config.run = "unused"
    return build(config)


def test_the_scripted_judge_refuses_another_environment() -> None:
    config = configuration()
    config.run, config.env.name = "unused", "elsewhere"
    with pytest.raises(ConfigError, match=r"judge\.model=draco-scripted/desk knows env=desk alone, not env=elsewhere"):
        check(config)


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


@pytest.mark.parametrize("experiment", ["appworld_qwen36_27b", "appworld_qwen25_32b"])
def test_an_experiment_names_its_placement_once_and_goes_without(experiment: str) -> None:
    files = [OmegaConf.load(CONF / "experiment" / f"{name}.yaml").defaults for name in (experiment, "appworld_paper")]
    assert sum("override /placement" in entry for defaults in files for entry in defaults) == 1
    assert configuration(f"experiment={experiment}").engine.launch.gpus == ["0,1,2,3", "4,5,6,7"]
    assert configuration(f"experiment={experiment}", "~placement").engine.launch.gpus is None
