"""Metrics of one training step, out of its sums. `docs/metrics.md` says what every name means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import torch

from draco.core.types import Credit
from draco.judge.verdicts import verdict_unanimous
from draco.update.gradients import Totals
from draco.update.options import LossOptions

__all__ = ["credit_metrics", "judge_speed", "loss_metrics", "merge_metrics"]


def loss_metrics(totals: Totals, loss: LossOptions, grad_norm: float) -> dict[str, float]:
    """`update/*` and `engine/*`: means over the step tokens of the batch, all ranks together."""
    sums, maxima = totals.sums, totals.maxima
    tokens = max(sums["tokens"], 1)
    metrics = {
        "update/loss": sums["loss"] / max(loss.denominator(sums["tokens"], sums["trajectories"]), 1),
        "update/kl": sums["kl"] / tokens,
        "update/entropy": sums["entropy"] / tokens,
        "update/clip_share": sums["clipped"] / tokens,
        "update/dual_clip_share": sums["dual_clipped"] / tokens,
        "update/ratio_max": maxima.get("ratio_max", 0.0),
        "update/grad_norm": grad_norm,
        "update/step_tokens": float(sums["tokens"]),
        "update/model_tokens": float(sums["model_tokens"]),
        "update/micro_batches": float(sums["micro_batches"]),
        "update/padding_share": 1.0 - sums["model_tokens"] / max(sums["computed_tokens"], 1),
    }
    names = ("stale_abs", "stale_k3", "stale_ratio_max")
    if "stale_abs" not in sums:  # never both: all of a batch was sampled with the same weights
        names = ("mismatch_abs", "mismatch_k3", "mismatch_ratio_max")
    metrics |= {f"engine/{name}": sums[name] / tokens for name in names[:2]}
    metrics[f"engine/{names[2]}"] = maxima.get(names[2], 0.0)
    if loss.tis_cap:
        metrics["engine/tis_capped_share"] = sums["tis_capped"] / tokens
    return metrics


def judge_speed(metrics: Mapping[str, float]) -> dict[str, float]:
    """`judge/tokens_per_s` out of a step's metrics, of all ranks together; empty if the judge gave no answer.

    >>> judge_speed({"judge/tokens_in": 900.0, "judge/tokens_out": 100.0, "time/judge_s": 4.0})
    {'judge/tokens_per_s': 250.0}
    """
    read, written, kept = (metrics.get(f"judge/{n}", 0.0) for n in ("tokens_in", "tokens_out", "cache_hit_tokens"))
    tokens, seconds = read + written - kept, metrics.get("time/judge_s", 0.0)
    return {"judge/tokens_per_s": tokens / seconds} if tokens > 0 and seconds > 0 else {}


def credit_metrics(credits: list[Credit]) -> dict[str, float]:
    """Shares over the judged trajectories of a batch: inert verdicts (as in B.3), inert weights, reasons, rewards."""
    groups = [c for c in credits if c.judgement.group.trajectories]
    members = sum(len(c.advantages) for c in groups)
    if not members:
        return {"group/judged": 0.0, "group/skipped": float(len(credits))}
    reasons = Counter(reason for c in groups for reason in c.reasons)
    rewards = [r for c in groups for r in c.judgement.rewards]
    metrics = {
        "group/judged": float(len(groups)),
        "group/skipped": float(len(credits) - len(groups)),
        "group/zero_std": sum(c.zero_std for c in groups) / len(groups),
        "reward/mean": sum(rewards) / members,
        **{f"credit/{reason}": count / members for reason, count in sorted(reasons.items())},
        "credit/inert_weights": sum(n for r, n in reasons.items() if r != "credited") / members,
    }
    if any(c.judgement.criteria for c in groups):
        metrics["credit/inert_verdicts"] = sum(map(_inert_verdicts, groups)) / members
    return metrics


def _inert_verdicts(credit: Credit) -> int:
    """Trajectories of a group whose surviving passes and fails do not differ."""
    judgement = credit.judgement
    scores = torch.tensor([[v.score for v in row] for row in judgement.verdicts], dtype=torch.int64)
    scores = scores.reshape(len(judgement.criteria), len(credit.advantages))
    return int(verdict_unanimous(scores, ~torch.tensor(judgement.dropped, dtype=torch.bool)).sum())


#: Metrics that count, beside the counters of the judge.
_COUNTS = ("rollout/count", "rollout/quarantined", "rollout/tokens_per_s", "engine/retries", "engine/servers_lost")


def merge_metrics(many: Iterable[dict[str, float]]) -> dict[str, float]:
    """Stage metrics of all ranks as one. Counts are summed, seconds are those of the slowest rank, and the rest are
    means weighted by the number of rollouts."""
    many = list(many)
    if len(many) == 1:
        return many[0]
    from draco.judge.records import add_metrics, with_rates

    judge = [{k: v for k, v in one.items() if k.startswith(("judge/", "rubric/"))} for one in many]
    merged = with_rates(add_metrics(judge))
    if any("judge/calls" in one and "judge/cost_usd" not in one for one in judge):
        merged.pop("judge/cost_usd", None)  # unknown on one rank is unknown
    for name in dict.fromkeys(name for one in many for name in one if not name.startswith(("judge/", "rubric/"))):
        pairs = [(one[name], one.get("rollout/count", 1.0)) for one in many if name in one]
        if name.startswith("time/"):
            merged[name] = max(value for value, _ in pairs)
        elif name in _COUNTS:
            merged[name] = sum(value for value, _ in pairs)
        else:
            weight = sum(w for _, w in pairs)
            merged[name] = sum(value * w for value, w in pairs) / weight if weight else 0.0
    return merged
