"""Sharded building blocks in one process; whole sharded runs are in test_ranks.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.factory import rollout_of
from support.policies import TINY
from torch.distributed.tensor import DTensor

from callbacks.checkpoint import _merged
from draco.core.errors import ConfigError
from draco.policy.chat import ChatFormat
from draco.policy.policy import Policy
from draco.policy.sharding import _Weights, full, is_sharded, like
from draco.update.packing import Row, balance, micro_batches


def test_a_policy_without_weights_has_the_adapter_of_a_whole_one() -> None:
    torch.manual_seed(3)
    whole = Policy(TINY, rank=4)
    torch.manual_seed(3)
    hollow = Policy(TINY, rank=4, sharded=True)
    pairs = zip(whole.named_parameters(), hollow.named_parameters(), strict=True)
    for (name, a), (other, b) in pairs:
        assert (name, a.shape, a.dtype, a.requires_grad) == (other, b.shape, b.dtype, b.requires_grad)
        assert b.is_meta != a.requires_grad
        if a.requires_grad:
            assert torch.equal(a, b)
    buffers = dict(whole.model.named_buffers())
    assert all(torch.equal(buffers[n], b) for n, b in hollow.model.named_buffers())
    assert not is_sharded(hollow.model)


def test_rows_are_read_from_files_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no model\.safetensors"):
        _Weights(tmp_path)
    policy = Policy(TINY, sharded=True)
    weights = _Weights(policy.weights_folder)
    name, parameter = next((n, p) for n, p in policy.model.get_base_model().named_parameters() if p.is_meta)
    part = weights.rows(name, parameter.shape, 3, 5)
    whole = weights.rows(name, parameter.shape, 0, parameter.shape[0])
    assert torch.equal(part, whole[3:5])
    with pytest.raises(ConfigError, match="expected"):
        weights.rows(name, torch.Size((1, 2)), 0, 1)
    with pytest.raises(ConfigError, match="no tensor model"):
        weights.rows("model.nothing", torch.Size((1,)), 0, 1)


def test_shares_are_even_complete_and_within_the_limit(chat: ChatFormat) -> None:
    one = rollout_of(chat, ["<code>x</code>", "<code>done</code>"]).trajectory()
    lengths = [300, 40, 200, 210, 90, 60]
    rows = []
    for n in lengths:
        (*_, last) = one.steps
        rows.append(Row(replace(one, steps=(replace(last, span=(0, n)),)), (0.0,)))
    own = list(micro_batches(rows, 400, packed=True))
    split = balance(rows, own, 3, 400)
    assert sorted(r.length for b in split for r in b) == sorted(lengths)
    assert [sum(r.length for r in b) for b in split] == [310, 300, 290]
    longer = balance(rows, own, 8, 400)
    assert len(longer) == 8
    assert longer[-1] == ()  # pads
    tight = balance(rows, own, len(own), 305)  # an even split would not respect the limit: the own plan stands
    assert {tuple(r.length for r in b) for b in tight} == {tuple(r.length for r in b) for b in own}


def test_states_of_ranks_become_one() -> None:
    a = {"Dynamic": {"proposals": {"t1": [1]}}, "Credit": {}}
    b = {"Dynamic": {"proposals": {"t2": [2], "t1": [9]}}, "Credit": {}}
    assert _merged([a, b]) == {"Dynamic": {"proposals": {"t1": [1], "t2": [2]}}, "Credit": {}}


def test_plain_tensors_pass_through() -> None:
    x = torch.arange(4.0)
    assert full(x) is x
    assert torch.equal(like(x, torch.zeros(4)), x)
    assert not isinstance(like(x, x), DTensor)
