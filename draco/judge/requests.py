"""One question to a judge: its messages, and how its reply becomes a value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from draco.judge.endpoints import JudgeEndpoint
from draco.judge.records import CallRecord

__all__ = ["ASKER", "JudgeRequest"]

T = TypeVar("T")

#: task, attempt and repeat of the call under way, for a provider in this process (`draco.judge.local`)
ASKER: ContextVar[tuple[str, int, int]] = ContextVar("asker", default=("", -1, 0))


@dataclass(frozen=True, slots=True)
class JudgeRequest(Generic[T]):
    """One call to make."""

    phase: str
    messages: Sequence[Mapping[str, str]]
    #: the reply's JSON → usable value and a fault that is worth one re-ask but no failure; raises `ReplyFault`
    check: Callable[[Any], tuple[T, str | None]]
    sink: Callable[[CallRecord], None]  #: gets a record of every attempt
    task_id: str = ""
    sample: int = -1
    step: int = 0
    repeat: int = 0  #: 0-based, where one prompt is asked several times; part of the cache key
    deadline: float | None = None  #: time.monotonic() after which the call fails; None = none
    cached: bool = True  #: False: neither read from nor written to the cache
    version: str = ""  #: of the packaged texts behind `messages`; empty: those of the paper's prompt for `phase`
    schema: Mapping[str, Any] | None = None  #: JSON Schema of the reply; None: that of `phase`
    salt: str = ""  #: part of the cache key: the adapter's hash where the policy is the judge
    endpoint: JudgeEndpoint | None = None  #: whom to ask; None: the client's model and its fallbacks
