"""What a failed request to a model means: whether to repeat it, and when."""

from __future__ import annotations

import email.utils
import re
import time
from collections.abc import Callable
from typing import Any

import tenacity

from draco.core.llm.library import load_litellm
from draco.core.llm.redact import Redactor

__all__ = ["Fault", "fault_of", "retry_after", "retrying"]

_LONGEST_PAUSE_S = 60.0
#: providers' clients say so before they send anything, and litellm calls it a server error
_NO_KEY = re.compile(r"missing (\w+ )?(credentials|api[ _-]?key)|api_key client option must be set", re.IGNORECASE)
#: what litellm puts before the provider's own words
_WRAPPING = re.compile(r"^(?:litellm\.\w+:(?: |$)|\w*(?:Error|Exception)(?:(?::| -)(?: |$)|$))+")
#: and after them
_ADVICE = re.compile(r"\.? Handle with `litellm\.\w+`\.$")
#: the text of aiohttp, which litellm's clients use, where no connection is made; it holds the address of an object
_NO_CONNECTION = re.compile(r"Cannot connect to host (\S+) ssl:.*?\[(.*)\]", re.DOTALL)


class Fault(Exception):
    """A request without a reply. The text is redacted.

    Attributes:
        kind: rate_limit | server_error | timeout | connection (these may pass), too_long | refused | unexpected (this
            prompt), auth | not_found | bad_request (every prompt).
        passing: another attempt may succeed.
        wait_s: the pause that the provider asked for (Retry-After); 0 if it did not say.
        status: HTTP status; None if there is none.
        error: class of the provider's error.
        latency_s: seconds until it failed.
    """

    def __init__(
        self, kind: str, text: str, *, passing: bool, wait_s: float = 0.0, status: int | None = None, error: str = ""
    ) -> None:
        super().__init__(text)
        self.kind, self.passing, self.wait_s, self.status, self.error = kind, passing, wait_s, status, error
        self.latency_s = 0.0


def fault_of(error: Exception, redact: Redactor) -> Fault:
    """The fault behind an error of litellm."""
    status = getattr(error, "status_code", None)
    status = status if isinstance(status, int) else None
    text = f"{type(error).__name__}: {_said(error)}"
    kind = _kind(error, status, text)
    refused = status is not None and 400 <= status < 500
    if kind in ("connection", "server_error", "unexpected") and not refused and (why := _unreachable(error)):
        kind, text = "connection", why
    return Fault(
        kind,
        redact.error(text),
        passing=kind in ("rate_limit", "server_error", "timeout", "connection"),
        wait_s=retry_after(error) if kind in ("rate_limit", "server_error") else 0.0,
        status=status,
        error=type(error).__name__,
    )


def _kind(error: Exception, status: int | None, text: str) -> str:
    exceptions = load_litellm().exceptions
    kinds: tuple[tuple[bool, str], ...] = (
        (isinstance(error, (TimeoutError, exceptions.Timeout)), "timeout"),
        (isinstance(error, exceptions.ContextWindowExceededError), "too_long"),
        (isinstance(error, exceptions.ContentPolicyViolationError), "refused"),
        (_NO_KEY.search(text) is not None, "auth"),
        (isinstance(error, exceptions.RateLimitError) or status == 429, "rate_limit"),
        (isinstance(error, exceptions.APIConnectionError), "connection"),
        (status in (401, 403), "auth"),
        (status == 404, "not_found"),
        (status is not None and 400 <= status < 500 and status != 408, "bad_request"),
        (status is not None, "server_error"),
        (isinstance(error, OSError), "connection"),
    )
    return next((kind for fits, kind in kinds if fits), "unexpected")


def _unreachable(error: BaseException | None) -> str:
    """Why there is no connection to the server, if that is the fault; else empty. litellm calls it a server error."""
    place = why = ""
    while error is not None:
        if found := _NO_CONNECTION.search(str(error)):
            place, why = found[1], found[2]
        if isinstance(error, ConnectionRefusedError):
            why = "connection refused"
        error = error.__cause__ or error.__context__
    if "WRONG_VERSION_NUMBER" in why:
        return f"{place} does not speak https: should its address begin with http://?"
    return f"cannot connect to {place}: {why}" if place else ""


def _said(error: Exception) -> str:
    """An error's text on one line, without what litellm wraps around it; the status where there is no text."""
    text = _ADVICE.sub("", str(error).partition("This looks like a bug in LiteLLM")[0].strip())
    if "Traceback (most recent call last)" in text:
        text = text.splitlines()[-1]
    text = " ".join(_WRAPPING.sub("", text).split())
    return text or f"status {getattr(error, 'status_code', None) or 'unknown'}, without a word"


def retry_after(error: Exception) -> float:
    """Seconds that the provider asked to wait, an hour at most: Retry-After (a number or a date) or retry-after-ms."""
    sources = (
        getattr(error, "litellm_response_headers", None),
        getattr(error, "headers", None),
        getattr(getattr(error, "response", None), "headers", None),
    )
    for headers in sources:
        found = {str(k).lower(): str(v) for k, v in dict(headers or {}).items()}
        if "retry-after-ms" in found:
            return _seconds(found["retry-after-ms"]) / 1000.0
        if "retry-after" in found:
            return _seconds(found["retry-after"])
    return 0.0


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        date = email.utils.parsedate_tz(text)
        seconds = email.utils.mktime_tz(date) - time.time() if date is not None else 0.0
    return min(max(seconds, 0.0), 3600.0) if seconds == seconds else 0.0


def retrying(
    stop: Callable[[tenacity.RetryCallState], bool],
    backoff_s: float,
    passes: Callable[[Fault], bool] = lambda fault: fault.passing,
) -> tenacity.AsyncRetrying:
    """Repeat a request while its fault may pass. The last fault is raised.

    Args:
        stop: whether no further attempt is made.
        backoff_s: first pause; doubles up to a minute, with jitter. A longer Retry-After of the provider is obeyed.
        passes: whether another attempt may succeed.
    """
    growing = tenacity.wait_exponential(multiplier=backoff_s, max=_LONGEST_PAUSE_S) + tenacity.wait_random(0, backoff_s)

    def pause(state: tenacity.RetryCallState) -> float:
        error: Any = state.outcome.exception() if state.outcome else None
        return max(growing(state), error.wait_s if isinstance(error, Fault) else 0.0)

    return tenacity.AsyncRetrying(
        stop=stop,
        wait=pause,
        retry=tenacity.retry_if_exception(lambda error: isinstance(error, Fault) and passes(error)),
        reraise=True,
    )
