"""The whole plan of a configuration as one plain dictionary."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from draco.errors import ConfigError
from draco.placement import sharded
from draco.plan.hardware import Assumptions, Gpu, gpu_named
from draco.plan.judge import STATED, archive_means, bill, calls_a_step, implied_tokens, prices
from draco.plan.memory import update_memory
from draco.plan.model import ModelSize, build, layer_shards, model_config, size_of_model

__all__ = ["layouts", "make_plan"]


def make_plan(
    config: DictConfig, *, gpus: int, gpu: str, assumptions: Assumptions, archive: Path | None = None
) -> dict[str, Any]:
    """Memory, time, judge and verdict.

    Args:
        config: composed run configuration.
        gpus: in the machine.
        gpu: name in `draco.plan.hardware.GPUS`.
        assumptions: efficiencies and means.
        archive: run whose judge calls give the mean tokens of a call.

    Raises:
        ConfigError: an unknown GPU or model.
    """
    if gpus < 1:
        raise ConfigError(f"gpus={gpus}; expected 1 or more")
    kind, policy = gpu_named(gpu), config.policy
    shape = model_config(policy.path)
    model = build(shape, rank=policy.rank, targets=policy.targets, dtype=policy.dtype)
    size = size_of_model(model, shape, policy.rank)
    itemsize = getattr(torch, policy.dtype).itemsize
    found = {
        name: _layout(config, size, kind, train, serve, colocated, itemsize, assumptions)
        for name, (train, serve, colocated) in layouts(gpus).items()
    }
    return {
        "experiment": {
            "policy": policy.path,
            "gpus": gpus,
            "gpu": gpu,
            "trainer": "fsdp" if sharded(config) else "ddp",
        },
        "model": {**asdict(size), "kv_bytes_a_token": size.kv_bytes(), "shards": layer_shards(model, gpus)},
        "layouts": found,
        "judge": _judge(config, size, assumptions, archive),
        "assumptions": assumptions.as_dict(),
    }


def layouts(gpus: int) -> dict[str, tuple[int, int, bool]]:
    """GPUs that train, GPUs that serve, and whether they are the same ones in turn."""
    found = {"colocated": (gpus, gpus, True)}
    if gpus > 1:
        found["split"] = (gpus - gpus // 2, gpus // 2, False)
    return found


def _layout(
    config: DictConfig,
    size: ModelSize,
    gpu: Gpu,
    train: int,
    serve: int,
    colocated: bool,
    itemsize: int,
    a: Assumptions,
) -> dict[str, Any]:
    limits, groups = config.limits, config.tasks_per_step
    rollouts = groups * config.group_size
    longest = limits.max_prompt_tokens + limits.max_response_tokens
    micro = max(longest, config["update"].micro_batch_tokens)
    shards = train if sharded(config) else 1
    update = update_memory(
        size, tokens=micro, step_tokens=int(micro * a.sampled_share), shards=shards, itemsize=itemsize,
        checkpointing=bool(config.policy.get("gradient_checkpointing", False)),
    )  # fmt: skip

    # Servers: as many of the smallest tensor-parallel size as hold the weights and the longest trajectories of a batch.
    weights = (size.parameters + size.lora_parameters) * 2
    room = gpu.memory * 0.9 - a.reserve
    tp = next((n for n in (1, 2, 4, 8, 16) if n <= serve and weights / n + longest * size.kv_bytes() / n < room), 0)
    servers = serve // tp if tp else 0
    mean = limits.max_prompt_tokens * 0.5 + a.response_tokens
    sequence = mean * size.kv_bytes() + size.state_bytes()
    kv = max(room - weights / tp, 0.0) if tp else 0.0
    at_once = min(kv * tp / sequence, rollouts / servers) if tp else 0.0
    offered = gpu.memory - a.reserve  # one side at a time: the servers sleep while the trainer updates
    serving = weights / tp + kv if tp else weights / serve
    fits_update = update.total <= offered
    fits_serving = bool(tp)
    speed = _speed(size, gpu, train, servers, tp, at_once, rollouts, mean, a) if tp else None
    return {
        "train_gpus": train, "serve_gpus": serve, "same_gpus": colocated,
        "update_bytes": update.as_dict(),
        "serve_bytes": {"weights": weights / tp if tp else None, "kv_cache": kv, "total": serving},
        "tensor_parallel": tp, "servers": servers, "sequences_at_once": at_once,
        "budget_bytes": offered, "fits": fits_update and fits_serving,
        "advice": _advice(config, size, update.as_dict(), offered, shards, train, tp, itemsize),
        "speed": speed, "hours": None if speed is None else config.steps * speed["step_s"] / 3600,
    }  # fmt: skip


def _speed(
    size: ModelSize,
    gpu: Gpu,
    train: int,
    servers: int,
    tp: int,
    at_once: float,
    rollouts: int,
    mean: float,
    a: Assumptions,
) -> dict[str, float]:
    """Seconds of a step. Update: 8 flops a parameter and token (forward, recomputation, backward of frozen weights, and
    the reference pass), and attention's products. Decode: weights once a tick, and every sequence's cache."""
    tokens = rollouts * mean
    attention = 8 * 2 * size.attention_layers * size.query * mean / 2
    update = tokens * (8 * size.parameters + attention) / (train * gpu.flops * a.mfu)
    sampled = a.response_tokens * a.sampled_share
    seen = tokens - rollouts * sampled
    tick = ((size.parameters * 2 + at_once * mean / 2 * size.kv_bytes()) / tp) / (gpu.bandwidth * a.decode_efficiency)
    decode = sampled * tick * rollouts / (servers * max(at_once, 1e-9))
    prefill = seen * 2 * size.parameters / (servers * tp * gpu.flops * a.prefill_mfu)
    rollout = decode + prefill + a.turns * a.environment_s
    return {
        "rollout_s": rollout, "update_s": update, "step_s": rollout + update,
        "rollout_tokens_per_s": tokens / rollout, "update_tokens_per_s": tokens / update,
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
    if not tp:
        found.append("servers: no tensor-parallel size holds weights and one longest trajectory: more or larger GPUs")
    if need["total"] <= room:
        return found
    missing = need["total"] - room
    if shards == 1 and train > 1 and need["weights"] * (1 - 1 / train) > 0.2 * missing:
        found.append("trainer=fsdp: cuts the base model over the GPUs")
    if not config.policy.get("gradient_checkpointing", False):
        found.append("policy.gradient_checkpointing=true: layers keep their input alone")
    if itemsize == 4:
        found.append("policy.dtype=bfloat16: half the weights")
    if need["layer_inputs"] + need["layer"] > 0.3 * missing:
        longest = config.limits.max_prompt_tokens + config.limits.max_response_tokens
        if config["update"].micro_batch_tokens > longest:
            found.append(f"update.micro_batch_tokens={longest}: activations shrink with it")
        a_token = (need["layer_inputs"] + need["layer"]) / max(longest, config["update"].micro_batch_tokens)
        fitting = int(longest - missing / a_token)
        if fitting > 2048:
            found.append(
                f"limits.max_response_tokens={fitting - config.limits.max_prompt_tokens}: shorter trajectories"
            )
    found.append("more GPUs, or GPUs with more memory")
    return found


def _judge(config: DictConfig, size: ModelSize, a: Assumptions, archive: Path | None) -> dict[str, Any]:
    if "judge" not in config.rubric.stage:
        return {"calls_a_step": {}, "step": None, "run": None}
    dynamic, citations = config.rubric.name != "static", config.credit.name == "step"
    model = str(config.judge.get("model", ""))
    calls: dict[str, float] = dict(
        calls_a_step(config.tasks_per_step, config.group_size, dynamic=dynamic, citations=citations)
    )
    means = STATED
    if archive is not None:
        means, calls_seen = archive_means(archive)
        calls = calls_seen
    price = prices(model)
    step = bill(calls, means, price)
    run = {
        key: None if step[key] is None else step[key] * config.steps
        for key in ("calls", "tokens_in", "tokens_out", "usd")
    }
    longest = config.limits.max_prompt_tokens + config.limits.max_response_tokens
    merge = config.group_size * longest + 4000 + (15 + 10 * config.group_size) * 120
    reference = price or (2.5e-6, 15e-6)
    paper = calls_a_step(16, 6, dynamic=True, citations=True)
    return {
        "model": model, "priced": price is not None, "means_from": str(archive) if archive else "stated",
        "step": step, "run": run,
        "seconds_a_step": step["calls"] * a.judge_latency_s / a.judge_concurrency,
        "self_judge": {"merge_context": merge, "policy_context": size.context, "fits": merge <= size.context},
        "paper": implied_tokens(reference, STATED, paper),
    }  # fmt: skip
