"""The Python of the real vLLM, and rollouts and weights to try it with."""

from __future__ import annotations

from support import ROOT
from support.sampling import LIMITS

from draco.env.desk import DeskEnvironment
from draco.policy.policy import Policy
from draco.rollout.rollout import Rollout, sampling_seed

PYTHON = ROOT / ".venv-vllm/bin/python"


def rollouts(policy: Policy, tasks: int, samples: int = 1, purpose: str = "t") -> list[Rollout]:
    environment = DeskEnvironment()
    return [
        Rollout(
            environment.open(task, seed=0), policy.chat, LIMITS, task=task, sample=sample, group_index=index,
            seed=sampling_seed(0, purpose, 0, task.id, sample), policy_version=0,
        )
        for index, task in enumerate(environment.tasks("dev")[:tasks])
        for sample in range(samples)
    ]  # fmt: skip
