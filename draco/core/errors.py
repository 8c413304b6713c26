"""One error tree. Every message names what was wrong, what was expected and what to do.

DracoError
├── ConfigError          the configuration, a path or an argument cannot work (exit before any rollout)
│   ├── StageError       a stage callback is missing or present twice
│   ├── TemplateError    a chat template cannot be driven token-exactly
│   └── AdapterError     an adapter does not fit the base model
├── EnvironmentFault     the environment failed, not the agent (termination `environment_error`)
├── EngineError          generation failed, not the agent (termination `engine_error`)
│   ├── ServerLost       a generation server did not answer: the request may succeed elsewhere
│   └── ServerRefused    it answered that it will not: the same request fails again
├── JudgeError           a judge call did not give a usable reply; never turned into a score
│   ├── JudgeReplyError  the reply was unparsable or broke the schema, after one corrective re-ask
│   ├── JudgeCallError   the provider failed (timeout, rate limit, server error), retries exhausted
│   └── JudgeConfigError the provider refused the request for good (key, model, bad request)
└── TrainingStopped      a guard stopped the run with its state saved (too many failures, NaN steps)
"""

from __future__ import annotations

__all__ = [
    "AdapterError",
    "ConfigError",
    "DracoError",
    "EngineError",
    "EnvironmentFault",
    "JudgeCallError",
    "JudgeConfigError",
    "JudgeError",
    "JudgeReplyError",
    "ServerLost",
    "ServerRefused",
    "StageError",
    "TemplateError",
    "TrainingStopped",
]


class DracoError(Exception):
    """Base of every error that draco raises on purpose."""


class ConfigError(DracoError):
    """The configuration, a path or an argument cannot work."""


class StageError(ConfigError):
    """A stage callback is missing or present twice."""


class TemplateError(ConfigError):
    """A chat template cannot be driven token-exactly."""


class AdapterError(ConfigError):
    """An adapter does not fit the base model."""


class EnvironmentFault(DracoError):
    """The environment failed, not the agent; the trajectory is quarantined."""


class EngineError(DracoError):
    """Generation failed, not the agent; the trajectory is quarantined."""


class ServerLost(EngineError):
    """A generation server did not answer, or failed while answering; the request may succeed elsewhere."""


class ServerRefused(EngineError):
    """A generation server answered that it will not do this; the same request fails again."""


class JudgeError(DracoError):
    """A judge call did not give a usable reply; it is never turned into a score."""


class JudgeReplyError(JudgeError):
    """The reply was unparsable or broke the schema, after one corrective re-ask."""


class JudgeCallError(JudgeError):
    """The provider failed (timeout, rate limit, server error) and retries are exhausted."""


class JudgeConfigError(JudgeError, ConfigError):
    """The provider refused the request for good: key, model name or a bad request."""


class TrainingStopped(DracoError):
    """A guard stopped the run with its state saved."""
