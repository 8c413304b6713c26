"""All exceptions that draco raises on purpose. Every message says what was wrong, what was expected and what to do."""

from __future__ import annotations

__all__ = [
    "AdapterError", "ConfigError", "DracoError", "EngineError", "EnvironmentFault", "JudgeCallError",
    "JudgeConfigError", "JudgeError", "JudgeReplyError", "ServerLost", "ServerRefused", "StageError", "TemplateError",
    "TrainingStopped",
]  # fmt: skip


class DracoError(Exception):
    """Base class."""


class ConfigError(DracoError):
    """The configuration, a path or an argument cannot work. Raised before the first rollout."""


class StageError(ConfigError):
    """A stage callback is missing or present twice."""


class TemplateError(ConfigError):
    """A chat template cannot be driven token-exactly."""


class AdapterError(ConfigError):
    """An adapter does not fit the base model."""


class EnvironmentFault(DracoError):
    """The environment failed, not the agent; the trajectory is quarantined (`environment_error`)."""


class EngineError(DracoError):
    """Generation failed, not the agent; the trajectory is quarantined (`engine_error`)."""


class ServerLost(EngineError):
    """A generation server did not answer, or failed while answering; another server may succeed."""


class ServerRefused(EngineError):
    """A generation server refused the request; the same request would fail again."""


class JudgeError(DracoError):
    """A judge call did not give a usable reply; it is never turned into a score."""


class JudgeReplyError(JudgeError):
    """The reply was unparsable or broke the schema, after one corrective re-ask."""


class JudgeCallError(JudgeError):
    """The provider failed (timeout, rate limit, server error) and retries are exhausted."""


class JudgeConfigError(JudgeError, ConfigError):
    """The provider refuses every such request: wrong key, model name or parameters."""


class TrainingStopped(DracoError):
    """A limit stopped the run with its state saved (too many failures, too many NaN steps, the budget)."""
