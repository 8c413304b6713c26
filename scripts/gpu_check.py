"""The measurements of scripts/gpu_check.sh. A Qwen2-shaped policy of 1.5B random parameters; toy sizes with --dry."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Qwen2Config

from draco.core.types import Step, Task, Termination, Trajectory
from draco.policy.attention import pack_attention
from draco.policy.policy import Policy
from draco.study.planner.hardware import GPUS
from draco.update.gradients import Worker
from draco.update.options import LossOptions
from draco.update.packing import Row

BUDGET_S = 440.0


def build(folder: Path, device: torch.device, dry: bool) -> Policy:
    """A policy with random weights: nothing is downloaded or read."""
    tiny = Path(str(files("draco.policy") / "tiny"))
    for file in tiny.iterdir():
        if "tokenizer" in file.name or "template" in file.name or file.name == "special_tokens_map.json":
            shutil.copy(file, folder)
    shape: dict[str, Any] = (
        {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 4096}
        if dry
        else {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
              "num_key_value_heads": 2, "vocab_size": 151936}
    )  # fmt: skip
    Qwen2Config(**shape, max_position_embeddings=32768, architectures=["Qwen2ForCausalLM"]).save_pretrained(folder)
    policy = Policy(str(folder), dtype="float32" if dry else "bfloat16", gradient_checkpointing=True, sharded=True)
    generator = torch.Generator().manual_seed(0)
    given: dict[int, nn.Parameter] = {}
    for module in policy.model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                if id(parameter) not in given:
                    value = torch.randn(parameter.shape, generator=generator).mul_(0.02) if dry else torch.empty(
                        parameter.shape, device=device, dtype=parameter.dtype).normal_(0, 0.02)  # fmt: skip
                    given[id(parameter)] = nn.Parameter(value.to(device, parameter.dtype), requires_grad=False)
                module.register_parameter(name, given[id(parameter)])
    policy.model.to(device)
    policy.train()
    return policy


def row(tokens: int, seed: int) -> Row:
    """A trajectory whose second half trains."""
    generator = torch.Generator().manual_seed(seed)
    ids = tuple(torch.randint(5, 500, (tokens,), generator=generator).tolist())
    half = tokens // 2
    trajectory = Trajectory(
        Task("t", "", "train", "s"), 0, (), ids, (-1,) * half + (0,) * (tokens - half), (-1.0,) * tokens,
        (Step(1, (half, tokens), "", "", 1),), Termination.SUBMITTED, half, 0, seed,
    )  # fmt: skip
    return Row(trajectory, (0.5,))


@contextmanager
def measured(device: torch.device, into: dict[str, Any]) -> Iterator[None]:
    """Seconds and peak memory of the body."""
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    yield
    if gpu:
        torch.cuda.synchronize()
        into["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    into["seconds"] = round(time.perf_counter() - started, 4)


def update(policy: Policy, rows: list[Row], layout: str, device: torch.device, peak: float) -> dict[str, Any]:
    """Forward, reference and backward pass of some rows: packed, padded to the longest, or one after the other."""
    packed = layout == "packed"
    worker = Worker(
        policy, LossOptions(), temperature=1.0, max_tokens=max(sum(r.length for r in rows), 1), packed=packed,
        backward=Tensor.backward,
    )  # fmt: skip
    worker.accumulate(rows[:1])  # warm: kernels are chosen and compiled
    result: dict[str, Any] = {"tokens": sum(r.length for r in rows), "layout": layout}
    with measured(device, result):
        totals = worker.accumulate(rows, [tuple(rows)] if layout == "padded" else None)
    base: Any = policy.model.get_base_model()
    config = base.config
    parameters = sum(p.numel() for p in policy.parameters() if not p.requires_grad)
    width = config.num_attention_heads * (config.hidden_size // config.num_attention_heads)
    attention = 2 * config.num_hidden_layers * width * sum(r.length**2 for r in rows) / 2 * 8
    flops = 8 * parameters * result["tokens"] + attention  # forward, recomputation, ∂x, reference
    result["tokens_per_s"] = round(result["tokens"] / result["seconds"], 1)
    result["padding_share"] = round(1 - totals.sums["model_tokens"] / totals.sums["computed_tokens"], 3)
    if peak:
        result["mfu"] = round(flops / result["seconds"] / peak, 3)
    for parameter in policy.parameters():
        parameter.grad = None
    return result


def world_of_one(policy: Policy, device: torch.device) -> dict[str, Any]:
    """One all-reduce of something of the size of the adapter's gradient."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=0, world_size=1)
    try:
        parameters = [p for p in policy.parameters() if p.requires_grad]
        flat = torch.cat([torch.ones_like(p).flatten().float() for p in parameters])
        result: dict[str, Any] = {"parameters": flat.numel()}
        with measured(device, result):
            dist.all_reduce(flat)
        result["ok"] = bool((flat == 1).all())
        return result
    finally:
        dist.destroy_process_group()


def round_trip(policy: Policy, folder: Path) -> dict[str, Any]:
    """An adapter to the disk and back."""
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if parameter.requires_grad and "lora_B" in name:
                parameter.normal_(0, 0.02)
    before = {k: v.clone() for k, v in policy.adapter_state().items()}
    policy.save_adapter(folder / "adapter")
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    policy.load_adapter(folder / "adapter")
    return {"tensors": len(before), "ok": all(torch.equal(v, before[k]) for k, v in policy.adapter_state().items())}


def main(arguments: list[str]) -> int:
    """Print one JSON object; 0 all is well, 1 a check failed, 2 there is no GPU."""
    dry = "--dry" in arguments
    if not dry and not torch.cuda.is_available():
        print("error: no GPU here; scripts/gpu_check.sh --dry runs the same path on a CPU", file=sys.stderr)
        return 2
    started = time.monotonic()
    device = torch.device("cpu" if dry else "cuda")
    name = platform.processor() or platform.machine() if dry else torch.cuda.get_device_name()
    peak = 0.0 if dry else next((g.flops for k, g in GPUS.items() if k.split("-")[0] in name.lower()), 0.0)
    out: dict[str, Any] = {"device": name, "torch": torch.__version__, "dry": dry, "update": [], "skipped": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        policy = build(folder, device, dry)
        out["parameters"] = sum(p.numel() for p in policy.parameters())
        ways = (["packed"] if pack_attention(policy.model) else []) + ["one by one", "padded"]
        sizes = (64, 128, 256) if dry else (4096, 16384, 32768)
        for tokens in sizes:
            if time.monotonic() - started > BUDGET_S * 0.6:
                out["skipped"].append(f"update at {tokens} tokens: out of time")
                continue
            try:
                out["update"].append(update(policy, [row(tokens, 0)], ways[0], device, peak))
            except torch.OutOfMemoryError as error:
                out["skipped"].append(f"update at {tokens} tokens: {str(error).splitlines()[0]}")
        lengths = [sizes[0] // n for n in (1, 2, 3, 4, 8)]
        mixed = [row(n, i) for i, n in enumerate(lengths)]
        out["packed_vs_padded"] = [update(policy, mixed, way, device, peak) for way in ways]
        out["world_of_one"] = world_of_one(policy, device)
        out["adapter_round_trip"] = round_trip(policy, folder)
    out["seconds"] = round(time.monotonic() - started, 1)
    print(json.dumps(out, indent=1))
    return 0 if out["world_of_one"]["ok"] and out["adapter_round_trip"]["ok"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
