"""Small Transformers models with random weights, one for each kind of attention that packing must serve."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    models: dict[str, Callable[[], nn.Module]] = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)),
        "sliding window": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=6)),
    }
    return models[kind]()


def relative(a: Tensor, b: Tensor) -> float:
    """Norm of the difference over the norm of the second."""
    return float((a.detach() - b.detach()).norm() / b.detach().norm())
