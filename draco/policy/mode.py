"""Training mode of a policy: the frozen base model computes in it what it computes when it is served.

Dropout, dropped layers and noise in routers make a base model random in training mode. Its log-probabilities would then
differ from the engine's, at every token and on every pass. Only the adapter's own dropout (`policy.dropout`) is wanted.
"""

from __future__ import annotations

from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from draco.policy.structure import base_model

__all__ = ["freeze_mode", "still"]


def still(base: nn.Module) -> None:
    """Set every rate of dropout of a model without adapter to 0, in its layers and where they look it up.

    The blocks that checkpointing recomputes must stay in training mode, so the mode alone does not stop them.
    """
    for layer in base.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
        for held in (layer, getattr(layer, "config", None)):
            for name, value in list(vars(held).items()) if held is not None else ():
                if type(value) is float and "drop" in name:
                    setattr(held, name, 0.0)


def freeze_mode(model: nn.Module) -> None:
    """Put every layer of the base model into eval mode but what checkpoints; adapters stay as they are.

    Args:
        model: a PEFT model in training mode.
    """
    base = base_model(model)
    adapters = {id(part) for layer in base.modules() if isinstance(layer, LoraLayer) for part in _own(layer)}
    for layer in base.modules():
        if id(layer) not in adapters and not isinstance(layer, GradientCheckpointingLayer | PreTrainedModel):
            layer.training = False


def _own(layer: LoraLayer) -> list[nn.Module]:
    """A layer with an adapter and the parts of the adapter, without the layer that it wraps."""
    wrapped = {id(m) for m in layer.get_base_layer().modules()}
    return [m for m in layer.modules() if id(m) not in wrapped]  # type: ignore[attr-defined]
