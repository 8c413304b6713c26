"""Shared by several test modules."""

from __future__ import annotations

from pathlib import Path

import torch
from support.sampling import LIMITS

from draco.env.desk import DeskEnvironment
from draco.policy.policy import Policy
from draco.rollout.rollout import Rollout, sampling_seed

ROOT = Path(__file__).parents[2]


PYTHON = ROOT / ".venv-vllm/bin/python"


def perturb(policy: Policy, scale: float, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in policy.named_parameters():
        if "lora_B.default" in name:
            parameter.data = scale * torch.randn(parameter.shape, generator=generator)


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
