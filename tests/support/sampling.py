"""Limits of short rollouts, and the log-probs of a finished rollout by one plain forward pass."""

from __future__ import annotations

import torch

from draco.core.types import Trajectory
from draco.policy.policy import Policy
from draco.rollout.loop import Limits

LIMITS = Limits(max_turns=12, max_response_tokens=300, max_turn_tokens=48)


@torch.no_grad()
def recomputed(policy: Policy, t: Trajectory, temperature: float = 1.0) -> torch.Tensor:
    """[T] log-probs by one plain forward pass over the finished trajectory."""
    ids = torch.tensor([t.token_ids])
    logits = policy.model(input_ids=ids, use_cache=False).logits[0, :-1].float() / temperature
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
