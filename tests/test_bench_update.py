"""Our half of scripts/bench_update.py; TRL, the other half, is in no test environment."""

from __future__ import annotations

import bench_update
import pytest


def test_our_half_makes_a_step_and_reads_loss_gradient_and_padding() -> None:
    size = bench_update.Size({**bench_update.SIZES["tiny"].model, "num_hidden_layers": 1}, (24, 40), 8, 0.5)
    ours = bench_update.Ours(size)
    loss, norm = ours.step()
    assert norm > 0
    assert (loss, norm) == pytest.approx(ours.step())
    assert ours.totals.sums["model_tokens"] == ours.totals.sums["computed_tokens"] > 0
