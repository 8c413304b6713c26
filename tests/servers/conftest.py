"""Engines over the fake vLLM, and the real AppWorld. Each test module has its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from support.appworld import DATA, PYTHON
from support.fake_vllm import SCRIPT, FakeVllm
from support.policies import TINY

from draco.core.background import BackgroundLoop
from draco.env.appworld import AppWorldEnvironment, AppWorldEvaluator
from draco.policy.policy import Policy
from draco.rollout.engines.vllm import VllmEngine


@pytest.fixture(scope="module")
def behind() -> Policy:
    """The weights that the fake servers hold."""
    return Policy(TINY)


@pytest.fixture
def start(behind: Policy) -> Iterator[Callable[..., FakeVllm]]:
    """Starts fake servers."""
    made: list[FakeVllm] = []

    def build(script: Sequence[str] = SCRIPT, **options: str) -> FakeVllm:
        made.append(FakeVllm(behind, script, **options))
        return made[-1]

    yield build
    for server in made:
        server.stop()
    BackgroundLoop.shared().close()


@pytest.fixture
def opened(new_policy: Callable[[], Policy], tmp_path: Path) -> Iterator[Callable[..., tuple[VllmEngine, Policy]]]:
    """Opens an engine on servers that run, with a policy of its own."""
    made: list[VllmEngine] = []

    def build(*servers: FakeVllm, temperature: float = 1.0, **options: object) -> tuple[VllmEngine, Policy]:
        policy = new_policy()
        engine = VllmEngine(
            [s.url for s in servers], max_prompt_tokens=1000, max_response_tokens=200,
            **{"retries": 2, "cooldown_s": 60.0, **options},  # type: ignore[arg-type]
        )  # fmt: skip
        made.append(engine)
        engine.open(policy, tmp_path / "run", temperature=temperature)
        return engine, policy

    yield build
    for engine in made:
        engine.close()


@pytest.fixture(scope="module")
def environment() -> Iterator[AppWorldEnvironment]:
    # Nobody here is slow by intent; 54 episodes on a busy machine are.
    made = AppWorldEnvironment(PYTHON, DATA, soft_s=600, execute_s=900, open_s=600)
    yield made
    made.close()


@pytest.fixture(scope="module")
def unchecked() -> Iterator[AppWorldEnvironment]:
    """No check of code, ours or AppWorld's: what is left is the sandbox."""
    made = AppWorldEnvironment(PYTHON, DATA, check_code=False, soft_s=20, execute_s=30, open_s=600, memory_mb=400)
    yield made
    made.close()


@pytest.fixture(scope="module")
def evaluator() -> Iterator[AppWorldEvaluator]:
    made = AppWorldEvaluator(PYTHON, DATA, deadline_s=600)
    yield made
    made.close()
