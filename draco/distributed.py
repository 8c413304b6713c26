"""Several processes, one step: gradients and counts are summed once, records are gathered for rank 0.

Tasks are dealt out by rank (`TaskBatch.shard`); every random stream is keyed by task and sample, so the groups of a
batch are the same on any number of ranks, and so is the sum of their gradients up to float rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["all_reduce_sum", "gather", "merge_metrics", "world_size"]


def world_size() -> int:
    """Processes of the run; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


@torch.no_grad()
def all_reduce_sum(parameters: Sequence[nn.Parameter], counts: Sequence[float]) -> list[float]:
    """Sum gradients and counts over all ranks in one flat message; a rank without gradients sends zeros.

    Args:
        parameters: trainable parameters in a fixed order; `.grad` is replaced by the sum.
        counts: numbers to sum along.

    Returns:
        The summed counts.
    """
    if world_size() == 1:
        return list(counts)
    device = parameters[0].device
    parts: list[Tensor] = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([part.flatten().float() for part in parts] + [torch.tensor(counts, device=device)])
    dist.all_reduce(flat)
    sizes = [p.numel() for p in parameters]
    *sums, total = torch.split(flat, [*sizes, len(counts)])
    for parameter, value in zip(parameters, sums, strict=True):
        parameter.grad = value.view_as(parameter).to(parameter.dtype)
    return [float(x) for x in total]


def gather(value: Any) -> list[Any]:
    """The value of every rank, in rank order, on every rank."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


#: Metrics that count, beside the counters of the judge.
_COUNTS = ("rollout/count", "rollout/quarantined", "rollout/tokens_per_s", "engine/retries")


def merge_metrics(many: Iterable[dict[str, float]]) -> dict[str, float]:
    """Stage metrics of all ranks as one: counts are summed, seconds are the slowest rank's, the rest are means
    weighted by each rank's rollouts."""
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
