"""GPUs by name, and how much of their peak is assumed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from draco.config.checks import number, whole
from draco.core.errors import ConfigError

__all__ = ["GPUS", "Assumptions", "Gpu", "gpu_named"]


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


def _assumed(default: float, about: str, **limits: Any) -> Any:
    """A field; `limits` are those of `draco.config.options.number`, of `whole` for an integer."""
    return field(default=default, metadata={"about": about, "limits": {"minimum": 0, **limits}})


def _share(default: float, about: str) -> Any:
    return _assumed(default, about, maximum=1, above=True)


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What nobody can count beforehand. Every one can be given on the command line (`mfu=0.3`).

    Raises:
        ConfigError: a value that cannot be right, in one line with its range.
    """

    mfu: float = _share(0.35, "share of peak flops in the update")
    prefill_mfu: float = _share(0.4, "share of peak flops in vLLM's prefill")
    decode_efficiency: float = _share(0.5, "share of memory bandwidth in vLLM's decode")
    tp_efficiency: float = _share(0.85, "speed that is left of a server for every doubling of its GPUs")
    reserve: float = _assumed(6e9, "bytes a GPU that neither side gets: CUDA, NCCL, fragmentation")
    response_tokens: float = _assumed(9000, "mean of a trajectory, observations included", above=True)
    sampled_share: float = _share(0.35, "of them, sampled by the policy; the others are observations")
    turns: float = _assumed(17, "mean of a trajectory (paper: 18.7 → 14.7)", above=True)
    judge_latency_s: float = _assumed(30.0, "seconds of one call")
    judge_concurrency: int = _assumed(64, "calls under way at once", minimum=1)
    environment_s: float = _assumed(0.3, "seconds of one turn")

    def __post_init__(self) -> None:
        for one in fields(self):
            check = whole if one.type == "int" else number
            check(one.name, getattr(self, one.name), **one.metadata["limits"])

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def gpu_named(name: str) -> Gpu:
    """Raises ConfigError for an unknown name."""
    if name not in GPUS:
        raise ConfigError(f"gpu={name} is not known; expected one of {', '.join(GPUS)}")
    return GPUS[name]
