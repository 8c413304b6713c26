"""The tiny policy of the package, with the same weights every time, and adapters that are not the identity."""

from __future__ import annotations

import torch

from draco.policy.policy import Policy

TINY = "pkg://draco.policy.tiny"


def tiny_policy() -> Policy:
    """As it ships: its adapter is the identity."""
    torch.manual_seed(0)
    return Policy(TINY)


def perturb(policy: Policy, scale: float = 0.02, seed: int = 1) -> None:
    """Fill the adapter with noise, so that the policy differs from its reference."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.data = scale * torch.randn(parameter.shape, generator=generator)


def perturbed_policy() -> Policy:
    """The tiny policy behind an adapter that is not the identity."""
    policy = tiny_policy()
    perturb(policy)
    return policy
