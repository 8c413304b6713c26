"""The record of every attempt of a judge call, and the counters and rates of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from draco.core.types import Group, Judgement
from draco.judge import agreement

__all__ = ["CallRecord", "Counters", "add_metrics", "call_metrics", "length_metrics", "with_rates"]


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One attempt of one call, for the archive. Holds no key: texts are redacted."""

    phase: str  #: one of `prompts.CALLS`, or match
    task_id: str
    sample: int  #: 0-based sample within the group; -1 for calls on the whole group
    step: int  #: batch counter
    model: str  #: as configured
    served_model: str  #: as the provider names it; empty when unknown
    fingerprint: str  #: the provider's system fingerprint; empty when unknown
    prompt_version: str  #: hash of the packaged texts
    prompt_hash: str  #: 32 hex digits over the messages sent
    temperature: float | None  #: None: not sent
    attempt: int  #: 1-based over transport retries, fallbacks and the re-ask
    outcome: str  #: ok | repaired | reask | reply_error | cancelled | model_change, or the kind of a transport error
    error: str  #: empty when the reply was usable
    tokens_in: int
    tokens_out: int
    tokens_cached: int
    cost_usd: float | None  #: None: the model has no known price
    latency_s: float
    messages: tuple[tuple[str, str], ...]  #: (role, content) as sent
    reply: str
    repeat: int = 0  #: 0-based, where one prompt is asked several times
    from_cache: bool = False  #: nothing was sent: tokens, cost and latency are those of the request that was
    estimated: bool = False  #: tokens and cost are, because the provider did not give them


class Counters(dict[str, float]):
    """Sums by name."""

    def count(self, name: str, by: float = 1.0) -> None:
        """Add to a sum."""
        self[name] = self.get(name, 0.0) + by


def call_metrics(records: Iterable[CallRecord]) -> dict[str, float]:
    """Counters over attempts: all of them sum over groups and steps."""
    names = ("calls", "failed_calls", "tokens_in", "tokens_out", "tokens_cached", "cost_usd", "unpriced_calls")
    m = Counters({f"judge/{name}": 0.0 for name in (*names, "latency_total_s")})
    for r in records:
        if r.from_cache:  # counted like the call that was paid for, so that a resumed step reads like any other
            m.count("judge/cache_hits")
            m.count("judge/cache_hit_tokens", r.tokens_in + r.tokens_out)
        m.count("judge/calls")
        m.count(f"judge/calls/{r.phase}")
        m.count("judge/failed_calls", r.outcome not in {"ok", "repaired"})
        m.count("judge/tokens_in", r.tokens_in)
        m.count("judge/tokens_out", r.tokens_out)
        m.count("judge/tokens_cached", r.tokens_cached)
        m.count("judge/latency_total_s", r.latency_s)
        if r.estimated:
            m.count("judge/estimated_calls")
        m.count("judge/unpriced_calls", r.cost_usd is None)
        m.count("judge/cost_usd", r.cost_usd or 0.0)
    return m


#: (name, most steps) of the lengths by which failed judgements are reported
_LENGTHS = (("short", 10), ("medium", 25), ("long", 10**9))


def length_metrics(group: Group, judgement: Judgement) -> dict[str, float]:
    """Counters of members and failed judgements by the rollout's length in steps.

    Failures leave the group; if they are mostly long rollouts, training leans towards short ones.
    """
    failed = {f.sample for f in judgement.failures if f.phase != "rollout"}
    m = Counters()
    for t in group.live().trajectories:
        length = next(name for name, most in _LENGTHS if len(t.steps) <= most)
        m.count(f"judge/members/{length}")
        m.count(f"judge/failed/{length}", t.sample in failed)
    return m


def add_metrics(many: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Sum counters by name. Sums of rates mean nothing; `with_rates` replaces them."""
    total = Counters()
    for one in many:
        for name, value in one.items():
            total.count(name, value)
    return total


#: rate: (counter, counters of the denominator)
_RATES = {
    "judge/latency_s": ("judge/latency_total_s", ("judge/calls",)),
    "judge/override_rate": ("judge/overrides", ("judge/attributed",)),
    "judge/uncited_verdict_rate": ("judge/uncited", ("judge/attributed_pass_fail",)),
    "judge/failed_share": ("judge/failed", ("judge/members",)),
    **{
        f"judge/failed_share/{length}": (f"judge/failed/{length}", (f"judge/members/{length}",))
        for length, _ in _LENGTHS
    },
    "rubric/criteria_per_group": ("rubric/criteria", ("rubric/groups",)),
    "rubric/pass_rate": ("rubric/passes", ("rubric/passes", "rubric/fails")),
    "rubric/na_share": ("rubric/na", ("rubric/passes", "rubric/fails", "rubric/na")),
}


def with_rates(counters: Mapping[str, float]) -> dict[str, float]:
    """The counters and the rates that follow from them; a rate without a denominator is left out.

    The cost is left out too when a call had no known price: unknown is not 0.
    """
    out = {name: value for name, value in counters.items() if name not in _RATES and name not in agreement.RATES}
    for rate, (top, bottom) in _RATES.items():
        if denominator := sum(counters.get(name, 0.0) for name in bottom):
            out[rate] = counters.get(top, 0.0) / denominator
    out |= agreement.agreement_rates(out)
    if out.get("judge/unpriced_calls"):
        out.pop("judge/cost_usd", None)
    return out
