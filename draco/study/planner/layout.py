"""How GPUs are divided between the trainer and the servers: memory, speed, what to type, and what to change."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig

from draco.run.launch import sharded
from draco.study.planner.hardware import Assumptions, Gpu
from draco.study.planner.memory import UpdateMemory, update_memory
from draco.study.planner.model import ModelSize

__all__ = ["TIMED", "Layout", "estimate", "layouts"]

#: parameters from which the assumed shares of peak speed hold
TIMED = 100_000_000


@dataclass(frozen=True, slots=True)
class Layout:
    """GPUs of one node; all nodes are alike."""

    name: str  #: colocated (the same GPUs train and serve in turn) | split
    nodes: int
    train: int
    serve: int

    @property
    def colocated(self) -> bool:
        return self.name == "colocated"


def layouts(gpus: int, nodes: int) -> list[Layout]:
    """All ways to use `gpus` GPUs of each node."""
    found = [Layout("colocated", nodes, gpus, gpus)]
    return found + ([Layout("split", nodes, gpus - gpus // 2, gpus // 2)] if gpus > 1 else [])


def estimate(config: DictConfig, size: ModelSize, gpu: Gpu, layout: Layout, a: Assumptions) -> dict[str, Any]:
    """Memory, speed and settings of one layout.

    Args:
        config: composed run configuration.
        size: of the policy.
        gpu: kind of every GPU.
        layout: how they are used.
        a: what is assumed.
    """
    nodes, train, serve = layout.nodes, layout.train, layout.serve
    longest = _longest(config)
    micro = max(longest, config["update"].micro_batch_tokens)
    update = update_memory(
        size, tokens=micro, step_tokens=int(micro * a.sampled_share), itemsize=_itemsize(config),
        shards=train * nodes if sharded(config) else 1, checkpointing=_checkpointing(config),
    )  # fmt: skip
    # They work in turn: the trainer's weights stay on the GPU during rollouts; sleeping servers keep nothing there.
    resident = update.weights + update.adapter + update.optimizer if layout.colocated else 0
    offered = gpu.memory - a.reserve
    room = min(0.9 * gpu.memory, gpu.memory - resident) - a.reserve
    weights = (size.parameters + size.lora_parameters) * 2
    fitting = [  # more GPUs than key heads would hold copies of the cache
        n for n in (1, 2, 4, 8, 16)
        if n <= serve and size.kv_heads % n == 0 and weights / n + longest * size.kv_bytes() / n < room
    ]  # fmt: skip
    speeds = {n: _speed(config, size, gpu, a, layout, tp=n, room=room) for n in fitting}
    tp = min(speeds, key=lambda n: speeds[n]["rollout_s"], default=0)
    speed = speeds.get(tp) if size.parameters >= TIMED else None
    served = (weights / tp, room - weights / tp, room) if tp else (None, None, None)
    fits = update.total <= offered and bool(tp)
    return {
        "train_gpus": train * nodes, "serve_gpus": serve * nodes, "same_gpus": layout.colocated,
        "update_bytes": update.as_dict(), "resident_bytes": resident,
        "serve_bytes": dict(zip(("weights", "kv_cache", "total"), served, strict=True)),
        "tensor_parallel": tp, "servers": serve // tp * nodes if tp else 0, "budget_bytes": offered, "fits": fits,
        "advice": [] if fits else _advice(config, update, offered, train * nodes, tp),
        "settings": _settings(config, layout, tp, room / gpu.memory) if fits else [],
        "speed": speed, "hours": None if speed is None else config.steps * speed["step_s"] / 3600,
    }  # fmt: skip


def _longest(config: DictConfig) -> int:
    """Tokens of the longest possible trajectory."""
    return int(config.limits.max_prompt_tokens + config.limits.max_response_tokens)


def _itemsize(config: DictConfig) -> int:
    return int(getattr(torch, config.policy.dtype).itemsize)


def _checkpointing(config: DictConfig) -> bool:
    return bool(config.policy.get("gradient_checkpointing", False))


def _settings(config: DictConfig, layout: Layout, tp: int, share: float) -> list[str]:
    """Options of train.py for a layout; GPU numbers are those of one node."""
    first = 0 if layout.colocated else layout.train
    sets = [",".join(str(first + i * tp + j) for j in range(tp)) for i in range(layout.serve // tp)]
    trainer = ("fsdp" if sharded(config) else "ddp") + ("_multinode" if layout.nodes > 1 else "")
    return [
        f"placement={layout.name}",
        f"trainer={trainer}",
        *([f"trainer.num_nodes={layout.nodes}"] if layout.nodes > 1 else []),
        f"trainer.devices={layout.train if layout.colocated else list(range(layout.train))}".replace(" ", ""),
        f"engine.launch.tensor_parallel={tp}",
        f"engine.launch.gpus={json.dumps(sets, separators=(',', ':'))}",
        f"engine.launch.memory_share={int(share * 20) / 20}",
    ]


def _speed(
    config: DictConfig, size: ModelSize, gpu: Gpu, a: Assumptions, layout: Layout, *, tp: int, room: float
) -> dict[str, float]:
    """Seconds of a step, with servers of `tp` GPUs that have `room` bytes on each.

    Update: 8 flops a parameter and token (forward, recomputation, backward of frozen weights, and the reference pass),
    and the products of attention. Decode: one read of the weights a token, and of every sequence's cache.
    """
    rollouts = config.tasks_per_step * config.group_size
    mean = config.limits.max_prompt_tokens * 0.5 + a.response_tokens  # tokens of a rollout, prompt included
    tokens = rollouts * mean
    servers = layout.serve // tp * layout.nodes
    cache = room * tp - (size.parameters + size.lora_parameters) * 2
    at_once = min(cache / (mean * size.kv_bytes() + size.state_bytes()), rollouts / servers)
    attention = 8 * 2 * size.attention_layers * size.query * mean / 2
    update = tokens * (8 * size.parameters + attention) / (layout.train * layout.nodes * gpu.flops * a.mfu)
    sampled = a.response_tokens * a.sampled_share
    width = tp * a.tp_efficiency ** math.log2(tp)
    read = size.parameters * 2 + at_once * mean / 2 * size.kv_bytes()
    decode = sampled * read / (width * gpu.bandwidth * a.decode_efficiency) * rollouts / (servers * at_once)
    prefill = (tokens - rollouts * sampled) * 2 * size.parameters / (servers * width * gpu.flops * a.prefill_mfu)
    rollout = decode + prefill + a.turns * a.environment_s
    return {
        "rollout_s": rollout, "update_s": update, "step_s": rollout + update, "sequences_at_once": at_once * servers,
        "rollout_tokens_per_s": tokens / rollout, "update_tokens_per_s": tokens / update,
    }  # fmt: skip


def _advice(config: DictConfig, need: UpdateMemory, offered: float, train: int, tp: int) -> list[str]:
    """Options to change where a layout does not fit, the most effective first. tp = 0: no tensor-parallel size fits."""
    found = []
    missing = need.total - offered
    if not sharded(config) and train > 1 and (not tp or need.weights * (1 - 1 / train) > 0.2 * missing):
        found.append("trainer=fsdp: cuts the base model over the GPUs")
    if missing > 0:
        if not _checkpointing(config):
            found.append("policy.gradient_checkpointing=true: layers keep their input alone")
        if _itemsize(config) == 4:
            found.append("policy.dtype=bfloat16: half the weights")
        activations = need.layer_inputs + need.layer
        if activations > 0.3 * missing:
            longest, micro = _longest(config), config["update"].micro_batch_tokens
            if micro > longest:
                found.append(f"update.micro_batch_tokens={longest}: activations shrink with it")
            fitting = int(longest - missing / (activations / max(longest, micro))) - config.limits.max_prompt_tokens
            if fitting > 2048:
                found.append(f"limits.max_response_tokens={fitting}: shorter trajectories")
    if not tp:
        found.append("servers: no tensor-parallel size holds weights and one longest trajectory beside the trainer")
    found.append("more GPUs, or GPUs with more memory")
    return found
