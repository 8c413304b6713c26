"""Log-probabilities of given tokens without ever holding the full logits.

The language-model head runs on the wanted tokens only, in token × vocabulary chunks. For token i with hidden state h
(after the final norm), frozen head W [V, H], bias b and temperature T::

    l_v = (h·W_v + b_v) / T,    log p(t) = l_t − logsumexp_v l_v,    ∂ log p(t) / ∂h = (W_t − Σ_v p_v W_v) / T

The upstream gradient is only a factor of the gradient. So the forward pass accumulates Σ_v p_v W_v together with the
log-sum-exp (with the running maximum of an online softmax, as attention kernels do for values), and the backward pass
is one multiplication. That makes two matrix products in all, as few as full logits need; nothing is recomputed.

Float32 and float64 hidden states are multiplied by log₂(e) / T once, and the softmax is taken in base 2: the logits
need no pass for the temperature, and exp2 costs a CPU a third of exp. The running maximum (two more passes) is left
out there as long as no sum of powers comes near the range of float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

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
    options = _Options(temperature, token_chunk, vocab_chunk, with_entropy, needs_grad)
    apply = cast("Callable[..., tuple[Tensor, Tensor]]", _StepLogprobs.apply)
    return apply(hidden, weight, bias, targets, options)


class _Options(NamedTuple):
    """Arguments of `step_logprobs`, and whether a gradient is wanted."""

    temperature: float
    token_chunk: int
    vocab_chunk: int
    with_entropy: bool
    needs_grad: bool


class _StepLogprobs(torch.autograd.Function):
    """Saves ∂ log p / ∂h, [N, H], for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: _Options
    ) -> tuple[Tensor, Tensor]:
        # Autocast would round the products that must stay in float32.
        with torch.autocast(hidden.device.type, enabled=False):
            softmax = _OnlineSoftmax(hidden, weight, bias, targets, options)
            softmax.run()
            logprobs, entropy, gradient = softmax.results()
        if gradient is not None:
            ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return ((gradient * grads[0].unsqueeze(1)).to(gradient.dtype), *[None] * 4)


class _OnlineSoftmax:
    """Sums of a softmax over vocabulary chunks, for N rows. Logits and `peak` are in units of `unit` nats."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: _Options) -> None:
        self.hidden, self.weight, self.bias, self.targets, self.options = hidden, weight, bias, targets, options
        self.exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        # 16-bit products with a float32 result exist on CUDA; elsewhere both operands are widened first.
        half = hidden.is_cuda and hidden.dtype == weight.dtype and hidden.dtype in (torch.bfloat16, torch.float16)
        self.half = half
        self.unit = 1.0 if half else math.log(2)
        self.scale = 1 / (options.temperature * self.unit)
        self.h = hidden if half else hidden.to(self.exact) * self.scale
        self.exp_ = Tensor.exp_ if half else Tensor.exp2_
        self.keep = options.with_entropy and not options.needs_grad  # the logits, beside their powers
        #: first rows of the token chunks whose `peak` is 0; never on a GPU, which would have to wait for the checks
        self.unshifted: set[int] = set()
        rows, vocab = len(hidden), len(weight)
        # One buffer for all chunks: fresh memory for each costs page faults. Of 16-bit products cuBLAS makes its own.
        chunk = min(rows, options.token_chunk) * min(vocab, options.vocab_chunk)
        self.buffer = None if half else self.h.new_empty(chunk)
        self.peak = self._zeros(rows).fill_(-torch.inf)  # running maximum of the logits
        self.mass = self._zeros(rows)  # Σ exp(l − peak)
        self.moment = self._zeros(rows)  # Σ exp(l − peak) · l
        self.chosen = self._zeros(rows)  # l of the target
        self.expected = self._zeros(*hidden.shape) if options.needs_grad else None  # Σ exp(l − peak) · W_v

    def _zeros(self, *shape: int) -> Tensor:
        return self.h.new_zeros(shape, dtype=self.exact)

    def run(self) -> None:
        """Take in all chunks."""
        rows, step, size = len(self.h), self.options.token_chunk, self.options.vocab_chunk
        for v0 in range(0, len(self.weight), size):
            w = self.weight[v0 : v0 + size]
            w = w if self.half else w.to(self.exact)
            b = None if self.bias is None else self.bias[v0 : v0 + size].to(self.exact) * self.scale
            for n0 in range(0, rows, step):
                self._add(slice(n0, min(n0 + step, rows)), v0, w, b)

    def _add(self, n: slice, v0: int, w: Tensor, b: Tensor | None) -> None:
        """Take in the logits of the rows `n` over the vocabulary entries from `v0`."""
        logits = self._logits(n, w, b)
        here = self.targets[n] - v0
        inside = (here >= 0) & (here < len(w))
        picked = logits.gather(1, here.clamp(0, len(w) - 1).unsqueeze(1)).squeeze(1)
        self.chosen[n] = torch.where(inside, picked, self.chosen[n])
        if v0 == 0 and logits.device.type == "cpu" and float(logits.amax(dim=1).abs().max()) < _UNSHIFTED:
            self.unshifted.add(n.start)
            self.peak[n] = 0.0
        odds = None
        if n.start in self.unshifted:
            odds = torch.exp2(logits) if self.keep else logits.exp2_()
            total = odds.sum(dim=1)
            if not float(total.max()) < _LARGEST_SUM:  # compute this chunk again, and shift from here on
                self.unshifted.remove(n.start)
                logits, odds = self._logits(n, w, b), None
        if odds is None:
            odds = self._shifted(n, logits)
            total = odds.sum(dim=1)
        self.mass[n] += total
        if self.expected is not None:
            _add_matmul(self.expected[n], odds, w)
            if self.options.with_entropy and b is not None:
                self.moment[n] += odds @ b
        elif self.options.with_entropy:  # a batched dot product: no third buffer
            self.moment[n] += torch.bmm(odds.unsqueeze(1), logits.unsqueeze(2)).view(-1)

    def _shifted(self, n: slice, logits: Tensor) -> Tensor:
        """exp(l − peak) under the new peak; the sums so far are rescaled to it."""
        peak = torch.maximum(self.peak[n], logits.amax(dim=1))
        rescale = self.exp_(self.peak[n] - peak)  # 0 for the first chunk
        self.peak[n] = peak
        self.mass[n] *= rescale
        self.moment[n] *= rescale
        if self.expected is not None:
            self.expected[n] *= rescale.unsqueeze(1)
        shift = peak.unsqueeze(1)
        return self.exp_(logits - shift if self.keep else logits.sub_(shift))

    def _logits(self, n: slice, w: Tensor, b: Tensor | None) -> Tensor:
        h = self.h[n]
        if self.buffer is None:
            logits = torch.mm(h, w.T, out_dtype=self.exact)
            if self.options.temperature != 1.0:
                logits /= self.options.temperature
        else:  # `h` and `b` are scaled by 1 / T already
            logits = torch.mm(h, w.T, out=self.buffer[: len(h) * len(w)].view(len(h), len(w)))
        if b is not None:
            logits += b
        return logits

    def results(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """log p [N], entropy [N], and ∂ log p / ∂h [N, H] when asked for."""
        lse = self.peak * self.unit + self.mass.log()  # nats
        logprobs = self.chosen * self.unit - lse
        gradient = None
        if self.expected is not None:
            self.expected /= self.mass.unsqueeze(1)
            if (
                self.options.with_entropy
            ):  # Σ p_v l_v = (h · Σ p_v W_v + Σ p_v b_v) / T costs little, given the gradient
                dot = torch.linalg.vecdot(self.h.to(self.exact), self.expected)
                self.moment += (dot / self.options.temperature if self.half else dot) * self.mass
            gradient = self.weight.index_select(0, self.targets).to(self.exact)
            gradient = gradient.sub_(self.expected).div_(self.options.temperature).to(self.hidden.dtype)
        with_entropy = self.options.with_entropy
        entropy = lse - self.moment * self.unit / self.mass if with_entropy else torch.zeros_like(lse)
        return logprobs, entropy, gradient


def _add_matmul(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in place; `b` may be 16-bit on CUDA, then `a` (probabilities) is rounded like it."""
    if b.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += torch.mm(a.to(b.dtype), b, out_dtype=total.dtype)
