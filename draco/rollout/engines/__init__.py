"""Generation engines. Each drives `Rollout` objects until they end; none knows about environments."""

from draco.rollout.engines.base import Engine

__all__ = ["Engine"]
