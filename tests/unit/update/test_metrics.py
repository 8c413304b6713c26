"""Every metric that a step writes is documented, and the shares of time add up."""

from __future__ import annotations

import doctest
import re
from collections.abc import Callable
from types import ModuleType

import pytest
from support import ROOT
from support.echo import EchoEnvironment, TypedEngine
from support.module import Rewards, make_module, make_trainer, script

from callbacks.credit.uniform import UniformCredit
from callbacks.health import Health
from callbacks.rollout import AgentRollout
from draco.core.types import Termination
from draco.credit.redistribution import Reason
from draco.judge import stage as judge_stage
from draco.judge.records import call_metrics
from draco.module import GRPOModule
from draco.policy.policy import Policy
from draco.rollout.loop import Limits
from draco.run.loader import TaskLoader
from draco.update import metrics as figures
from draco.update.metrics import judge_speed, merge_metrics
from draco.update.options import LossOptions


def documented() -> set[str]:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`([a-z]+/[a-z0-9_/A-Z]+)`", text))
    names |= {f"termination/{kind}" for kind in Termination if kind is not Termination.UNKNOWN} | {
        f"credit/{reason}" for reason in Reason
    }
    return names


@pytest.fixture
def module(new_policy: Callable[[], Policy]) -> GRPOModule:
    environment = EchoEnvironment()
    stages = [
        AgentRollout(environment, TypedEngine(script), Limits()),
        Rewards(lambda g: [float(t.sample) for t in g.trajectories]),
        UniformCredit(),
        Health(),
    ]
    built = make_module(new_policy, stages, loss=LossOptions(tis_cap=2.0))
    loader = TaskLoader(environment.tasks("train"), steps=1, tasks_per_step=2, group_size=3, seed=0)
    make_trainer(stages).fit(built, train_dataloaders=loader)
    return built


def test_every_metric_is_documented(module: GRPOModule) -> None:
    assert module.record is not None
    assert module.record.metrics.keys() - documented() == set()
    assert call_metrics([]).keys() - documented() == set()


def test_names_in_the_sources_are_documented() -> None:
    pattern = re.compile(r'"((?:update|engine|rollout|group|reward|judge|rubric|time|health)/[a-z_]+)"')
    for file in [*ROOT.glob("draco/**/*.py"), *ROOT.glob("callbacks/**/*.py")]:
        unknown = set(pattern.findall(file.read_text(encoding="utf-8"))) - documented()
        assert not unknown, f"{file.name}: {unknown}"


def test_what_is_documented_exists() -> None:
    """A name that no code spells, not even in parts, is a leftover."""
    sources = "".join(
        file.read_text(encoding="utf-8") for folder in ("draco", "callbacks") for file in ROOT.glob(f"{folder}/**/*.py")
    )
    for name in documented():
        assert name.split("/")[1].removesuffix("_share") in sources or name.split("/")[1].isupper(), name


def test_the_shares_of_time_are_of_the_whole_step(module: GRPOModule) -> None:
    assert module.record is not None
    metrics = module.record.metrics
    shares = [metrics[f"time/{name}_share"] for name in ("rollout", "judge", "update", "other")]
    assert all(0 <= share <= 1 for share in shares)
    assert sum(shares) == pytest.approx(1.0, abs=1e-6)
    assert shares[2] == pytest.approx(metrics["time/update_s"] / metrics["time/step_s"])
    parts = metrics["time/reference_s"] + metrics["time/forward_s"] + metrics["time/backward_s"]
    assert 0 < parts <= metrics["time/update_s"]


@pytest.mark.parametrize("module", [figures, judge_stage])
def test_worked_examples(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed


def test_the_judges_speed_is_of_all_ranks_together() -> None:
    """Tokens of all over the seconds of the slowest; what came from the run's own cache was not asked for."""
    one = {"judge/calls": 4.0, "judge/tokens_in": 900.0, "judge/tokens_out": 100.0, "time/judge_s": 4.0}
    other = {"judge/calls": 3.0, "judge/tokens_in": 450.0, "judge/tokens_out": 50.0, "judge/cache_hits": 1.0,
             "judge/cache_hit_tokens": 200.0, "time/judge_s": 5.0}  # fmt: skip
    idle = {"rollout/count": 0.0, "time/rollout_s": 9.0}
    assert judge_speed(merge_metrics([one])) == {"judge/tokens_per_s": 250.0}
    assert judge_speed(merge_metrics([other])) == {"judge/tokens_per_s": 60.0}
    for ranks in ([one, other], [other, one, idle]):
        merged = merge_metrics(ranks)
        assert merged["time/judge_s"] == 5.0
        assert judge_speed(merged) == {"judge/tokens_per_s": (1000 + 500 - 200) / 5.0}


def test_a_step_that_asks_no_judge_has_no_speed_of_one(module: GRPOModule) -> None:
    assert module.record is not None
    assert not [name for name in module.record.metrics if name in ("judge/tokens_per_s", "time/judge_s")]
    cached = {"judge/calls": 2.0, "judge/tokens_in": 20.0, "judge/tokens_out": 10.0, "judge/cache_hit_tokens": 30.0}
    failed = {"judge/calls": 2.0, "judge/tokens_in": 0.0, "judge/tokens_out": 0.0}
    for counters in ({}, cached, failed):
        assert judge_speed({**counters, "time/judge_s": 1.0}) == {}
    assert judge_speed({"judge/tokens_in": 20.0}) == {}
