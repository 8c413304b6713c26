"""Rows of different lengths in one forward pass, against each row alone."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import SIZES, build, relative
from torch import Tensor, nn

from draco.rollout.engines import ragged
from draco.rollout.engines.ragged import RaggedBatch, RaggedCache, decodes_ragged, ragged_attention

CPU = torch.device("cpu")


def alone(model: Any, row: list[int]) -> Tensor:
    """[T, V] logits of one row."""
    logits: Tensor = model(input_ids=torch.tensor([row]), use_cache=False).logits[0]
    return logits


def feed(
    model: Any, cache: RaggedCache, rows: dict[int, list[int]], fed: dict[int, int], counts: dict[int, int]
) -> Any:
    """One pass over the next `counts` tokens of some rows: {slot: logits of its new tokens}."""
    slots = sorted(counts, key=lambda slot: counts[slot] > 1)
    batch = cache.batch = RaggedBatch(slots, [fed[s] for s in slots], [counts[s] for s in slots], CPU)
    tokens = [token for s in slots for token in rows[s][fed[s] : fed[s] + counts[s]]]
    with ragged_attention(model):
        logits = model(**batch.inputs(tokens), past_key_values=cache, use_cache=True).logits[0]
    for slot in slots:
        fed[slot] += counts[slot]
    return dict(zip(slots, logits.split([counts[s] for s in slots]), strict=True))


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    kinds = ("llama", "qwen2", "qwen3", "sliding window")
    return {kind: build(kind).eval() for kind in kinds}


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_schedule_gives_the_logits_of_each_row_alone(models: dict[str, Any], data: st.DataObject) -> None:
    model = models[data.draw(st.sampled_from(sorted(models)), label="model")]
    count = data.draw(st.integers(1, 4), label="rows")
    tokens = st.lists(st.integers(0, 49), min_size=1, max_size=24)
    rows = {slot: data.draw(tokens, label=f"row {slot}") for slot in range(count)}
    cache, fed = RaggedCache(count + 1), dict.fromkeys(rows, 0)
    got: dict[int, list[Tensor]] = {slot: [] for slot in rows}
    with torch.no_grad():
        while any(fed[s] < len(rows[s]) for s in rows):
            left = {s: len(rows[s]) - fed[s] for s in rows if fed[s] < len(rows[s])}
            counts = {s: data.draw(st.integers(0, n), label=f"{s}") for s, n in left.items()}
            counts = {s: n for s, n in counts.items() if n} or left
            for slot, logits in feed(model, cache, rows, fed, counts).items():
                got[slot].append(logits)
        for slot, row in rows.items():
            assert relative(torch.cat(got[slot]), alone(model, row)) < 1e-5


@torch.no_grad()
def test_slabs_grow_move_and_are_used_again(models: dict[str, Any]) -> None:
    model = models["llama"]
    generator = torch.Generator().manual_seed(0)
    rows = {s: torch.randint(50, (600,), generator=generator).tolist() for s in range(4)}
    cache, fed = RaggedCache(4), dict.fromkeys(rows, 0)
    feed(model, cache, rows, fed, {0: 3, 1: 250, 2: 10, 3: 1})
    feed(model, cache, rows, fed, {1: 5, 3: 400})  # beyond the first 256 places, and beyond 512 − 256 more
    cache.keep([3, 1])
    rows, fed = {0: rows[3], 1: rows[1]}, {0: fed[3], 1: fed[1]}
    feed(model, cache, rows, fed, {0: 1, 1: 300})
    out = feed(model, cache, rows, fed, {0: 198, 1: 1})
    assert relative(out[0], alone(model, rows[0])[402:600]) < 1e-5
    assert relative(out[1], alone(model, rows[1])[555:556]) < 1e-5
    rows[0], fed[0] = rows[1][:50], 0  # another row in a used place
    assert relative(feed(model, cache, rows, fed, {0: 50, 1: 1})[0], alone(model, rows[0])) < 1e-5


def test_single_tokens_stand_first() -> None:
    with pytest.raises(ValueError, match="before those with several"):
        RaggedBatch([0, 1], [0, 0], [2, 1], CPU)


def test_every_kind_of_plain_attention_is_accepted_and_left_as_it_was(models: dict[str, Any]) -> None:
    for kind, model in models.items():
        before = model.config._attn_implementation
        assert decodes_ragged(model), kind
        assert model.config._attn_implementation == before
    assert decodes_ragged(build("llama").to(torch.bfloat16))


def test_hybrids_and_strangers_advance_in_lockstep(caplog: pytest.LogCaptureFixture) -> None:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        **SIZES, head_dim=8, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
        linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    )  # fmt: skip
    assert not decodes_ragged(Qwen3_5ForCausalLM(config))
    assert not decodes_ragged(object())

    class Smear(nn.Module):  # a token mixer that no config field names
        def forward(self, x: Tensor) -> Tensor:
            return x + x.roll(1, dims=1)

    model: Any = build("llama")
    model.model.layers[0].mlp = Smear()
    with caplog.at_level(logging.WARNING, logger="draco"):
        assert not decodes_ragged(model)
    assert "LlamaForCausalLM differs by" in caplog.text
    assert model.config._attn_implementation == "sdpa"


def test_a_model_that_refuses_the_arguments_is_no_fault(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ragged, "_error", lambda model: (_ for _ in ()).throw(TypeError("unexpected keyword")))
    with caplog.at_level(logging.WARNING, logger="draco"):
        assert not decodes_ragged(build("llama"))
    assert "one position at a time: TypeError: unexpected keyword" in caplog.text


def test_queries_without_a_batch_are_an_error() -> None:
    model: Any = build("llama")
    with ragged_attention(model), pytest.raises(RuntimeError, match="RaggedBatch only"):
        model(input_ids=torch.tensor([[1, 2]]))
