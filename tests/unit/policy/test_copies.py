"""Small copies: the kinds of layer stay, lengths at which a model changes become short, nothing else moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig

from draco.core.errors import ConfigError
from draco.policy.copies import LONGEST, ORIGINAL, SWITCH, small_config, small_copy


def real(model_type: str, **fields: Any) -> PreTrainedConfig:
    """A configuration of transformers' own sizes: billions of parameters."""
    config: PreTrainedConfig = AutoConfig.for_model(model_type, **fields)
    return config


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("llama", {}), ("mistral", {}), ("phi3", {"sliding_window": 2047}), ("gemma2", {}), ("gemma3", {}),
        ("gpt2", {}), ("gpt_neo", {}), ("mixtral", {}), ("deepseek_v3", {}), ("gpt_oss", {}), ("llama4_text", {}),
        ("qwen3_5_text", {}), ("lfm2", {}), ("falcon_h1", {}), ("bamba", {}), ("qwen2_moe", {}), ("llava", {}),
    ],
)  # fmt: skip
def test_a_copy_is_small_and_runs_beyond_its_switches(model_type: str, fields: dict[str, Any]) -> None:
    config = real(model_type, **fields)
    before = config.to_json_string()
    model = small_copy(config)
    assert config.to_json_string() == before
    assert sum(p.numel() for p in model.parameters()) < 30_000_000
    with torch.no_grad():
        logits = model(input_ids=torch.arange(2 * ORIGINAL).unsqueeze(0), use_cache=False).logits
    assert logits.shape[1] == 2 * ORIGINAL
    assert bool(torch.isfinite(logits).all())


def test_switches_become_short() -> None:
    assert small_config(real("mistral")).sliding_window == SWITCH
    assert small_config(real("llama4_text")).attention_chunk_size == SWITCH
    assert small_config(real("gpt_neo")).window_size == SWITCH
    factors = [1.0] * 48
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors, "long_factor": factors, "factor": 32.0}
    config = real(
        "phi3", max_position_embeddings=131072, original_max_position_embeddings=4096,
        rope_parameters={**rope, "original_max_position_embeddings": 4096},
    )  # fmt: skip
    small = small_config(config)
    assert small.original_max_position_embeddings == ORIGINAL
    assert small.rope_parameters["original_max_position_embeddings"] == ORIGINAL
    assert small.max_position_embeddings == LONGEST
    dynamic = real("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    assert small_config(dynamic).max_position_embeddings == ORIGINAL


def test_what_no_row_reaches_does_not_change() -> None:
    assert small_config(real("mistral"), longest=4096).sliding_window == LONGEST
    assert small_config(real("mistral"), longest=4097).sliding_window == SWITCH
    dynamic = real(
        "llama",
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    )
    assert small_config(dynamic, longest=2048).max_position_embeddings == LONGEST
    assert small_config(dynamic, longest=2049).max_position_embeddings == ORIGINAL


def test_what_is_off_stays_off() -> None:
    assert not small_config(real("qwen2")).sliding_window
    assert not small_config(real("mistral", sliding_window=None)).sliding_window


def test_every_kind_of_layer_stays() -> None:
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    assert small_config(real("qwen3_5_text", num_hidden_layers=64, layer_types=kinds * 16)).layer_types == kinds[2:]
    llama4 = small_config(real("llama4_text", moe_layers=[3, 7], num_hidden_layers=8, no_rope_layers=[1, 1, 1, 0] * 2))
    assert set(llama4.layer_types) == {"chunked_attention", "full_attention"}
    assert len(llama4.moe_layers) == 1  # one of two layers, under its new number
    assert llama4.moe_layers[0] < llama4.num_hidden_layers


def test_two_layers_at_least_and_groups_of_heads() -> None:
    small = small_config(real("llama", num_attention_heads=32, num_key_value_heads=8))
    assert small.num_hidden_layers == 2
    assert 1 < small.num_key_value_heads < small.num_attention_heads


def test_no_random_stream_moves() -> None:
    before = torch.random.get_rng_state()
    first, second = (small_copy(real("llama")).state_dict() for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_model_without_a_copy_is_one_line() -> None:
    with pytest.raises(ConfigError, match="no small copy of a t5 model"):
        small_copy(real("t5"))
