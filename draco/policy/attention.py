"""Attention over packed rows: a row holds several trajectories one after another, and none of them sees another.

Transformers can derive a block-diagonal mask from restarting position ids, but a dense T × T mask makes attention
quadratic in the *packed* length: on a CPU that is 10–20 times slower than attending one trajectory at a time. So
attention alone splits a packed row at its boundaries; all other layers run on the complete row. Where flash-attn is
installed, its variable-length kernel gets the same boundaries.

This is registered with transformers' public `AttentionInterface` as `draco_packed`. Without boundaries it is plain
`sdpa`, so generation and everything else are unchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils.import_utils import is_flash_attn_2_available

from draco.core.errors import ConfigError
from draco.policy.structure import base_model, evaluating, hidden_states

__all__ = ["leaks_across_rows", "pack_attention", "packed_inputs"]

log = logging.getLogger("draco")

_NAME = "draco_packed"

#: Layer kinds (`config.layer_types`) whose only mixing over time is attention.
_ATTENTION_ONLY = frozenset({"full_attention", "sliding_attention"})

#: Config fields of recurrent or convolutional token mixers, for models that name no layer types.
_MIXER_FIELDS = (
    "linear_num_key_heads",  # qwen3-next, qwen3.5
    "linear_conv_kernel_dim",
    "mamba_d_state",  # bamba, falcon h1, jamba, granite hybrid
    "ssm_state_size",  # nemotron h, mamba 2
    "state_size",  # mamba
    "conv_L_cache",  # lfm2
    "lru_width",  # recurrent gemma
    "attention_chunk_size",  # llama 4: chunks are counted from the start of the row
)


def leaks_across_rows(config: Any) -> str | None:
    """Why trajectories must not be packed for this model, or None if they may.

    Linear attention and convolutions carry state over sequence boundaries that position ids cannot mark: the result
    would be silently wrong. Such models (hybrids like qwen3_5) run one trajectory a row.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = set(getattr(text, "layer_types", None) or ()) - _ATTENTION_ONLY
    if kinds:
        return f"{text.model_type} has layers of kind {', '.join(sorted(kinds))}"
    fields = [name for name in _MIXER_FIELDS if getattr(text, name, None)]
    if fields:
        return f"{text.model_type} mixes tokens other than by attention ({', '.join(fields)})"
    return None


def pack_attention(model: nn.Module) -> bool:
    """Prepare a transformers model for packed rows; False if it must run one trajectory a row.

    The configuration is checked, then the model itself: two short rows must give the same result packed as alone, so
    that a new kind of layer cannot be silently wrong.

    Args:
        model: causal language model of transformers, or a PEFT model around one.
    """
    base = base_model(model)
    if (reason := leaks_across_rows(base.config)) is not None:
        log.info("trajectories are not packed: %s", reason)
        return False
    before = base.config._attn_implementation
    if not str(before).startswith("flash_attention"):
        if before not in ("sdpa", _NAME) or not getattr(base, "_supports_attention_backend", False):
            return False
        parameter = next(base.parameters())
        flash = parameter.is_cuda and parameter.dtype.itemsize == 2 and is_flash_attn_2_available()
        base.set_attn_implementation("flash_attention_2" if flash else _NAME)
    tolerance = 1e-3 if next(base.parameters()).dtype.itemsize >= 4 else 5e-2
    try:
        error = _packing_error(model)
        found = "" if error <= tolerance else f"differs by {error:.2g} when packed"
    except ConfigError:
        raise
    except Exception as fault:  # a model with its own idea of a mask or of attention arguments
        found = f"cannot be packed ({type(fault).__name__}: {' '.join(str(fault).split())[:120]})"
    if found:
        log.warning("trajectories are not packed: %s %s", type(base).__name__, found)
        base.set_attn_implementation(before)
        return False
    return True


@torch.no_grad()
def _packing_error(model: nn.Module) -> float:
    """Relative difference of the hidden states of two packed rows from those of each alone."""
    device = next(model.parameters()).device
    with evaluating(model):
        first, second = torch.arange(1, 8, device=device).unsqueeze(0), torch.arange(3, 8, device=device).unsqueeze(0)
        alone = torch.cat([hidden_states(model, first), hidden_states(model, second)], dim=1).float()
        both = torch.cat([first, second], dim=1)
        packed = hidden_states(model, both, **packed_inputs(model, (7, 5), device)).float()
    return float((packed - alone).norm() / alone.norm())


def packed_inputs(model: nn.Module, lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    """Arguments of the decoder's forward pass that mark the boundaries of a packed row, [1, Σ lengths].

    Args:
        model: prepared by `pack_attention`.
        lengths: tokens of each trajectory, in order.
    """
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)
    positions = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0).to(device)
    longest = max(lengths)
    inputs: dict[str, Any] = {
        "position_ids": positions,
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }
    if base_model(model).config._attn_implementation == _NAME:
        # Transformers passes a 4-D mask on unchanged and then builds no dense mask from the position ids.
        inputs |= {"attention_mask": torch.empty(1, 1, 0, 0, device=device), "packed_lengths": tuple(lengths)}
    return inputs


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    packed_lengths: tuple[int, ...] | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Queries [1, heads, T, d] → [1, T, heads, d]; attends the trajectories of a packed row one at a time."""
    if packed_lengths is None:
        forward = cast(Any, sdpa_attention_forward)
        return cast(
            "tuple[Tensor, None]",
            forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs),
        )
    grouped = query.shape[1] != key.shape[1]
    outputs = []
    alone = len(packed_lengths) == 1
    # `split`, not slices: the backward pass of each slice fills a full row with zeros; that of `split` is one `cat`.
    parts = ((t,) if alone else torch.split(t, list(packed_lengths), dim=2) for t in (query, key, value))
    for q, k, v in zip(*parts, strict=True):
        banded = sliding_window is not None and q.shape[2] > sliding_window
        out = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=_band(q.shape[2], cast(int, sliding_window), q.device) if banded else None,
            dropout_p=dropout,
            scale=scaling,
            is_causal=not banded,
            enable_gqa=grouped,
        )
        outputs.append(out.transpose(1, 2))
    return outputs[0] if alone else torch.cat(outputs, dim=1), None


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """Causal mask of a sliding window, [T, T] bool: position i sees i − window + 1 … i."""
    positions = torch.arange(length, device=device)
    distance = positions.unsqueeze(1) - positions
    return (distance >= 0) & (distance < window)


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, sdpa_mask)
