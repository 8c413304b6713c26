"""Tiny random models of the families of transformers, one for each way in which an architecture can differ.

`FAMILIES` maps a name to what is special about it and to the fields of its configuration. Windows, chunks and rope
switches lie at a few dozen tokens, so that short rows cross them.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from draco.policy.copies import random_model
from draco.policy.loading import quiet_loading

__all__ = ["FAMILIES", "Family", "build", "config_of", "save"]

VOCABULARY = 704  #: of the tokenizer that the tiny policy ships with
WINDOW = 16  #: tokens of sliding windows and chunks
ORIGINAL = 32  #: positions before a scaled rope changes

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "pad_token_id": 256, "eos_token_id": 257, "bos_token_id": None,
}  # fmt: skip
#: names that most families share
_SIZES: dict[str, Any] = _COMMON | {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
_HEAD = {"head_dim": 8}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
_DEEPSEEK = _LATENT | {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


@dataclass(frozen=True)
class Family:
    """One row of the matrix."""

    model_type: str
    special: str  #: what it stands for
    fields: dict[str, Any] = field(default_factory=dict)  #: beside the common sizes
    sizes: dict[str, Any] = field(default_factory=lambda: _SIZES)
    text: str = ""  #: the field with the text model's configuration, of a multimodal family


def _multimodal(model_type: str, special: str, text: dict[str, Any], **fields: Any) -> Family:
    return Family(model_type, special, {"text_config": _SIZES | text, **fields}, _COMMON, "text_config")


FAMILIES: dict[str, Family] = {
    # --- dense ---
    "llama": Family("llama", "dense"),
    "llama3 rope": Family("llama", "rope scaled once", _rope(
        "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=ORIGINAL)),
    "llama yarn": Family("llama", "rope scaled once", _rope(
        "yarn", factor=8.0, original_max_position_embeddings=ORIGINAL)),
    "llama dynamic": Family("llama", "rope depends on the longest row", {"max_position_embeddings": ORIGINAL} | _rope(
        "dynamic", factor=4.0)),
    "qwen2": Family("qwen2", "dense, biases, tied head", {"tie_word_embeddings": True}),
    "qwen2 window": Family("qwen2", "sliding window in one layer", {
        "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": Family("qwen3", "norms of queries and keys", _HEAD),
    "mistral": Family("mistral", "sliding window", {"sliding_window": WINDOW}),
    "ministral3": Family("ministral3", "queries scaled by position", _HEAD | {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": ORIGINAL,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}}),
    "gemma": Family("gemma", "scaled embedding, tied head", _HEAD),
    "gemma2": Family("gemma2", "softcap of attention and logits, windows", _HEAD | {
        "sliding_window": WINDOW, "query_pre_attn_scalar": 8}),
    "gemma3": Family("gemma3_text", "windows with a rope of their own", _HEAD | {
        "sliding_window": WINDOW, "query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"]}),
    "phi": Family("phi", "attention and MLP side by side, head with bias", {"partial_rotary_factor": 0.5}),
    "phi3": Family("phi3", "fused projections, window", {"sliding_window": WINDOW}),
    "phi3 longrope": Family("phi3", "rope switches at a length", {
        "max_position_embeddings": 128, "original_max_position_embeddings": ORIGINAL, **_rope(
            "longrope", short_factor=[1.0] * 4, long_factor=[4.0] * 4, factor=4.0,
            original_max_position_embeddings=ORIGINAL)}),
    "olmo2": Family("olmo2", "norms behind the layers"),
    "olmo3": Family("olmo3", "windows", {
        "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}),
    "glm4": Family("glm4", "interleaved half rope", _HEAD | {"partial_rotary_factor": 0.5}),
    "stablelm": Family("stablelm", "partial rope, layer norms"),
    "starcoder2": Family("starcoder2", "biases everywhere, window", {"sliding_window": WINDOW}),
    "granite": Family("granite", "scaled logits", {"logits_scaling": 4.0, "embedding_multiplier": 2.0}),
    "cohere": Family("cohere", "scaled logits, one norm", {"logit_scale": 0.25}),
    "cohere2": Family("cohere2", "windows with rope, full without", _HEAD | {
        "logit_scale": 1.0, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}),
    "smollm3": Family("smollm3", "layers without rope", {"no_rope_layers": [1, 0]}),
    "exaone4": Family("exaone4", "windows with rope, full without", {
        "sliding_window": WINDOW, "sliding_window_pattern": 2,
        "layer_types": ["sliding_attention", "full_attention"]}),
    "nemotron": Family("nemotron", "attention takes no extra arguments", _HEAD | {"partial_rotary_factor": 0.5}),
    "gpt_neox": Family("gpt_neox", "partial rope, side by side", {"rotary_pct": 0.5}),
    "gptj": Family("gptj", "attention of its own, head with bias", {
        "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 256, "n_inner": 48}, _COMMON),
    "seed_oss": Family("seed_oss", "dense", _HEAD),
    "hunyuan": Family("hunyuan_v1_dense", "norms of queries and keys", _HEAD),
    "minicpm3": Family("minicpm3", "latent attention, scaled hidden states", _LATENT),
    "diffllama": Family("diffllama", "difference of two attentions"),
    # --- learned positions, alibi ---
    "gpt2": Family("gpt2", "learned positions, tied head, dropout", {
        "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}, _COMMON),
    "opt": Family("opt", "learned positions", {
        "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 256, "word_embed_proj_dim": 32}, _COMMON),
    "gpt_neo": Family("gpt_neo", "learned positions, local attention", {
        "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4, "window_size": WINDOW,
        "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 256}, _COMMON),
    "gpt_bigcode": Family("gpt_bigcode", "learned positions, one key head", {
        "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}, _COMMON),
    "bloom": Family("bloom", "alibi", {"hidden_size": 32, "n_layer": 2, "n_head": 4}, _COMMON),
    "mpt": Family("mpt", "alibi", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256}, _COMMON),
    "falcon": Family("falcon", "one key head, side by side", {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}, _COMMON),
    "falcon alibi": Family("falcon", "alibi", {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True, "parallel_attn": False},
        _COMMON),
    # --- mixtures of experts ---
    "mixtral": Family("mixtral", "experts", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": Family("qwen2_moe", "experts and a shared one, window in the mask alone", _EXPERTS | {
        "shared_expert_intermediate_size": 24, "use_sliding_window": True, "sliding_window": WINDOW,
        "max_window_layers": 1}),
    "qwen3_moe": Family("qwen3_moe", "experts", _HEAD | _EXPERTS),
    "olmoe": Family("olmoe", "experts", {"num_experts": 4, "num_experts_per_tok": 2}),
    "phimoe": Family("phimoe", "experts, window in the mask alone", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
    "gpt_oss": Family("gpt_oss", "experts, attention sinks, windows", _HEAD | {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"], **_rope("default")}),
    "deepseek_v2": Family("deepseek_v2", "experts, latent attention", _DEEPSEEK),
    "deepseek_v3": Family("deepseek_v3", "experts, latent attention", _DEEPSEEK),
    "glm4_moe": Family("glm4_moe", "experts and a shared one", _HEAD | {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}),
    "granitemoe": Family("granitemoe", "experts, scaled logits", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 1.0}),
    "dbrx": Family("dbrx", "experts in one matrix, fused projections", {
        "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32}}, _COMMON),
    "doge": Family("doge", "window in the mask alone, a mask of its own", _HEAD | {
        "sliding_window": WINDOW, "keep_window_size": 8}),
    "ernie4_5_moe": Family("ernie4_5_moe", "experts from the second layer on", {
        "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1, "moe_layer_end_index": 1}),
    "llama4": Family("llama4_text", "chunks, experts, layers without rope", _HEAD | {
        "attention_chunk_size": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 48,
        "interleave_moe_layer_step": 2, "no_rope_layers": [1, 0], "floor_scale": 16, "attn_scale": 0.5}),
    "minimax": Family("minimax", "lightning attention", _HEAD | {
        "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 8,
        "layer_types": ["linear_attention", "full_attention"]}),
    # --- layers with a state ---
    "qwen3_next": Family("qwen3_next", "linear attention, experts", _HEAD | _DELTA | _EXPERTS | {
        "shared_expert_intermediate_size": 24, "partial_rotary_factor": 0.5}),
    "qwen3_5": Family("qwen3_5_text", "linear attention", _HEAD | _DELTA | {"partial_rotary_factor": 0.5}),
    "lfm2": Family("lfm2", "short convolutions", {
        "block_multiple_of": 16, "layer_types": ["conv", "full_attention"]}),
    "mamba2": Family("mamba2", "state space alone", {
        "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2,
        "chunk_size": 8}, _COMMON),
    "bamba": Family("bamba", "state space and attention", {
        "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8,
        "mamba_d_head": 8}),
    "falcon_h1": Family("falcon_h1", "state space beside attention", _HEAD | {
        "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2,
        "mamba_chunk_size": 8}),
    "recurrent_gemma": Family("recurrent_gemma", "linear recurrence, local attention", {
        "lru_width": 32, "attention_window_size": WINDOW, "block_types": ["recurrent", "attention"]}),
    "jamba": Family("jamba", "state space, attention, experts", {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "num_experts": 4, "mamba_d_state": 8}),
    # --- multimodal checkpoints, of which the text model trains ---
    "gemma3 multimodal": _multimodal("gemma3", "images", {
        "model_type": "gemma3_text", "head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"]}, vision_config={
            "model_type": "siglip_vision_model", **_VISION}, mm_tokens_per_image=4),
    "llava": _multimodal("llava", "images", {"model_type": "llama"}, vision_config={
        "model_type": "clip_vision_model", **_VISION, "projection_dim": 16}, image_token_index=703),
    "qwen2_5_vl": _multimodal("qwen2_5_vl", "images, rope in three parts", {
        "model_type": "qwen2_5_vl_text", "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}, vision_config={
        "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32,
        "patch_size": 8, "fullatt_block_indexes": [0]}),
}  # fmt: skip


def config_of(name: str, **changes: Any) -> PreTrainedConfig:
    """Configuration of a family; `changes` go to its text model."""
    family = FAMILIES[name]
    fields = family.sizes | family.fields
    if family.text:
        fields[family.text] = fields[family.text] | changes
    else:
        fields |= changes
    return AutoConfig.for_model(family.model_type, **fields)


def build(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model with random float32 weights under which every layer matters."""
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return random_model(config, seed, AutoModelForCausalLM if known else AutoModelForImageTextToText)


def save(folder: Path, name: str, **changes: Any) -> Path:
    """A folder that `policy=hf policy.path=FOLDER` loads: weights, and tokenizer and template of the tiny policy."""
    model = build(config_of(name, **changes))
    with quiet_loading():
        model.save_pretrained(folder)
    tiny = Path(str(files("draco.policy") / "tiny"))
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny / file, folder / file)
    return folder
