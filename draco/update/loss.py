"""The GRPO token loss: clipped and dual-clipped surrogate, k3 KL, truncated importance weights (Eq. 2, Table 10).

Everything is per token and *summed*: the caller divides once, before clipping gradients, by the batch's global number
of step tokens, so that gradients do not depend on the split into micro-batches or ranks. Shapes: N step tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draco.update.options import LossOptions

__all__ = ["LossSums", "engine_mismatch", "kl_k3", "token_loss_sum", "truncated_importance_weights"]

#: Log-ratios are held within ± this before exp: e^20 is far outside every clip, and inf · 0 would be NaN.
MAX_LOG_RATIO = 20.0


class LossSums(NamedTuple):
    """Summed loss and detached sums of one micro-batch; 0-dim tensors, so that no device synchronisation happens."""

    loss: Tensor  #: Σ (policy loss + kl_coef · KL), with gradient; divide by the batch's token count
    kl: Tensor  #: Σ k3, nats, unweighted; 0 without reference
    clipped: Tensor  #: tokens where the clip bounds hold the ratio and stop the gradient (dual clip not included)
    dual_clipped: Tensor  #: tokens where the dual clip bounds the loss
    ratio_max: Tensor  #: largest π/π_old (or 0 without tokens): combine by maximum, the others by sum


def token_loss_sum(
    logprobs: Tensor,
    advantages: Tensor,
    options: LossOptions,
    *,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    weights: Tensor | None = None,
    token_weights: Tensor | None = None,
) -> LossSums:
    """Σ over tokens of token_weight · (weight · surrogate + kl_coef · k3): the caller divides once, over all ranks.

    Args:
        logprobs: [N] current log π of the step tokens, with gradient; N = 0 gives a zero loss that has a gradient.
        advantages: [N] a_j of each token's step.
        options: clips and the coefficient of the KL term; 0 still measures KL when `ref_logprobs` is given.
        old_logprobs: [N] log π at sampling time; None: the detached current ones (one update a batch, r ≡ 1).
        ref_logprobs: [N] log π of the reference policy; None: no KL term.
        weights: [N] factor on the surrogate, such as truncated importance weights; None: 1.
        token_weights: [N] factor on the whole token loss, such as 1/n of its trajectory; None: 1.

    Raises:
        ValueError: shapes that differ.
    """
    old = logprobs if old_logprobs is None else old_logprobs
    _check(logprobs, old_logprobs=old, advantages=advantages)
    policy, ratio, clipped, dual = _surrogate(logprobs, old, advantages, options)
    if weights is not None:
        _check(logprobs, weights=weights)
        policy = policy * weights.detach()
    kl = torch.zeros_like(policy) if ref_logprobs is None else kl_k3(logprobs, ref_logprobs)
    if token_weights is None:
        loss, kl_term = policy.sum(), kl.sum()
    else:
        _check(logprobs, token_weights=token_weights)
        loss, kl_term = policy @ token_weights, kl @ token_weights
    if ref_logprobs is not None and options.kl_coef:
        loss = loss + options.kl_coef * kl_term
    return LossSums(loss, kl.detach().sum(), clipped.sum(), dual.sum(), _max(ratio.detach()))


def _surrogate(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, options: LossOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """PPO's clipped surrogate as a loss, with a dual clip for negative advantages.

    With r = exp(logp − logp_old): L = max(−A r, −A clip(r, 1 − low, 1 + high)), and for A < 0 additionally
    L = min(L, −A c): a token that became much likelier although it is bad does not dominate the batch.

    Returns:
        Loss, ratio, clipped and dual-clipped masks, each [N].
    """
    a = advantages.detach().to(logprobs.dtype)
    ratio = _ratio(logprobs, old_logprobs)
    plain = -a * ratio
    held = -a * ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    loss = torch.maximum(plain, held)
    clipped = held > plain
    dual = torch.zeros_like(clipped)
    if options.dual_clip is not None:
        bound = -a * options.dual_clip
        dual = (a < 0) & (loss > bound)
        loss = torch.where(dual, bound, loss)
    return loss, ratio, clipped, dual


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k3 estimate of KL(π ‖ π_ref) per sampled token: exp(d) − d − 1 with d = logp_ref − logp; ≥ 0, in nats.

    Args:
        logprobs: [N] current log π, with gradient.
        ref_logprobs: [N] log π_ref; detached here.

    Returns:
        [N]. Beyond d = 20 the estimate is held (and gives no gradient): exp would overflow.
    """
    _check(logprobs, ref_logprobs=ref_logprobs)
    d = (ref_logprobs.detach() - logprobs).clamp(max=MAX_LOG_RATIO)
    return torch.expm1(d) - d  # expm1 keeps small d exact, where exp(d) − 1 cancels


def truncated_importance_weights(trainer_logprobs: Tensor, engine_logprobs: Tensor, cap: float) -> Tensor:
    """min(π_trainer / π_engine, cap) per token, detached: corrects a sampler whose numerics differ from the trainer's.

    Args:
        trainer_logprobs: [N] log π by the trainer at sampling time (the old log-probs).
        engine_logprobs: [N] log π that the engine reported.
        cap: upper bound, > 0.

    Raises:
        ValueError: shapes that differ.
    """
    _check(trainer_logprobs, engine_logprobs=engine_logprobs)
    return _ratio(trainer_logprobs.detach(), engine_logprobs).clamp(max=cap)


def engine_mismatch(trainer_logprobs: Tensor, engine_logprobs: Tensor) -> dict[str, Tensor]:
    """How far the engine's log-probs are from the trainer's: sums over tokens, and a maximum, as 0-dim tensors.

    Args:
        trainer_logprobs: [N] log π by the trainer at sampling time.
        engine_logprobs: [N] log π that the engine reported.

    Returns:
        `abs` Σ |Δ| in nats, `k3` Σ k3 of KL(engine ‖ trainer), `ratio_max` (combine by maximum), of detached values.
    """
    _check(trainer_logprobs, engine_logprobs=engine_logprobs)
    trainer, engine = trainer_logprobs.detach(), engine_logprobs.detach()
    return {
        "abs": (trainer - engine).abs().sum(),
        "k3": kl_k3(engine, trainer).sum(),  # the tokens were sampled by the engine
        "ratio_max": _max(_ratio(trainer, engine)),
    }


def _ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    return (logprobs - old_logprobs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _max(values: Tensor) -> Tensor:
    return values.max() if values.numel() else values.new_zeros(())


def _check(logprobs: Tensor, **others: Tensor) -> None:
    if logprobs.ndim != 1:
        raise ValueError(f"expected logprobs as [N], got shape {list(logprobs.shape)}")
    for name, other in others.items():
        if other.shape != logprobs.shape:
            raise ValueError(f"expected {name} as [{logprobs.numel()}] like logprobs, got {list(other.shape)}")
