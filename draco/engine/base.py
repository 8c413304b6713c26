"""The engine protocol."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from draco.agent import Rollout

if TYPE_CHECKING:
    from draco.policy import Policy

__all__ = ["Engine"]


class Engine(Protocol):
    """Samples from the policy's current weights."""

    def run(self, policy: Policy, rollouts: Sequence[Rollout], *, temperature: float) -> Iterator[Rollout]:
        """Drive every rollout to its end and yield each as soon as it has ended, in the order of ending."""
        ...
