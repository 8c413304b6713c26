"""Generation engines. Each drives `draco.agent.Rollout` objects until they end; none knows about environments."""

from draco.engine.base import Engine

__all__ = ["Engine"]
