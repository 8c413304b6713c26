"""The token loss: golden numbers by hand, gradients, and where each clip acts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from draco.update.loss import engine_mismatch, kl_k3, token_loss_sum, truncated_importance_weights
from draco.update.options import LossOptions

OPTIONS = LossOptions()


def logs(*ratios: float) -> Tensor:
    """[N] log-probs whose ratio to old log-probs of 0 is as given."""
    return torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()


def loss_and_gradient(ratio: float, advantage: float, **options: float | None) -> tuple[float, float]:
    """Surrogate loss of one token and its derivative by log π."""
    logprobs = logs(ratio)
    old = torch.zeros(1, dtype=torch.float64)
    advantages = torch.tensor([advantage], dtype=torch.float64)
    loss = token_loss_sum(logprobs, advantages, LossOptions(**options), old_logprobs=old).loss  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return float(loss.detach()), float(gradient)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),  # on policy: the gradient is −A
        (1.0, -2.0, 2.0, 2.0),
        (1.1, 2.0, -2.2, -2.2),  # inside the clip: −A r
        (1.5, 2.0, -2.4, 0.0),  # a good token went up enough: held at −A · 1.2
        (0.5, 2.0, -1.0, -1.0),  # a good token went down: no clip, pull it back
        (0.5, -2.0, 1.6, 0.0),  # a bad token went down enough: held at −A · 0.8
        (1.5, -2.0, 3.0, 3.0),  # a bad token went up: no clip, push it down
        (3.5, -2.0, 6.0, 0.0),  # too far up: dual clip at −A · 3
        (3.5, 2.0, -2.4, 0.0),  # no dual clip for a positive advantage
        (9.0, 0.0, 0.0, 0.0),
    ],
)
def test_surrogate_by_hand(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    assert loss_and_gradient(ratio, advantage) == pytest.approx((loss, gradient), rel=1e-12, abs=1e-12)


def test_dual_clip_can_be_turned_off() -> None:
    assert loss_and_gradient(3.5, -2.0, dual_clip=None) == pytest.approx((7.0, 7.0), rel=1e-12)


def test_clip_bounds_are_separate() -> None:
    assert loss_and_gradient(1.25, 1.0, clip_high=0.28) == pytest.approx((-1.25, -1.25), rel=1e-12)
    assert loss_and_gradient(0.65, -1.0, clip_low=0.4) == pytest.approx((0.65, 0.65), rel=1e-12)


@given(st.floats(0.01, 100), st.floats(-5, 5))
def test_dual_clip_bounds_the_loss_of_negative_advantages_only(ratio: float, advantage: float) -> None:
    with_dual, _ = loss_and_gradient(ratio, advantage)
    without, _ = loss_and_gradient(ratio, advantage, dual_clip=None)
    if advantage >= 0:
        assert with_dual == without
    else:
        assert with_dual == pytest.approx(min(without, -3 * advantage), rel=1e-12)


def test_extreme_ratios_stay_finite() -> None:
    for logprob, old, advantage, expected in (
        (0.0, -500.0, 0.0, 0.0),
        (0.0, -500.0, 1.0, -1.2),
        (-500.0, 0.0, 1.0, 0.0),
    ):
        logprobs = torch.tensor([logprob], requires_grad=True)
        loss = token_loss_sum(logprobs, torch.tensor([advantage]), OPTIONS, old_logprobs=torch.tensor([old])).loss
        (gradient,) = torch.autograd.grad(loss, logprobs)
        assert float(loss.detach()) == pytest.approx(expected, abs=1e-6)
        assert float(gradient) == pytest.approx(0.0, abs=1e-6)


def test_k3_by_hand() -> None:
    values = kl_k3(torch.tensor([0.0, 0.0, 0.0]), torch.tensor([0.0, math.log(2), -math.log(2)]))
    assert values.tolist() == pytest.approx([0.0, 1 - math.log(2), math.log(2) - 0.5], abs=1e-7)


@given(st.floats(-30, 0), st.floats(-30, 0))
def test_k3_is_never_negative_and_pulls_towards_the_reference(logprob: float, ref: float) -> None:
    current = torch.tensor([logprob], dtype=torch.float64, requires_grad=True)
    value = kl_k3(current, torch.tensor([ref], dtype=torch.float64))
    (gradient,) = torch.autograd.grad(value.sum(), current)
    assert float(value.detach()) >= 0
    if 1e-6 < abs(logprob - ref) < 20:
        assert float(value.detach()) > 0
        assert math.copysign(1, float(gradient)) == math.copysign(1, logprob - ref)


def test_k3_is_exact_for_tiny_differences_in_float32() -> None:
    """exp(d) − d − 1 would cancel to 0 or below; here it is d²/2 to rounding of expm1."""
    value = kl_k3(torch.tensor([0.0]), torch.tensor([1e-3]))
    assert float(value) == pytest.approx(5e-7, rel=2e-3)


def test_k3_does_not_overflow() -> None:
    assert math.isfinite(float(kl_k3(torch.tensor([-1000.0]), torch.tensor([0.0]))))


def test_truncated_importance_weights_by_hand() -> None:
    trainer = torch.tensor([0.5, 2.0, 8.0], dtype=torch.float64).log().requires_grad_()
    weights = truncated_importance_weights(trainer, torch.zeros(3, dtype=torch.float64), cap=2.0)
    assert weights.tolist() == pytest.approx([0.5, 2.0, 2.0], rel=1e-12)
    assert not weights.requires_grad


def test_engine_mismatch_by_hand() -> None:
    sums = engine_mismatch(torch.tensor([0.0, math.log(2)]), torch.tensor([0.0, 0.0]))
    assert float(sums["abs"]) == pytest.approx(math.log(2))
    assert float(sums["k3"]) == pytest.approx(1 - math.log(2))  # the reference (trainer) is twice as likely
    assert float(sums["ratio_max"]) == pytest.approx(2.0)


def test_loss_sum_on_policy() -> None:
    """r ≡ 1: the loss is −Σ A, its gradient −A + kl_coef · (1 − π_ref/π)."""
    logprobs = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.5, -0.75, 0.0], dtype=torch.float64)
    ref = torch.tensor([-1.0, -2.0, -0.5 - math.log(2)], dtype=torch.float64)
    sums = token_loss_sum(logprobs, advantages, LossOptions(kl_coef=0.1), ref_logprobs=ref)
    k3 = math.log(2) - 0.5
    assert float(sums.loss.detach()) == pytest.approx(-0.75 + 0.1 * k3, rel=1e-12)
    assert float(sums.kl) == pytest.approx(k3, rel=1e-12)
    assert (int(sums.clipped), int(sums.dual_clipped), float(sums.ratio_max)) == (0, 0, 1.0)
    assert not sums.kl.requires_grad
    assert not sums.ratio_max.requires_grad
    (gradient,) = torch.autograd.grad(sums.loss, logprobs)
    assert gradient.tolist() == pytest.approx([-1.5, 0.75, 0.1 * 0.5], rel=1e-12)


def test_loss_sum_counts_clips() -> None:
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    old = torch.zeros(4, dtype=torch.float64)
    sums = token_loss_sum(logs(1.5, 1.0, 0.5, 4.0), advantages, OPTIONS, old_logprobs=old)
    assert (int(sums.clipped), int(sums.dual_clipped)) == (2, 1)
    assert float(sums.ratio_max) == pytest.approx(4.0)
    assert float(sums.loss.detach()) == pytest.approx(-1.2 - 1.0 + 0.8 + 3.0)


def test_loss_sum_weights_scale_the_policy_term_only() -> None:
    logprobs = torch.tensor([-1.0, -1.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.0, -1.0 - math.log(2)], dtype=torch.float64)
    sums = token_loss_sum(
        logprobs,
        torch.ones(2, dtype=torch.float64),
        LossOptions(kl_coef=1.0),
        ref_logprobs=ref,
        weights=torch.tensor([0.5, 2.0], dtype=torch.float64),
    )
    assert float(sums.loss.detach()) == pytest.approx(-2.5 + math.log(2) - 0.5)


def test_sums_add_up_over_any_split() -> None:
    torch.manual_seed(0)
    logprobs, old, ref = (torch.randn(20, dtype=torch.float64) for _ in range(3))
    advantages = torch.randn(20, dtype=torch.float64)

    def total(*cuts: int) -> float:
        parts = [t.tensor_split(cuts) for t in (logprobs, advantages, old, ref)]
        sums = [
            token_loss_sum(a, b, OPTIONS, old_logprobs=c, ref_logprobs=d) for a, b, c, d in zip(*parts, strict=True)
        ]
        return sum(float(s.loss) for s in sums)

    assert total() == pytest.approx(total(1, 9), rel=1e-12)
    assert total() == pytest.approx(total(5, 5, 17), rel=1e-12)  # one part is empty


def test_an_empty_micro_batch_has_a_gradient_of_zero() -> None:
    parameter = torch.ones(3, requires_grad=True)
    sums = token_loss_sum((parameter * 2)[:0], torch.zeros(0), OPTIONS)
    sums.loss.backward()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [0.0] * 3
    assert float(sums.ratio_max) == 0.0


def test_bad_input_is_refused() -> None:
    one, two = torch.zeros(1), torch.zeros(2)
    with pytest.raises(ValueError, match=r"old_logprobs as \[1\]"):
        token_loss_sum(one, one, OPTIONS, old_logprobs=two)
    with pytest.raises(ValueError, match=r"advantages as \[1\]"):
        token_loss_sum(one, two, OPTIONS)
    with pytest.raises(ValueError, match=r"logprobs as \[N\]"):
        token_loss_sum(torch.zeros(1, 1), one, OPTIONS)
    with pytest.raises(ValueError, match=r"weights as \[1\]"):
        token_loss_sum(one, one, OPTIONS, weights=two)
    with pytest.raises(ValueError, match=r"token_weights as \[1\]"):
        token_loss_sum(one, one, OPTIONS, token_weights=two)
    with pytest.raises(ValueError, match=r"ref_logprobs as \[1\]"):
        token_loss_sum(one, one, OPTIONS, ref_logprobs=two)
