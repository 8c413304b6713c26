"""RMS norms and rotary embeddings with fewer passes over memory, for models of transformers whose norms are frozen.

Autograd keeps every intermediate of such a layer and walks back through each, and with a few hundred units of width
that costs a CPU as much as a matrix product. Both have short exact gradients::

    y = w x r,  r = (mean x² + ε)^−½        ∂x = r w ∂y − x r³ mean(x w ∂y)
    y₁ = x₁c₁ − x₂s₁,  y₂ = x₂c₂ + x₁s₂     ∂x₁ = ∂y₁c₁ + ∂y₂s₂,  ∂x₂ = ∂y₂c₂ − ∂y₁s₁

Modules, parameters and their names stay; only `forward` of single modules is replaced. A layer is taken only where its
own result and gradient on random input come out the same, and input of less than float32 keeps transformers' own
code, whose rounding is then part of the model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

__all__ = ["fuse_layers"]

log = logging.getLogger("draco")

#: Largest relative difference of a value or gradient that is still float32 rounding.
_TOLERANCE = 1e-5
_ROTARY = "apply_rotary_pos_emb"  #: the name of the function in every model of transformers that has one
_EXACT = (torch.float32, torch.float64)


def fuse_layers(model: nn.Module) -> dict[str, int]:
    """Give the frozen RMS norms and the attention layers of a model the short passes, where they prove exact.

    Args:
        model: of transformers, or a PEFT model around one. One without weights yet (meta) is left alone.

    Returns:
        How many layers of each kind (`norms`, `rotary`) take them.
    """
    found = {"norms": 0, "rotary": 0}
    refused: set[str] = set()
    turned: dict[type[nn.Module], Callable[..., Any] | None] = {}
    for module in model.modules():
        kind = type(module)
        if "forward" in vars(module):  # somebody else's
            continue
        if _is_norm(module):
            offset = _offset(module)
            if offset is None:
                refused.add(kind.__name__)
                continue
            forward = _norm_with_offset if offset else _norm
            module.forward = MethodType(forward, module)
            found["norms"] += 1
        elif _ROTARY in getattr(getattr(kind.forward, "__code__", None), "co_names", ()):
            if kind not in turned:
                turned[kind] = _rotary_forward(kind)
                if turned[kind] is None:
                    refused.add(f"{kind.__name__}.{_ROTARY}")
            replacement = turned[kind]
            if replacement is not None:
                module.forward = MethodType(replacement, module)
                found["rotary"] += 1
    if refused:
        log.info("left as transformers computes them: %s", ", ".join(sorted(refused)))
    return found


# --- RMS norm ---


def _is_norm(module: nn.Module) -> bool:
    """By name and shape: one frozen vector and nothing else."""
    parameters = dict(module.named_parameters())
    return (
        type(module).__name__.endswith("RMSNorm")
        and parameters.keys() == {"weight"}
        and parameters["weight"].ndim == 1
        and not parameters["weight"].requires_grad
        and not parameters["weight"].is_meta
        and parameters["weight"].dtype == torch.float32
        and type(parameters["weight"]) is nn.Parameter  # no shard of one
    )


def _epsilon(module: nn.Module) -> Any:
    """ε; None if the module names none that we know."""
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _offset(module: nn.Module) -> float | None:
    """0 for y = w·norm(x), 1 for y = (1 + w)·norm(x) (gemma, qwen3.5), None for a norm that is neither."""
    if not isinstance(_epsilon(module), float):
        return None
    weight = cast(Tensor, module.weight)
    x, upstream = (t.to(weight.device) for t in _random((3, len(weight)), (3, len(weight))))
    x *= torch.tensor([[1.0], [30.0], [1e-3]], device=x.device)  # the last sees another ε
    x.requires_grad_()

    def outcome(y: Tensor) -> tuple[Tensor, Tensor]:
        return y.detach(), torch.autograd.grad(y, x, upstream)[0]

    with torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
        try:
            own = outcome(module(x))
        except (RuntimeError, TypeError):  # a gate beside the input, another shape
            return None
        for offset in (0.0, 1.0):
            ours = outcome(_rms_norm(x, weight + offset, _epsilon(module)))
            if all(_close(a, b) for a, b in zip(ours, own, strict=True)):
                return offset
    return None


def _norm(self: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    return _norm_forward(self, 0.0, x, *args, **kwargs)


def _norm_with_offset(self: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    return _norm_forward(self, 1.0, x, *args, **kwargs)


def _norm_forward(self: nn.Module, offset: float, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    weight = cast(Tensor, self.weight)
    if args or kwargs or weight.requires_grad or not weight.dtype == x.dtype == torch.float32:
        return type(self).forward(self, x, *args, **kwargs)
    return _rms_norm(x, weight + offset if offset else weight, _epsilon(self))


def _rms_norm(x: Tensor, w: Tensor, epsilon: float) -> Tensor:
    if torch.is_grad_enabled():
        return cast(Tensor, _RMSNorm.apply(x, w, epsilon))  # type: ignore[no-untyped-call]
    return _normalised(x, w, epsilon)[0]


def _normalised(x: Tensor, w: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """y [..., H] and r [..., 1]."""
    inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
    inverse.div_(x.shape[-1]).add_(epsilon).rsqrt_()
    return (x * inverse).mul_(w), inverse


class _RMSNorm(torch.autograd.Function):
    """Gradient for x alone, [..., H]; the weight is frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, epsilon: float) -> Tensor:
        y, inverse = _normalised(x, w, epsilon)
        ctx.save_for_backward(x, w, inverse)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, w, inverse = ctx.saved_tensors
        g = grads[0] * w
        pull = torch.linalg.vecdot(g, x).unsqueeze_(-1).mul_(inverse.pow(3)).div_(-x.shape[-1])
        return g.mul_(inverse).addcmul_(x, pull), None, None


# --- rotary embedding ---


def _rotary_forward(kind: type[nn.Module]) -> Callable[..., Any] | None:
    """The forward pass of an attention class with the short rotation in place of its own; None if that differs.

    It is transformers' code, unchanged, as a function whose global name for the rotation is ours: nothing is patched
    in transformers' modules, so no other model sees it.
    """
    forward = kind.forward
    if not isinstance(forward, FunctionType) or _ROTARY not in forward.__globals__:
        return None
    own = forward.__globals__[_ROTARY]

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        if (
            args
            or kwargs
            or cos.requires_grad
            or sin.requires_grad
            or cos.ndim != 3
            or not q.ndim == k.ndim == 4
            or not q.shape[-1] == k.shape[-1] == cos.shape[-1] == sin.shape[-1]
            or q.shape[-1] % 2
            or q.dtype not in _EXACT
            or not q.dtype == k.dtype == cos.dtype == sin.dtype
        ):
            return own(q, k, cos, sin, *args, **kwargs)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return _rotate(q, cos, sin), _rotate(k, cos, sin)

    if not _rotates_alike(own, rotate):
        return None
    ours = FunctionType(
        forward.__code__,
        {**forward.__globals__, _ROTARY: rotate},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    ours.__kwdefaults__ = forward.__kwdefaults__
    return ours


def _rotates_alike(own: Callable[..., Any], ours: Callable[..., Any]) -> bool:
    """Values and gradients on random input, with unlike halves of cos and sin."""
    q, k, cos, sin, up_q, up_k = _random((2, 3, 5, 8), (2, 1, 5, 8), (2, 5, 8), (2, 5, 8), (2, 3, 5, 8), (2, 1, 5, 8))
    q.requires_grad_()
    k.requires_grad_()
    found = []
    with torch.enable_grad():
        for function in (own, ours):
            try:
                a, b = function(q, k, cos, sin)
                found.append([a.detach(), b.detach(), *torch.autograd.grad([a, b], [q, k], [up_q, up_k])])
            except (RuntimeError, TypeError, ValueError):  # another signature or layout
                return False
    return all(_close(a, b) for a, b in zip(found[1], found[0], strict=True))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        return cast(Tensor, _Rotary.apply(x, cos, sin))  # type: ignore[no-untyped-call]
    return _turned(x, cos, sin)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    y = x * cos
    y[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    y[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return y


class _Rotary(torch.autograd.Function):
    """x·cos + (−x₂, x₁)·sin of the halves x = (x₁, x₂) of the last dimension; cos and sin are broadcast."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        half = cos.shape[-1] // 2
        dy = grads[0]
        dx = dy * cos
        dx[..., :half].addcmul_(dy[..., half:], sin[..., half:])
        dx[..., half:].addcmul_(dy[..., :half], sin[..., :half], value=-1)
        return dx, None, None


# --- the check ---


def _random(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Normal float32 values that do not touch the global generator."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def _close(ours: Tensor, own: Tensor) -> bool:
    if ours.shape != own.shape or ours.device != own.device:
        return False
    return bool(((ours - own).norm(dim=-1) <= _TOLERANCE * own.norm(dim=-1)).all())
