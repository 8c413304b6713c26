"""The whole plan of a configuration as one plain dictionary."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from draco.config.checks import whole
from draco.core.errors import ConfigError
from draco.core.llm.money import Prices, price_of
from draco.judge.options import prices_of
from draco.judge.views.size import needed_context
from draco.run.launch import sharded
from draco.study.planner.hardware import Assumptions, Gpu, gpu_named
from draco.study.planner.judge import (
    STATED,
    archive_calls,
    bill,
    calls_a_step,
    expected_calls,
    implied_tokens,
)
from draco.study.planner.memory import update_memory
from draco.study.planner.model import ModelSize, build, model_config, size_of_model

__all__ = ["layouts", "make_plan"]

#: the paper's judge, GPT-5.4, by litellm's packaged table of 2026-11
_GPT = Prices(2.5, 15.0, 0.25)
#: parameters from which the shares of peak speed that are assumed can hold
TIMED = 100_000_000


def make_plan(
    config: DictConfig,
    *,
    gpus: int,
    gpu: str,
    assumptions: Assumptions,
    archive: Path | None = None,
    gpus_per_node: int = 8,
) -> dict[str, Any]:
    """Memory, time, judge and verdict.

    Args:
        config: composed run configuration.
        gpus: of all machines together.
        gpu: name in `draco.study.planner.hardware.GPUS`.
        assumptions: efficiencies and means.
        archive: run whose judge calls give the mean tokens of a call.
        gpus_per_node: of one machine, at most; fewer `gpus` are one machine.

    Raises:
        ConfigError: an unknown GPU or model, GPUs that fill no whole machines, a size that cannot be.
    """
    _check(config)
    nodes = _nodes(gpus, gpus_per_node)
    kind, policy = gpu_named(gpu), config.policy
    shape = model_config(policy.path)
    model = build(shape, rank=policy.rank, targets=policy.targets, dtype=policy.dtype)
    size = size_of_model(model, shape, policy.rank)
    itemsize = getattr(torch, policy.dtype).itemsize
    found = {
        name: _layout(config, size, kind, nodes, train, serve, colocated, itemsize, assumptions)
        for name, (train, serve, colocated) in layouts(gpus // nodes).items()
    }
    return {
        "experiment": {
            "policy": policy.path,
            "gpus": gpus,
            "nodes": nodes,
            "gpu": gpu,
            "trainer": "fsdp" if sharded(config) else "ddp",
        },
        "model": {**asdict(size), "kv_bytes_a_token": size.kv_bytes()},
        "layouts": found,
        "judge": _judge(config, size, assumptions, archive),
        "assumptions": assumptions.as_dict(),
        "notes": _notes(size, gpus, nodes),
    }


def _check(config: DictConfig) -> None:
    for name in ("max_prompt_tokens", "max_response_tokens", "max_turns"):
        whole(f"limits.{name}", config.limits[name], 1)
    whole("update.micro_batch_tokens", config["update"].micro_batch_tokens, 1)
    whole("steps", config.steps, 0)
    whole("tasks_per_step", config.tasks_per_step, 1)
    whole("group_size", config.group_size, 2)
    whole("policy.rank", config.policy.rank, 1)


def _nodes(gpus: int, per_node: int) -> int:
    """Machines; each has as many of the GPUs."""
    whole("gpus_per_node", per_node, 1)
    whole("gpus", gpus, 1)
    if gpus > per_node and gpus % per_node:
        raise ConfigError(
            f"gpus={gpus}: expected at most gpus_per_node={per_node} (one node) or a multiple of it (whole nodes)"
        )
    return max(1, gpus // per_node)


def _notes(size: ModelSize, gpus: int, nodes: int) -> list[str]:
    """What the figures leave out."""
    found = []
    if size.parameters < TIMED:
        found.append(
            f"no speeds and hours: the assumptions are for models from {TIMED / 1e6:.0f} M parameters; a smaller one "
            "waits for kernel launches and the environment"
        )
    elif nodes > 1:
        found.append(
            "seconds, tokens/s and hours ignore the network between nodes; gathering shards over it takes longer"
        )
    if nodes > 1:
        starts = ", ".join(f"{name} {train}" for name, (train, _, _) in layouts(gpus // nodes).items())
        found.append(
            f"several nodes: on each, torchrun --nnodes {nodes} --nproc-per-node N ({starts}); scripts/slurm/ starts "
            "one process a GPU. GPU numbers are those of a node, alike on all"
        )
    return found


def layouts(gpus: int) -> dict[str, tuple[int, int, bool]]:
    """Of one node: GPUs that train, GPUs that serve, and whether they are the same ones in turn."""
    found = {"colocated": (gpus, gpus, True)}
    if gpus > 1:
        found["split"] = (gpus - gpus // 2, gpus // 2, False)
    return found


def _layout(
    config: DictConfig,
    size: ModelSize,
    gpu: Gpu,
    nodes: int,
    train: int,
    serve: int,
    colocated: bool,
    itemsize: int,
    a: Assumptions,
) -> dict[str, Any]:
    limits = config.limits
    rollouts = config.tasks_per_step * config.group_size
    longest = limits.max_prompt_tokens + limits.max_response_tokens
    micro = max(longest, config["update"].micro_batch_tokens)
    shards = train * nodes if sharded(config) else 1
    update = update_memory(
        size, tokens=micro, step_tokens=int(micro * a.sampled_share), shards=shards, itemsize=itemsize,
        checkpointing=bool(config.policy.get("gradient_checkpointing", False)),
    )  # fmt: skip
    # One side works at a time. The trainer's weights stay where they are during rollouts; sleeping servers keep none.
    resident = update.weights + update.adapter + update.optimizer if colocated else 0
    offered = gpu.memory - a.reserve
    room = min(0.9 * gpu.memory, gpu.memory - resident) - a.reserve
    weights = (size.parameters + size.lora_parameters) * 2
    load = Load(rollouts, limits.max_prompt_tokens * 0.5 + a.response_tokens)
    fitting = [  # more GPUs than key heads would hold copies of the cache
        n for n in (1, 2, 4, 8, 16)
        if n <= serve and size.kv_heads % n == 0 and weights / n + longest * size.kv_bytes() / n < room
    ]  # fmt: skip
    speeds = {
        n: _speed(size, gpu, load, a, train=train * nodes, servers=serve // n * nodes, tp=n, room=room) for n in fitting
    }
    tp = min(speeds, key=lambda n: speeds[n]["rollout_s"], default=0)
    speed = speeds.get(tp) if size.parameters >= TIMED else None
    serving = {"weights": weights / tp, "kv_cache": room - weights / tp, "total": room} if tp else None
    fits = update.total <= offered and bool(tp)
    return {
        "train_gpus": train * nodes, "serve_gpus": serve * nodes, "same_gpus": colocated,
        "update_bytes": update.as_dict(), "resident_bytes": resident,
        "serve_bytes": serving or {"weights": None, "kv_cache": None, "total": None},
        "tensor_parallel": tp, "servers": serve // tp * nodes if tp else 0, "budget_bytes": offered, "fits": fits,
        "advice": _advice(config, size, update.as_dict(), offered, shards, train * nodes, tp, itemsize),
        "settings": _settings(config, nodes, train, serve, tp, colocated, room / gpu.memory) if fits else [],
        "speed": speed, "hours": None if speed is None else config.steps * speed["step_s"] / 3600,
    }  # fmt: skip


def _settings(
    config: DictConfig, nodes: int, train: int, serve: int, tp: int, colocated: bool, share: float
) -> list[str]:
    """What to type for a layout: options of train.py. `train`, `serve` and GPU numbers are those of one node."""
    first = 0 if colocated else train
    sets = [",".join(str(first + i * tp + j) for j in range(tp)) for i in range(serve // tp)]
    trainer = ("fsdp" if sharded(config) else "ddp") + ("_multinode" if nodes > 1 else "")
    return [
        f"placement={'colocated' if colocated else 'split'}",
        f"trainer={trainer}",
        *([f"trainer.num_nodes={nodes}"] if nodes > 1 else []),
        f"trainer.devices={train if colocated else list(range(train))}".replace(" ", ""),
        f"engine.launch.tensor_parallel={tp}",
        f"engine.launch.gpus={json.dumps(sets, separators=(',', ':'))}",
        f"engine.launch.memory_share={int(share * 20) / 20}",
    ]


@dataclass(frozen=True, slots=True)
class Load:
    """What one step has to roll out."""

    rollouts: int
    mean: float  #: tokens of one, prompt included

    @property
    def tokens(self) -> float:
        return self.rollouts * self.mean


def _speed(
    size: ModelSize, gpu: Gpu, load: Load, a: Assumptions, *, train: int, servers: int, tp: int, room: float
) -> dict[str, float]:
    """Seconds of a step. Update: 8 flops a parameter and token (forward, recomputation, backward of frozen weights, and
    the reference pass), and attention's products. Decode: weights once a tick, and every sequence's cache."""
    kv = room * tp - (size.parameters + size.lora_parameters) * 2
    at_once = min(kv / (load.mean * size.kv_bytes() + size.state_bytes()), load.rollouts / servers)
    attention = 8 * 2 * size.attention_layers * size.query * load.mean / 2
    update = load.tokens * (8 * size.parameters + attention) / (train * gpu.flops * a.mfu)
    sampled = a.response_tokens * a.sampled_share
    seen = load.tokens - load.rollouts * sampled
    width = tp * a.tp_efficiency ** math.log2(tp)
    read = size.parameters * 2 + at_once * load.mean / 2 * size.kv_bytes()
    decode = sampled * read / (width * gpu.bandwidth * a.decode_efficiency) * load.rollouts / (servers * at_once)
    prefill = seen * 2 * size.parameters / (servers * width * gpu.flops * a.prefill_mfu)
    rollout = decode + prefill + a.turns * a.environment_s
    return {
        "rollout_s": rollout, "update_s": update, "step_s": rollout + update, "sequences_at_once": at_once * servers,
        "rollout_tokens_per_s": load.tokens / rollout, "update_tokens_per_s": load.tokens / update,
    }  # fmt: skip


def _advice(
    config: DictConfig,
    size: ModelSize,
    need: dict[str, int],
    room: float,
    shards: int,
    train: int,
    tp: int,
    itemsize: int,
) -> list[str]:
    """Which knob to turn, the most effective first."""
    if need["total"] <= room and tp:
        return []
    found = []
    missing = need["total"] - room
    if shards == 1 and train > 1 and (not tp or need["weights"] * (1 - 1 / train) > 0.2 * missing):
        found.append("trainer=fsdp: cuts the base model over the GPUs")
    if missing > 0:
        if not config.policy.get("gradient_checkpointing", False):
            found.append("policy.gradient_checkpointing=true: layers keep their input alone")
        if itemsize == 4:
            found.append("policy.dtype=bfloat16: half the weights")
        if need["layer_inputs"] + need["layer"] > 0.3 * missing:
            longest = config.limits.max_prompt_tokens + config.limits.max_response_tokens
            if config["update"].micro_batch_tokens > longest:
                found.append(f"update.micro_batch_tokens={longest}: activations shrink with it")
            a_token = (need["layer_inputs"] + need["layer"]) / max(longest, config["update"].micro_batch_tokens)
            fitting = int(longest - missing / a_token) - config.limits.max_prompt_tokens
            if fitting > 2048:
                found.append(f"limits.max_response_tokens={fitting}: shorter trajectories")
    if not tp:
        found.append("servers: no tensor-parallel size holds weights and one longest trajectory beside the trainer")
    found.append("more GPUs, or GPUs with more memory")
    return found


def _judge(config: DictConfig, size: ModelSize, a: Assumptions, archive: Path | None) -> dict[str, Any]:
    if "judge" not in config.rubric:
        return {"step": None, "run": None}
    stage, groups, members = config.rubric, config.tasks_per_step, config.group_size
    own = "k" in stage  # the policy judges
    voters = int(stage.k) if own else max(len(config.judge.get("members") or []), 1)
    plan = str(stage.judge.get("plan", "paper"))
    most = calls_a_step(
        groups, members, dynamic=config.rubric.name != "static", citations=config.credit.name == "step",
        lean=plan == "lean", voters=voters,
    )  # fmt: skip
    means = STATED if archive is None else archive_calls(archive)
    model = str(stage.judge.get("model", ""))
    free = own or "scripted" in model
    price = Prices(0.0, 0.0) if free else prices_of(stage.judge.get("prices")) or price_of(model)
    step = bill(expected_calls(most, means, groups, members), means, price)
    run = {
        key: None if step[key] is None else step[key] * config.steps
        for key in ("calls", "tokens_in", "tokens_out", "tokens_cached", "usd")
    }
    reply = int(stage.get("max_reply_tokens", 4096))
    limits = config.limits
    context = needed_context(
        plan, members, limits.max_prompt_tokens, limits.max_response_tokens, limits.max_turns, reply
    )["merge"]
    paper = calls_a_step(16, 6, dynamic=True, citations=True)
    return {
        "model": model, "free": free, "priced": price is not None,
        "means_from": str(archive) if archive else "stated", "most_calls": sum(most.values()),
        "not_in_archive": sorted(most.keys() - means.keys()),
        "step": step, "run": run,
        "seconds_a_step": step["calls"] * a.judge_latency_s / a.judge_concurrency,
        "self_judge": {"merge_context": context, "policy_context": size.context, "fits": context <= size.context},
        "paper": implied_tokens(_GPT, STATED, paper) | {"input_usd": _GPT.input, "output_usd": _GPT.output},
    }  # fmt: skip
