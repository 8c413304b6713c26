"""GPUs by name, and how much of their peak is assumed."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from draco.errors import ConfigError

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


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What nobody can count beforehand. Every one can be given on the command line (`mfu=0.3`)."""

    mfu: float = 0.35  #: share of peak flops in the update
    prefill_mfu: float = 0.4  #: in vLLM's prefill
    decode_efficiency: float = 0.5  #: share of memory bandwidth in vLLM's decode
    tp_efficiency: float = 0.85  #: speed that is left of a server for every doubling of its GPUs
    reserve: float = 6e9  #: bytes a GPU that neither side gets: CUDA context, NCCL, fragmentation
    response_tokens: float = 9000  #: mean of a trajectory, observations included
    sampled_share: float = 0.35  #: of them, sampled by the policy; the others are observations
    turns: float = 17  #: mean (paper: 18.7 → 14.7)
    judge_latency_s: float = 30.0  #: one call
    judge_concurrency: int = 64
    environment_s: float = 0.3  #: one turn

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def gpu_named(name: str) -> Gpu:
    """Raises ConfigError for an unknown name."""
    if name not in GPUS:
        raise ConfigError(f"gpu={name} is not known; expected one of {', '.join(GPUS)}")
    return GPUS[name]
