"""LoRA layers with fewer passes over memory. The adapter stays PEFT's: its weights, switches, files and fallbacks.

PEFT computes y = W x + s · B(A x) with separate operations: the product with s, the sum, and in the backward pass the
sum of two input gradients each read and write a whole activation. At a few hundred units of width that costs as much
as a matrix product. Here each is the accumulation that a matrix product can do on its way::

    y  = x Wᵀ + b      then  y  += s (x Aᵀ) Bᵀ
    ∂x = ∂y W          then  ∂x += (s ∂y B) A,      ∂A = (s ∂y B)ᵀ x,      ∂B = s ∂yᵀ (x Aᵀ)

The result differs from PEFT's by float rounding alone.
"""

from __future__ import annotations

from types import MethodType
from typing import Any, cast

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

__all__ = ["fuse_lora"]


def fuse_lora(model: nn.Module) -> int:
    """Give every plain LoRA linear layer of a PEFT model the short forward pass; returns how many it found."""
    layers = [m for m in model.modules() if type(m) is Linear and type(m.base_layer) is nn.Linear]
    for layer in layers:
        layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]
    return len(layers)


def _forward(self: Linear, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if self.disable_adapters and not self.merged:
        return cast(Tensor, self.base_layer(x, *args, **kwargs))
    name = self.active_adapters[0]
    base = cast(nn.Linear, self.base_layer)
    if (
        args
        or kwargs
        or self.merged
        or len(self.active_adapters) != 1
        or name not in self.lora_A
        or name in self.lora_variant
        or not isinstance(self.lora_dropout[name], nn.Identity)
        or self.lora_bias[name]
        or base.weight.requires_grad
        or not x.dtype == base.weight.dtype == self.lora_A[name].weight.dtype
        or torch.is_autocast_enabled(x.device.type)
    ):
        return Linear.forward(self, x, *args, **kwargs)
    a, b = cast(Tensor, self.lora_A[name].weight), cast(Tensor, self.lora_B[name].weight)
    scale = self.scaling[name]
    if torch.is_grad_enabled():
        return cast(Tensor, _LoraLinear.apply(x, base.weight, base.bias, a, b, scale))  # type: ignore[no-untyped-call]
    return _product(x.flatten(0, -2), base.weight, base.bias, a, b, scale)[0].view(*x.shape[:-1], -1)


def _product(x: Tensor, w: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """y [N, out] and x Aᵀ [N, r]."""
    y = nn.functional.linear(x, w, bias)
    low = x @ a.T
    return y.addmm_(low, b.T, alpha=scale), low


class _LoraLinear(torch.autograd.Function):
    """Gradients for x, A and B; W is frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        flat = x.flatten(0, -2)
        y, low = _product(flat, w, bias, a, b, scale)
        ctx.save_for_backward(flat, low, w, a, b)
        ctx.scale, ctx.shape = scale, x.shape
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, low, w, a, b = ctx.saved_tensors
        dy = grads[0].flatten(0, -2)
        d_low = (dy @ b).mul_(ctx.scale)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = (dy @ w).addmm_(d_low, a).view(ctx.shape)
        da = d_low.T @ x if ctx.needs_input_grad[3] else None
        db = (dy.T @ low).mul_(ctx.scale) if ctx.needs_input_grad[4] else None
        return dx, None, None, da, db, None
