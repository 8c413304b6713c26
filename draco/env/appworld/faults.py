"""Everything that can go wrong between the trainer and AppWorld and is not the agent's doing.

The agent's own mistakes (unsafe code, an endless loop, a crash of its process, exceptions) come back as observations.
"""

from __future__ import annotations

from draco.core.errors import EnvironmentFault

__all__ = [
    "AppWorldFault",
    "EngineFailed",
    "PoolBusy",
    "ProtocolBroken",
    "StartFailed",
    "TooSlow",
    "UnknownEpisode",
    "UnknownTask",
    "WorkerDied",
    "fault",
]


class AppWorldFault(EnvironmentFault):
    """The episode ends as `environment_error` and is quarantined. `signal` is what ended a process; 0: none."""

    signal: int = 0


class UnknownTask(AppWorldFault):
    """The task id is malformed or not in the data."""


class UnknownEpisode(AppWorldFault):
    """The episode was never opened, or is closed."""


class StartFailed(AppWorldFault):
    """The fork server did not come up: environment, data or isolation."""


class WorkerDied(AppWorldFault):
    """The episode's process, or the server, is gone, and the agent's code did not end it."""


class EngineFailed(AppWorldFault):
    """AppWorld itself raised."""


class TooSlow(AppWorldFault):
    """Opening or scoring passed its deadline."""


class PoolBusy(AppWorldFault):
    """All places are taken, and no episode ended in time."""


class ProtocolBroken(AppWorldFault):
    """An answer that the protocol does not know."""


#: kind of error in the protocol → its class
_KINDS: dict[str, type[AppWorldFault]] = {
    "unknown_task": UnknownTask,
    "unknown_episode": UnknownEpisode,
    "isolation": StartFailed,
    "died": WorkerDied,
    "engine": EngineFailed,
    "deadline": TooSlow,
}


def fault(kind: str, message: str) -> AppWorldFault:
    """The exception of an error of the protocol."""
    return _KINDS.get(kind, ProtocolBroken)(message)
