"""The parts of a transformers model, with or without a PEFT wrapper: base model, decoder, output head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from draco.core.errors import ConfigError

__all__ = ["base_model", "check_head", "decoder_of", "evaluating", "hidden_states", "output_head"]

#: Config fields by which models of transformers change their final logits, with the value that means "unchanged".
_LOGIT_TRANSFORMS: tuple[tuple[str, float | None], ...] = (
    ("final_logit_softcapping", None),  # gemma 2, 3n
    ("logit_scale", 1.0),  # cohere
    ("logits_scaling", 1.0),  # granite
    ("lm_head_multiplier", 1.0),  # falcon h1
    ("logits_soft_cap", None),
    ("output_logits_scale", 1.0),
)


def output_head(model: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight [V, H] and bias [V] or None of the frozen output head; works through a PEFT wrapper.

    Raises:
        ConfigError: no head, a head with an adapter or a trainable one, or logits that the model transforms.
    """
    base = _causal(model)
    head = base.get_output_embeddings()
    if head is None:
        raise ConfigError(f"{type(base).__name__} has no output head: expected a causal language model")
    name = type(base).__name__
    if not isinstance(head, nn.Linear) and not hasattr(head, "weight"):
        raise ConfigError(f"the output head of {name} is a {type(head).__name__}: expected a linear layer")
    # PEFT wraps what it adapts: a LoRA layer holds `base_layer`, modules_to_save holds `original_module`.
    if hasattr(head, "base_layer") or hasattr(head, "original_module"):
        raise ConfigError(
            f"the output head of {name} carries an adapter, which the chunked log-probabilities would skip: take "
            "'lm_head' out of policy.targets (and out of modules_to_save)"
        )
    text = base.config.get_text_config() if hasattr(base.config, "get_text_config") else base.config
    for field, unchanged in _LOGIT_TRANSFORMS:
        value = getattr(text, field, None)
        if value is not None and value != unchanged:
            raise ConfigError(
                f"{name} transforms its logits ({field}={value}), which the chunked log-probabilities do not support: "
                "choose a model without it"
            )
    return head.weight, getattr(head, "bias", None)


def hidden_states(
    model: nn.Module,
    input_ids: Tensor,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **inputs: Any,
) -> Tensor:
    """Hidden states after the final norm, [B, T, H]: what the output head multiplies.

    Uses the public API of transformers (`get_decoder`, `get_output_embeddings`). In a PEFT model the LoRA layers are
    inside the base model, so the adapter and its switch (`disable_adapter`) apply as usual.

    Args:
        model: causal language model, or a PEFT model around one.
        input_ids: [B, T] int64.
        position_ids: [B, T]; restart at 0 for each packed sequence, and pass no attention mask then.
        attention_mask: [B, T], 1 = token, 0 = padding.
        inputs: further arguments of the decoder, such as those of `draco.policy.attention.packed_inputs`.

    Raises:
        ConfigError: as `output_head`, or the model has no decoder.
    """
    output_head(model)  # a head that step_logprobs would get wrong is refused before any work
    base = _causal(model)
    output = decoder_of(base)(
        input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False, **inputs
    )
    return cast(Tensor, output.last_hidden_state)


@torch.no_grad()
def check_head(model: nn.Module) -> None:
    """Compare the model's own logits with head(hidden_states) once, at setup, to find transformations of the logits.

    Args:
        model: as for `hidden_states`. Five tokens run through it.

    Raises:
        ConfigError: they differ.
    """
    weight, bias = output_head(model)
    input_ids = torch.arange(1, 6, device=weight.device).unsqueeze(0)
    tolerance = 1e-2 if weight.dtype.itemsize >= 4 else 0.2  # nats; 16-bit logits are rounded
    with evaluating(model):
        own = model(input_ids=input_ids, use_cache=False).logits.float().log_softmax(-1)
        ours = nn.functional.linear(hidden_states(model, input_ids), weight, bias).float().log_softmax(-1)
    difference = float((own - ours).abs().max())
    if not difference <= tolerance:
        raise ConfigError(
            f"{type(_causal(model)).__name__} changes its logits after the output head (log-probabilities differ by "
            f"{difference:.3g} nats): the chunked log-probabilities do not support it; choose another model"
        )


def decoder_of(base: Any) -> nn.Module:
    """What stands below the output head of a causal language model.

    Raises:
        ConfigError: nothing that can be found.
    """
    decoder = base.get_decoder()
    if decoder is base:  # models whose `base_model_prefix` names no attribute, such as Llama 4
        decoder = getattr(base, "model", None)
    if not isinstance(decoder, nn.Module):
        raise ConfigError(f"{type(base).__name__} names no decoder below its output head: expected a causal model")
    return decoder


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode within; afterwards every layer is in the mode in which it was, which `model.train()` would not do."""
    before = [(layer, layer.training) for layer in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for layer, training in before:
            layer.training = training


def base_model(model: nn.Module) -> Any:
    """The transformers model inside a PEFT wrapper, or the model itself."""
    get_base_model = getattr(model, "get_base_model", None)
    return get_base_model() if callable(get_base_model) else model


def _causal(model: nn.Module) -> Any:
    base = base_model(model)
    if not hasattr(base, "get_output_embeddings"):
        raise ConfigError(f"expected a causal language model of transformers, got {type(base).__name__}")
    return base
