"""Sizes of a policy, counted on the meta device: no weights, no network, no GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from draco.core.errors import ConfigError
from draco.core.files import resolve

__all__ = ["ModelSize", "build", "model_config", "size_of_model"]


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Counts of a base model and its adapter."""

    model_type: str
    layers: int
    attention_layers: int  #: with a key/value cache that grows with the context
    hidden: int
    ffn: int
    vocabulary: int
    query: int  #: width of all query heads
    key_value: int  #: width of all key heads (and of all value heads)
    heads: int
    linear_key: int  #: widths of the linear-attention layers, 0 without any
    linear_value: int
    linear_heads: int
    gated: bool  #: the query projection holds an output gate too
    rank: int
    parameters: int  #: of the base model
    lora_parameters: int
    lora_layers: int  #: adapted matrices in all
    lora_per_layer: int  #: adapted matrices of the layer that has most
    lora_inputs: int  #: sum of the widths of their inputs, of the layer where it is largest
    largest_layer: int  #: parameters of the largest decoder layer, without its adapter
    outside: int  #: parameters outside the decoder layers: embedding, norm, head
    context: int

    @property
    def kv_heads(self) -> int:
        """Heads that keys and values have."""
        return self.key_value * self.heads // self.query

    def kv_bytes(self, itemsize: int = 2) -> int:
        """Key/value cache of one token."""
        return self.attention_layers * 2 * self.key_value * itemsize

    def state_bytes(self) -> int:
        """Recurrent state of one sequence (float32), whatever its length."""
        if not self.linear_heads:
            return 0
        head = self.linear_value // self.linear_heads
        return (self.layers - self.attention_layers) * self.linear_heads * head * head * 4


def model_config(path: str) -> Any:
    """Configuration of a model: from a folder, an installed package, or the shapes shipped for known hub names.

    Raises:
        ConfigError: it is none of these.
    """
    shapes = files("draco.study.planner") / "shapes"
    shape = shapes / f"{path.rsplit('/', 1)[-1].lower()}.json"
    if shape.is_file():
        content = json.loads(shape.read_text(encoding="utf-8"))
        return AutoConfig.for_model(content.pop("model_type"), **content)
    folder = Path(resolve(path))
    if (folder / "config.json").is_file():
        return AutoConfig.from_pretrained(folder).get_text_config()
    known = sorted(p.name.removesuffix(".json") for p in shapes.iterdir())
    raise ConfigError(
        f"policy.path={path!r}: no config.json there, and its shape is not shipped (shipped: {', '.join(known)}); pass "
        "a folder that holds the model's config.json"
    )


def build(config: Any, *, rank: int, targets: str | Sequence[str] = "all-linear", dtype: str = "bfloat16") -> nn.Module:
    """The PEFT model on the meta device."""
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))  # type: ignore[no-untyped-call]
        base.requires_grad_(False)
        chosen = targets if isinstance(targets, str) else list(targets)
        return cast(nn.Module, get_peft_model(base, LoraConfig(r=rank, target_modules=chosen, task_type="CAUSAL_LM")))


def size_of_model(model: nn.Module, config: Any, rank: int) -> ModelSize:
    """Count a model of `build`, or any PEFT model with a rank-`rank` LoRA."""
    base = [p for p in model.parameters() if not p.requires_grad]
    lora = {n: p for n, p in model.named_parameters() if p.requires_grad}
    (layers,) = (m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == config.num_hidden_layers)
    frozen = [sum(p.numel() for p in layer.parameters() if not p.requires_grad) for layer in layers]
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(layers)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "linear_num_value_heads", 0) if "linear_attention" in kinds else 0
    adapted = [sum("lora_A" in n for n, _ in layer.named_parameters()) for layer in layers]
    inputs = [sum(p.shape[1] for n, p in layer.named_parameters() if "lora_A" in n) for layer in layers]
    q_out = {m.base_layer.out_features for n, m in model.named_modules() if n.endswith("q_proj")}
    return ModelSize(
        model_type=config.model_type,
        layers=len(layers),
        attention_layers=sum(k != "linear_attention" for k in kinds),
        hidden=config.hidden_size,
        ffn=config.intermediate_size,
        vocabulary=config.vocab_size,
        query=config.num_attention_heads * head,
        key_value=config.num_key_value_heads * head,
        heads=config.num_attention_heads,
        linear_key=config.linear_num_key_heads * config.linear_key_head_dim if heads else 0,
        linear_value=config.linear_num_value_heads * config.linear_value_head_dim if heads else 0,
        linear_heads=heads,
        gated=max(q_out, default=0) > config.num_attention_heads * head,
        rank=rank,
        parameters=sum(p.numel() for p in base),
        lora_parameters=sum(p.numel() for p in lora.values()),
        lora_layers=sum(adapted),
        lora_per_layer=max(adapted),
        lora_inputs=max(inputs),
        largest_layer=max(frozen),
        outside=sum(p.numel() for p in base) - sum(frozen),
        context=getattr(config, "max_position_embeddings", 0),
    )
