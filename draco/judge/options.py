"""What `conf/judge/*.yaml` sets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from draco.config.options import Count, Index, NonNegative, Positive, Share, checked
from draco.core.errors import JudgeConfigError
from draco.core.llm.money import Prices

__all__ = ["JudgeOptions", "prices_of"]


@checked("judge")
@dataclass(frozen=True, slots=True)
class JudgeOptions:
    """Options of a judge.

    Raises:
        ConfigError: an option is of the wrong kind or out of range.
    """

    model: str  #: litellm's name of the judge, provider first
    temperature: NonNegative | None = 0.1  #: None sends none, for models that refuse it
    max_tokens: Count | None = None  #: limit of a reply; None leaves it to the provider
    response_schema: Literal["auto", "on", "off"] = "auto"  #: whether the provider gets the reply's JSON schema
    api_base: str | None = None  #: address of an OpenAI-compatible server
    api_key: str | None = field(default=None, repr=False)  #: where no environment variable can hold it; never recorded
    environments: Sequence[str] = ()  #: names of those that it can judge; empty: any. Read before a run
    titles: str | None = None  #: `module:NAME` of the criteria that it has rules for; None: it can judge any
    provider: str | None = None  #: `module:function` of a function that registers a custom litellm provider
    #: models to ask, in turn, where this one gives no reply
    fallbacks: Sequence[str | Mapping[str, Any]] = field(default=(), repr=False)
    fallback_s: NonNegative = 60.0  #: a model that gave no reply is not asked for so long; doubles up to 10 min
    concurrency: Count = 32  #: requests in flight at once, over all ranks
    requests_per_min: Positive | None = None  #: over all ranks; None = unlimited
    tokens_per_min: Positive | None = None  #: prompt and reply, over all ranks; None = unlimited
    timeout_s: Positive = 120.0  #: of one attempt
    deadline_s: Positive | None = None  #: of one call with all its attempts and pauses, from its first request on
    group_deadline_s: Positive | None = None  #: of all calls of a group, waiting for a slot included
    max_retries: Index = 4  #: further attempts after rate limits, server errors, timeouts and lost connections
    backoff_s: NonNegative = 1.0  #: first pause before a retry; doubles up to a minute; Retry-After is obeyed
    cache: Literal["read_write", "read_only", "off"] = "off"  #: replies kept in the run folder
    max_usd: Positive | None = None  #: the run stops, state saved, before it spends more
    max_tokens_total: Positive | None = None  #: the same for tokens, prompt and reply
    prices: Mapping[str, Any] | None = None  #: USD a million tokens, in place of litellm's table: input, output, cached
    on_model_change: Literal["warn", "stop"] = "warn"  #: the provider serves another model or fingerprint than before
    max_failed_share: Share = 0.25  #: more failed judgements than this share of a batch's trajectories stop the run
    plan: Literal["paper", "lean"] = "paper"  #: what prompts show (`draco.judge.views`)
    #: models that score together; empty: `model` alone (`draco.judge.votes`). Asked at `api_base` with `api_key`
    #: unless they name their own
    members: Sequence[str | Mapping[str, Any]] = field(default=(), repr=False)
    #: how the members' votes become a verdict
    ensemble: Literal["majority", "unanimous", "weighted"] = "majority"

    def __post_init__(self) -> None:
        if self.api_base is not None and not self.api_base.startswith(("http://", "https://")):
            raise JudgeConfigError(
                f"judge.api_base is {self.api_base!r}; expected an address such as http://127.0.0.1:8000/v1"
            )

    @property
    def needs_store(self) -> bool:
        """Whether something of this judge must outlive the process."""
        capped = self.max_usd is not None or self.max_tokens_total is not None
        return self.cache != "off" or capped or self.on_model_change == "stop"


def prices_of(given: Mapping[str, Any] | None) -> Prices | None:
    """From `judge.prices`.

    Raises:
        JudgeConfigError: not such a mapping.
    """
    if given is None:
        return None
    try:
        made = Prices(**{str(k): None if v is None else float(v) for k, v in given.items()})  # type: ignore[arg-type]
        each = (made.input, made.output, made.cached or 0.0)
        if min(each) < 0 or not all(map(math.isfinite, each)):
            raise ValueError
    except (TypeError, ValueError, AttributeError):
        raise JudgeConfigError(
            f"judge.prices is {given}; expected USD a million tokens as {{input: 1.25, output: 10, cached: 0.125}}"
        ) from None
    return made
