"""Small copies of a model: the same class and the same kinds of layer, with few and narrow layers and random weights.

What changes with the length of a row (sliding windows, chunks, a rope that switches) changes at thousands of tokens in
a real model and at a few dozen in its copy. So a check crosses these lengths in a second, in float32, on a CPU.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from draco.core.errors import ConfigError
from draco.policy.loading import quiet_loading

__all__ = ["LONGEST", "SWITCH", "random_model", "small_config", "small_copy"]

SWITCH = 16  #: tokens of a window or a chunk in a copy
ORIGINAL = 24  #: positions of a copy before its rope changes
LONGEST = 128  #: positions of a copy
_MOST = 100_000_000  #: parameters of a copy

#: largest value of a size in a copy
_CAPS = {
    "vocab_size": 512, "vocab_size_per_layer_input": 512, "intermediate_size": 48, "intermediate_size_mlp": 48,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "shared_intermediate_size": 24, "ffn_dim": 48,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "n_shared_experts": 1,
    "moe_num_shared_experts": 1, "num_experts_per_tok": 2, "moe_k": 2, "moe_topk": 2, "top_k_experts": 2, "n_group": 1,
    "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "first_k_dense_replace": 1, "max_window_layers": 1,
    "lru_width": 64, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8, "keep_window_size": 8,
}  # fmt: skip
#: lengths at which a model changes, where they are set
_SWITCHES = (
    "sliding_window", "attention_chunk_size", "attention_window_size", "window_size", "floor_scale",
)  # fmt: skip
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "image_token_id", "image_token_index", "sep_token_id")
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len")


def small_config(config: PreTrainedConfig, longest: int | None = None) -> PreTrainedConfig:
    """The configuration of a copy of `config`'s text model; `config` itself is left as it is.

    Heads stay as wide as they are where the configuration says how wide, because rope factors are made for that.

    Args:
        longest: tokens that no row exceeds. What changes only beyond does not change in the copy. None: no limit.
    """
    reach = longest or math.inf
    small = copy.deepcopy(config.get_text_config())
    for name, most in _CAPS.items():
        _set(small, name, lambda value, most=most: min(value, most))
    for name in _TOKENS:
        _set(small, name, lambda value: 0 if isinstance(value, int) else None)
    _keep_layers(small)
    _narrow(small)
    rope: Any = getattr(small, "rope_parameters", None) or {}
    kinds = [rope, *(r for r in rope.values() if isinstance(r, dict))]
    for part in kinds:
        if part.get("original_max_position_embeddings"):
            before = part["original_max_position_embeddings"]
            part["original_max_position_embeddings"] = LONGEST if before >= reach else ORIGINAL
    _set(small, "original_max_position_embeddings", lambda value: LONGEST if value >= reach else ORIGINAL)
    dynamic = any(part.get("rope_type") == "dynamic" for part in kinds)
    for name in _LENGTHS:
        _set(small, name, lambda value: min(value, ORIGINAL if dynamic and value < reach else LONGEST))
    for name in _SWITCHES:
        _set(small, name, lambda value: LONGEST if value >= reach else min(value, SWITCH))
    return small


def _set(config: Any, name: str, change: Any) -> None:
    """Change a field that is there, under the model's own name for it, and that holds something."""
    if name not in config.attribute_map and getattr(config, name, None):
        setattr(config, name, change(getattr(config, name)))


def _keep_layers(config: Any) -> None:
    """Keep one layer of every kind, and two at least. Lists with an entry a layer and lists of layers follow."""
    count = config.num_hidden_layers
    lists = {k: v for k, v in vars(config).items() if isinstance(v, list | tuple) and count > 2}
    each = {k: v for k, v in lists.items() if len(v) == count and set(v) <= {0, 1} | {x for x in v if type(x) is str}}
    some = {k: v for k, v in lists.items() if k not in each and k.endswith(("layers", "idxs", "indices"))}
    kinds = [(*(v[i] for v in each.values()), *(i in v for v in some.values())) for i in range(count)]
    first = {kind: i for i, kind in reversed(list(enumerate(kinds)))}
    kept = sorted(first.values())
    kept = sorted(kept + [i for i in range(count) if i not in kept][: max(0, 2 - len(kept))])[:8]
    for name, values in each.items():
        setattr(config, name, type(values)(values[i] for i in kept))
    for name, values in some.items():
        setattr(config, name, type(values)(at for at, i in enumerate(kept) if i in values))
    config.num_hidden_layers = len(kept)


def _narrow(config: Any) -> None:
    """Few heads; a hidden size that fits them."""
    heads = int(config.num_attention_heads)
    keys = int(getattr(config, "num_key_value_heads", None) or heads)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    few = 4 if keys in (1, heads) else 2 * min(2, heads // keys)
    config.num_attention_heads = few
    if getattr(config, "num_key_value_heads", None):
        config.num_key_value_heads = few if keys == heads else min(2, keys)
    config.hidden_size = few * width
    if isinstance(getattr(config, "mamba_d_head", None), int) and hasattr(config, "mamba_expand"):
        config.mamba_n_heads = config.mamba_expand * config.hidden_size // config.mamba_d_head


def random_model(
    config: PreTrainedConfig, seed: int = 0, kind: Any = AutoModelForCausalLM, **options: Any
) -> PreTrainedModel:
    """A model with random float32 weights on the CPU under which every layer matters; no random stream moves.

    With transformers' own initial weights attention is nearly uniform, and a wrong mask changes almost nothing.

    Args:
        config: of a model that `kind` knows.
        kind: an auto class of transformers.
        options: further arguments of `from_config`.
    """
    with torch.random.fork_rng(devices=[]), quiet_loading():
        torch.manual_seed(seed)
        model: PreTrainedModel = kind.from_config(config, dtype=torch.float32, **options)
        for name, parameter in model.named_parameters():
            _enlarge(name, parameter)
    model.train(False)
    return model


@torch.no_grad()
def _enlarge(name: str, parameter: nn.Parameter) -> None:
    """Matrices keep the size of what they multiply; vectors get a little noise on what they start from."""
    if parameter.ndim >= 2 and not name.endswith(("A_log", "conv1d.weight", "conv.weight")):
        parameter.normal_(std=parameter.shape[-1] ** -0.5)
    elif parameter.ndim == 1 and not name.endswith(("A_log", "dt_bias", "D")):
        parameter.add_(0.1 * torch.randn_like(parameter))


def small_copy(config: PreTrainedConfig, longest: int | None = None, **options: Any) -> PreTrainedModel:
    """A copy of `config`'s text model with random weights.

    Args:
        longest: see `small_config`.
        options: further arguments of `from_config`.

    Raises:
        ConfigError: none could be made.
    """
    try:
        small = small_config(config, longest)
        with torch.device("meta"):
            size = AutoModelForCausalLM.from_config(small, **options).num_parameters()  # type: ignore[no-untyped-call]
        if size > _MOST:
            raise ConfigError(f"{size:,} parameters, expected {_MOST:,} at most")
        return random_model(small, **options)
    except Exception as error:  # sizes that do not fit each other: every family checks its own
        raise ConfigError(
            f"no small copy of a {config.model_type} model could be made: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}"
        ) from error
