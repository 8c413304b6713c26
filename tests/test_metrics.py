"""Every metric that a step writes is documented, and the shares of time add up."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import EchoEnvironment, TypedEngine
from test_module import Rewards, make_module, make_trainer, script

from callbacks.credit.uniform import UniformCredit
from callbacks.health import Health
from callbacks.rollout import AgentRollout
from draco.agent import Limits
from draco.credit import Reason
from draco.judge.records import call_metrics
from draco.loader import TaskLoader
from draco.module import GRPOModule, LossOptions
from draco.policy import Policy
from draco.types import Termination

ROOT = Path(__file__).parents[1]


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
    built = make_module(new_policy, loss=LossOptions(tis_cap=2.0))
    stages = [
        AgentRollout(environment, TypedEngine(script), Limits()),
        Rewards(lambda g: [float(t.sample) for t in g.trajectories]),
        UniformCredit(),
        Health(),
    ]
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
