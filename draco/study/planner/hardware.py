"""GPUs by name, and how much of their peak is assumed."""

# ruff: noqa: RUF009 - `_assumed` is `dataclasses.field`
from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from annotated_types import Gt, Le

from draco.config.options import Count, NonNegative, Positive, checked
from draco.core.errors import ConfigError

__all__ = ["GPUS", "Assumptions", "Gpu", "gpu_named"]

Fraction = Annotated[float, Gt(0), Le(1)]  #: above 0, up to 1


@dataclass(frozen=True, slots=True)
class Gpu:
    """Data-sheet figures, dense bf16."""

    memory: float  #: bytes
    flops: float  #: per second
    bandwidth: float  #: bytes per second


GPUS = {
    "a100-40gb": Gpu(40e9, 312e12, 1.56e12),
    "a100-80gb": Gpu(80e9, 312e12, 2.04e12),
    "h100-80gb": Gpu(80e9, 989e12, 3.35e12),
    "h200-141gb": Gpu(141e9, 989e12, 4.8e12),
    "b200-180gb": Gpu(180e9, 2250e12, 8.0e12),
}


def _assumed(default: float, about: str) -> Any:
    return field(default=default, metadata={"about": about})


@checked("")
@dataclass(frozen=True, slots=True)
class Assumptions:
    """What cannot be counted beforehand. Every value can be given on the command line (`mfu=0.3`).

    Raises:
        ConfigError: a value out of its range.
    """

    mfu: Fraction = _assumed(0.35, "share of peak flops in the update")
    prefill_mfu: Fraction = _assumed(0.4, "share of peak flops in vLLM's prefill")
    decode_efficiency: Fraction = _assumed(0.5, "share of memory bandwidth in vLLM's decode")
    tp_efficiency: Fraction = _assumed(0.85, "speed that is left of a server for every doubling of its GPUs")
    reserve: NonNegative = _assumed(6e9, "bytes a GPU that neither side gets: CUDA, NCCL, fragmentation")
    response_tokens: Positive = _assumed(9000, "mean of a trajectory, observations included")
    sampled_share: Fraction = _assumed(0.35, "of them, sampled by the policy; the others are observations")
    turns: Positive = _assumed(17, "mean of a trajectory (paper: 18.7 → 14.7)")
    judge_latency_s: NonNegative = _assumed(30.0, "seconds of one call")
    judge_concurrency: Count = _assumed(64, "calls under way at once")
    environment_s: NonNegative = _assumed(0.3, "seconds of one turn")

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def gpu_named(name: str) -> Gpu:
    """Raises ConfigError for an unknown name."""
    if name not in GPUS:
        raise ConfigError(f"gpu={name} is not known; expected one of {', '.join(GPUS)}")
    return GPUS[name]
