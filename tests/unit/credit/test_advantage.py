"""Rewards (Eq. 3), dropout and group advantages (Eq. 1): hand-computed values and every refusal."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draco.credit.advantage import standardize
from draco.judge.verdicts import dropout, rewards, verdict_unanimous

SCORES = torch.tensor(
    [
        [1, 1, 1, 1],  # all pass: dropped
        [0, 0, 0, 0],  # all n.a.: dropped
        [-1, -1, -1, -1],  # all fail: stays
        [1, -1, 0, 1],
        [1, 0, 0, -1],
    ],
    dtype=torch.int8,
)


def test_dropout_keeps_what_somebody_failed() -> None:
    assert dropout(SCORES).tolist() == [False, False, True, True, True]


def test_rewards_by_hand() -> None:
    result = rewards(SCORES, dropout(SCORES))
    assert result.dtype == torch.float64
    assert result.tolist() == [1 / 3, -1.0, -1.0, -1 / 3]  # (2-1)/3, (0-2)/2, (0-1)/1, (1-2)/3


def test_rewards_are_zero_when_nothing_counts() -> None:
    assert rewards(SCORES, torch.zeros(5, dtype=torch.bool)).tolist() == [0.0] * 4
    empty = torch.zeros((0, 3), dtype=torch.int8)
    assert dropout(empty).tolist() == []
    assert rewards(empty, dropout(empty)).tolist() == [0.0] * 3


def test_dropout_before_rewards_matters() -> None:
    scores = torch.tensor([[1, 1], [1, -1]], dtype=torch.int8)
    assert rewards(scores, dropout(scores)).tolist() == [1.0, -1.0]
    assert rewards(scores, torch.ones(2, dtype=torch.bool)).tolist() == [1.0, 0.0]


def test_standardize_by_hand() -> None:
    values = torch.tensor([1.0, 0.0, -1.0])  # sample std 1, population std sqrt(2/3)
    sample = standardize(values)
    assert sample.advantages.dtype == torch.float64
    assert sample.advantages.tolist() == pytest.approx([1 / 1.000001, 0, -1 / 1.000001], rel=1e-12)
    assert not sample.zero_std
    population = standardize(values, std="population", epsilon=0.0)
    assert population.advantages.tolist() == pytest.approx([math.sqrt(1.5), 0, -math.sqrt(1.5)], rel=1e-12)


def test_standardize_without_normalisation_subtracts_the_mean_only() -> None:
    result = standardize(torch.tensor([0.5, 0.0, -1.0]), normalize=False)
    assert result.advantages.tolist() == pytest.approx([2 / 3, 1 / 6, -5 / 6], rel=1e-12)


@pytest.mark.parametrize("normalize", [True, False])
def test_equal_rewards_carry_no_signal(normalize: bool) -> None:
    result = standardize(torch.full((6,), 1 / 3, dtype=torch.float64), normalize=normalize)
    assert result.zero_std
    assert result.advantages.tolist() == [0.0] * 6


def test_the_zero_threshold_is_a_parameter() -> None:
    values = torch.tensor([1e-9, -1e-9], dtype=torch.float64)
    assert standardize(values).zero_std
    assert not standardize(values, zero_below=1e-12).zero_std


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=12))
def test_advantages_sum_to_zero_and_keep_the_order(values: list[float]) -> None:
    given_rewards = torch.tensor(values, dtype=torch.float64)
    result = standardize(given_rewards)
    assert float(result.advantages.sum()) == pytest.approx(0, abs=1e-8)
    if not result.zero_std:
        by_reward = sorted(zip(values, result.advantages.tolist(), strict=True))
        assert all(low[1] <= high[1] for low, high in pairwise(by_reward))
        spread = float(given_rewards.std())
        assert float(result.advantages.std()) == pytest.approx(spread / (spread + 1e-6), rel=1e-9)


def test_verdict_unanimous_counts_passes_and_fails_only() -> None:
    #                        all pass | all fail | pass + n.a. | none | mixed
    scores = torch.tensor([[1, -1, 1, 0, 1], [1, -1, 0, 0, -1], [1, 1, 1, 1, 1]], dtype=torch.int8)
    kept = torch.tensor([True, True, False])  # the last row would make column 2 mixed
    assert verdict_unanimous(scores, kept).tolist() == [True, True, True, True, False]


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (torch.zeros(3, dtype=torch.int8), "integer scores as"),
        (torch.zeros(2, 3), "integer scores as"),
        (torch.zeros((2, 3), dtype=torch.bool), "integer scores as"),
        (torch.tensor([[2, 0]], dtype=torch.int8), "scores in -1, 0, 1"),
    ],
)
def test_bad_scores_are_refused(scores: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dropout(scores)


@pytest.mark.parametrize("kept", [torch.ones(4, dtype=torch.bool), torch.ones(5, dtype=torch.int8)])
def test_bad_kept_is_refused(kept: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"kept as bool \[5\]"):
        rewards(SCORES, kept)


def test_bad_rewards_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 rewards"):
        standardize(torch.tensor([1.0]))
    with pytest.raises(ValueError, match="at least 2 rewards"):
        standardize(torch.ones(2, 2))
    with pytest.raises(ValueError, match="finite rewards"):
        standardize(torch.tensor([1.0, math.nan]))
    with pytest.raises(ValueError, match="'sample' or 'population'"):
        standardize(torch.tensor([1.0, 0.0]), std="both")  # type: ignore[arg-type]
