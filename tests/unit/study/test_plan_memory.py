"""The planner's memory against what is measured: parameters, shards, and the peak of small models."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from draco.policy.attention import pack_attention, packed_inputs
from draco.policy.structure import hidden_states, output_head
from draco.study.planner.memory import update_memory
from draco.study.planner.model import build, model_config, size_of_model
from draco.update.logprobs import step_logprobs


@pytest.mark.parametrize(
    ("path", "parameters", "lora", "kv"),
    [("Qwen/Qwen3.6-27B", 26.896e9, 116.7e6, 64 * 1024), ("Qwen/Qwen2.5-32B-Instruct", 32.764e9, 134.2e6, 256 * 1024)],
)
def test_the_policies_of_the_paper_are_counted(path: str, parameters: float, lora: float, kv: int) -> None:
    config = model_config(path)
    model = build(config, rank=16)
    size = size_of_model(model, config, 16)
    assert size.parameters == pytest.approx(parameters, abs=0.5e6)
    assert size.lora_parameters == pytest.approx(lora, abs=0.05e6)
    assert size.kv_bytes() == kv
    if "3.6" in path:
        adapted = {n.split(".")[-1] for n, m in model.named_modules() if hasattr(m, "lora_A")}
        assert adapted == {
            "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj",
            "gate_proj", "up_proj", "down_proj",
        }  # fmt: skip
    shards = layer_shards(model, 8)
    assert sum(s["base"] for s in shards) == 2 * size.parameters
    assert max(s["base"] for s in shards) < 1.001 * 2 * size.parameters / 8


def layer_shards(model: nn.Module, ranks: int) -> list[dict[str, int]]:
    """Bytes that each rank of `ranks` holds of a meta model after `shard`: exact, counted by shapes.

    FSDP gives rank r the r-th of `ranks` blocks of ⌈rows / ranks⌉ rows of every parameter; the last ones may be short.
    """
    rows: list[dict[str, int]] = []
    for number in range(ranks):
        base = trainable = 0
        for parameter in model.parameters():
            length = parameter.shape[0] if parameter.dim() else 1
            each = -(-length // ranks)
            mine = max(min(each, length - number * each), 0)
            size = parameter.numel() // max(length, 1) * mine * parameter.element_size()
            if parameter.requires_grad:
                trainable += size
            else:
                base += size
        rows.append({"base": base, "adapter": trainable})
    return rows


def test_shards_are_those_of_fully_shard_in_a_group_of_eight() -> None:
    """Against FSDP2 itself, rank by rank, with a fake process group."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from draco.policy.sharding import shard

    shape = Qwen2Config(hidden_size=72, intermediate_size=100, num_hidden_layers=3, num_attention_heads=4,
                        num_key_value_heads=2, vocab_size=1001)  # fmt: skip
    expected = layer_shards(build(shape, rank=3), 8)
    for number in range(8):
        dist.init_process_group("fake", rank=number, world_size=8, store=FakeStore())
        try:
            model = build(shape, rank=3)
            shard(model, init_device_mesh("cpu", (8,)), folder=None, device=torch.device("cpu"))
            found = {"base": 0, "adapter": 0}
            for parameter in model.parameters():
                local: Any = parameter
                kind = "adapter" if parameter.requires_grad else "base"
                found[kind] += local.to_local().numel() * parameter.element_size()
        finally:
            dist.destroy_process_group()
        assert found == expected[number], number


class Tracker(TorchDispatchMode):
    """Bytes of live tensors, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak = 0, 0
        self.known: set[int] = set()

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.known or not size:
            return
        self.known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.forget, key, size)

    def forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                self.add(tensor)
        return out


SHAPES = {
    "llama": LlamaConfig(hidden_size=96, intermediate_size=256, num_hidden_layers=6, num_attention_heads=6,
                         num_key_value_heads=3, vocab_size=800, use_cache=False),
    "qwen2": Qwen2Config(hidden_size=128, intermediate_size=448, num_hidden_layers=4, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=1200, use_cache=False),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_memory_is_within_a_tenth_of_what_is_tracked(name: str, checkpointing: bool, dtype: torch.dtype) -> None:
    config, tokens, rank = SHAPES[name], 512, 8
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    base.requires_grad_(False)
    if checkpointing:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model: nn.Module = get_peft_model(base, LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert pack_attention(model)
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    size = size_of_model(model, config, rank)
    ids = torch.randint(0, 700, (1, tokens))
    targets = ids[0, 1:]

    def step() -> None:
        weight, bias = output_head(model)
        inputs = packed_inputs(model, (tokens // 2, tokens // 2), ids.device)
        hidden = hidden_states(model, ids, **inputs).flatten(0, 1)[:-1]
        logprobs, _ = step_logprobs(hidden, weight, targets, bias=bias)
        del hidden
        logprobs.sum().backward()

    step()
    optimizer.step()
    optimizer.zero_grad()
    tracker = Tracker()
    state = [t for s in optimizer.state.values() for t in s.values()]
    for tensor in (*model.parameters(), *state):
        tracker.add(tensor)
    resident = tracker.live
    with tracker:
        step()
    memory = update_memory(
        size, tokens=tokens, step_tokens=tokens - 1, itemsize=dtype.itemsize, checkpointing=checkpointing
    )
    fixed = memory.weights + memory.adapter + memory.optimizer
    assert resident == pytest.approx(fixed, rel=0.02)
    assert memory.total == pytest.approx(tracker.peak, rel=0.10), (memory, tracker.peak - resident)
