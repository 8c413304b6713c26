"""Log-probabilities of given tokens without ever holding the full logits.

The language-model head runs on the wanted tokens only, in token × vocabulary chunks. For token i with hidden state h
(after the final norm), frozen head W [V, H], bias b and temperature T::

    l_v = (h·W_v + b_v) / T,    log p(t) = l_t − logsumexp_v l_v,    ∂ log p(t) / ∂h = (W_t − Σ_v p_v W_v) / T

The gradient does not depend on the upstream gradient except for a factor, so the forward pass accumulates Σ_v p_v W_v
beside the log-sum-exp (with the running maximum of an online softmax, as attention kernels do for values) and the
backward pass is one multiplication. That is two matrix products in all, as few as full logits need; nothing is
recomputed.

Where the hidden states are float32 (or 64), they are multiplied by log₂(e) / T once and the softmax is taken in base 2:
the logits need no pass for the temperature, and exp2 costs a CPU a third of exp. There the running maximum is left out
too (two more passes), as long as no sum of powers comes near the range of float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from draco.core.errors import ConfigError

__all__ = ["step_logprobs"]


#: On a CPU base-2 logits are not shifted while the first ones are within ± this (the maximum over the vocabulary can
#: then not be below −64, where small powers would vanish) and no sum of powers passes the other.
_UNSHIFTED, _LARGEST_SUM = 64.0, 2.0**100


def step_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    token_chunk: int = 1024,
    vocab_chunk: int = 4096,
    bias: Tensor | None = None,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """log p(target) and entropy of every row, at the sampling temperature.

    Besides O(N·H), at most token_chunk × vocab_chunk logits exist at a time (two such buffers without gradient and with
    entropy), and for 16-bit inputs on a CPU one vocab_chunk × H copy of the head. Accumulates in float32, or in float64
    for float64 input.

    Args:
        hidden: [N, H] hidden states after the final norm, rows of the wanted tokens only; N may be 0.
        weight: [V, H] frozen head; the tied embedding matrix for tied models.
        targets: [N] int64 token ids.
        temperature: T > 0.
        token_chunk: rows at a time.
        vocab_chunk: vocabulary entries at a time; with V ≤ vocab_chunk the head runs as one product a row chunk.
        bias: [V] frozen bias of the head.
        with_entropy: False saves the entropy's pass when no gradient is wanted (the reference pass).

    Returns:
        [N] log-probs, nats, with gradient to `hidden`; [N] entropies, nats, detached (zeros when not asked for).

    Raises:
        ConfigError: the head is trainable: its gradient would be silently lost.
        ValueError: shapes that do not fit, a target outside the vocabulary, T ≤ 0, or a chunk below 1.
    """
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        raise ConfigError(
            "the output head must be frozen, but it requires a gradient: leave lm_head (and tied embeddings) out of "
            "the LoRA targets and of modules_to_save, or call requires_grad_(False) on it"
        )
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"expected [N, H] and [V, H], got {list(hidden.shape)} and {list(weight.shape)}")
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(f"expected targets as int64 [{hidden.shape[0]}], got {targets.dtype} {list(targets.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"expected bias as [{weight.shape[0]}], got {list(bias.shape)}")
    if not temperature > 0:
        raise ValueError(f"expected temperature > 0, got {temperature}")
    if token_chunk < 1 or vocab_chunk < 1:
        raise ValueError(f"expected chunks of at least 1, got {token_chunk} and {vocab_chunk}")
    # A GPU would have to wait for the answer; there an out-of-range index fails in index_select all the same.
    if (
        targets.device.type == "cpu"
        and targets.numel()
        and not 0 <= int(targets.min()) <= int(targets.max()) < len(weight)
    ):
        raise ValueError(f"expected targets in 0..{len(weight) - 1}, got {int(targets.min())}..{int(targets.max())}")
    needs_grad = torch.is_grad_enabled() and hidden.requires_grad
    apply = cast("Callable[..., tuple[Tensor, Tensor]]", _StepLogprobs.apply)
    return apply(hidden, weight, bias, targets, temperature, token_chunk, vocab_chunk, with_entropy, needs_grad)


class _StepLogprobs(torch.autograd.Function):
    """Online softmax over vocabulary chunks; saves ∂ log p / ∂h, [N, H]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        token_chunk: int,
        vocab_chunk: int,
        with_entropy: bool,
        needs_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        # Autocast would round the products that must stay in float32.
        with torch.autocast(hidden.device.type, enabled=False):
            logprobs, entropy, gradient = _online(
                hidden, weight, bias, targets, temperature, token_chunk, vocab_chunk, with_entropy, needs_grad
            )
        if gradient is not None:
            ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return ((gradient * grads[0].unsqueeze(1)).to(gradient.dtype), *[None] * 8)


def _online(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    token_chunk: int,
    vocab_chunk: int,
    with_entropy: bool,
    needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """log p [N], entropy [N], and ∂ log p / ∂h [N, H] when asked for."""
    rows, width, vocab = len(hidden), hidden.shape[1], len(weight)
    exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    # 16-bit products with a float32 result exist on CUDA; elsewhere both operands are widened first.
    half = hidden.is_cuda and hidden.dtype == weight.dtype and hidden.dtype in (torch.bfloat16, torch.float16)
    unit = 1.0 if half else math.log(2)  # nats of one unit of `logits`
    h = hidden if half else hidden.to(exact) * (1 / (temperature * unit))
    exp_ = Tensor.exp_ if half else Tensor.exp2_
    unshifted: set[int] = set()  # token chunks whose `peak` is 0; a GPU would have to wait for the checks
    keep = with_entropy and not needs_grad  # the logits beside their powers
    # One buffer for all chunks: fresh memory for each costs page faults. Where it is widened, cuBLAS makes its own.
    buffer = None if half else h.new_empty(min(rows, token_chunk) * min(vocab, vocab_chunk))

    peak = h.new_full((rows,), -torch.inf, dtype=exact)  # running maximum of the logits
    mass = h.new_zeros((rows,), dtype=exact)  # Σ exp(l − peak)
    moment = h.new_zeros((rows,), dtype=exact)  # Σ exp(l − peak) · l
    chosen = h.new_zeros((rows,), dtype=exact)  # l of the target; it, peak and moment in units of `unit` nats
    expected = h.new_zeros((rows, width), dtype=exact) if needs_grad else None  # Σ exp(l − peak) · W_v

    for v0 in range(0, vocab, vocab_chunk):
        w = weight[v0 : v0 + vocab_chunk]
        w = w if half else w.to(exact)
        b = None if bias is None else bias[v0 : v0 + vocab_chunk].to(exact) * (1 / (temperature * unit))
        for n0 in range(0, rows, token_chunk):
            n = slice(n0, min(n0 + token_chunk, rows))
            logits = _logits(h[n], w, b, exact, buffer, temperature)
            here = targets[n] - v0
            inside = (here >= 0) & (here < len(w))
            picked = logits.gather(1, here.clamp(0, len(w) - 1).unsqueeze(1)).squeeze(1)
            chosen[n] = torch.where(inside, picked, chosen[n])

            if v0 == 0 and logits.device.type == "cpu" and float(logits.amax(dim=1).abs().max()) < _UNSHIFTED:
                unshifted.add(n0)
                peak[n] = 0.0
            if n0 in unshifted:
                odds = torch.exp2(logits) if keep else logits.exp2_()
                total = odds.sum(dim=1)
                if not float(total.max()) < _LARGEST_SUM:
                    unshifted.remove(n0)  # this chunk once more, and shifted from here on
                    logits = _logits(h[n], w, b, exact, buffer, temperature)
            if n0 not in unshifted:
                new_peak = torch.maximum(peak[n], logits.amax(dim=1))
                rescale = exp_(peak[n] - new_peak)  # 0 for the first chunk
                peak[n] = new_peak
                odds = exp_(logits - new_peak.unsqueeze(1) if keep else logits.sub_(new_peak.unsqueeze(1)))
                total = odds.sum(dim=1)
                mass[n] *= rescale
                moment[n] *= rescale
                if expected is not None:
                    expected[n] *= rescale.unsqueeze(1)
            mass[n] += total
            if expected is not None:
                _add_matmul(expected[n], odds, w)
                if with_entropy and b is not None:
                    moment[n] += odds @ b
            elif with_entropy:  # a batched dot product: no third buffer
                moment[n] += torch.bmm(odds.unsqueeze(1), logits.unsqueeze(2)).view(-1)

    lse = peak * unit + mass.log()  # nats
    logprobs = chosen * unit - lse
    gradient = None
    if expected is not None:
        expected /= mass.unsqueeze(1)
        if with_entropy:  # Σ p_v l_v = (h · Σ p_v W_v + Σ p_v b_v) / T: free, given the gradient
            dot = torch.linalg.vecdot(h.to(exact), expected)
            moment += (dot / temperature if half else dot) * mass
        gradient = weight.index_select(0, targets).to(exact).sub_(expected).div_(temperature)
        gradient = gradient.to(hidden.dtype)
    entropy = lse - moment * unit / mass if with_entropy else torch.zeros_like(lse)
    return logprobs, entropy, gradient


def _logits(
    h: Tensor, w: Tensor, b: Tensor | None, dtype: torch.dtype, buffer: Tensor | None, temperature: float
) -> Tensor:
    """h Wᵀ + b in `dtype`, in the 1-D `buffer` if there is one (`h` and `b` are scaled by 1 / T then)."""
    if buffer is None:
        logits = torch.mm(h, w.T, out_dtype=dtype)
        if temperature != 1.0:
            logits /= temperature
    else:
        logits = torch.mm(h, w.T, out=buffer[: len(h) * len(w)].view(len(h), len(w)))
    if b is not None:
        logits += b
    return logits


def _add_matmul(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in place; `b` may be 16-bit on CUDA, then `a` (probabilities) is rounded like it."""
    if b.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += torch.mm(a.to(b.dtype), b, out_dtype=total.dtype)
