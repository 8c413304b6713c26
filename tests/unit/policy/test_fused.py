"""The short passes of norms and rotary embeddings against transformers: values, gradients, and what is left alone."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated

from draco.policy import fused
from draco.policy.fused import fuse_layers

SIZES: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
MODELS: dict[str, tuple[Any, Any, dict[str, Any], dict[str, int]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}, {"norms": 5, "rotary": 2}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}, {"norms": 5, "rotary": 2}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}, {"norms": 9, "rotary": 2}),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, {"head_dim": 8}, {"norms": 9, "rotary": 2}),
    # rotates a quarter of each head: its own code does; one layer of linear attention with a gated norm
    "qwen3_5": (
        Qwen3_5TextConfig,
        Qwen3_5ForCausalLM,
        {"head_dim": 8, "layer_types": ["full_attention", "linear_attention"]},
        {"norms": 7, "rotary": 1},
    ),
    "phi3": (Phi3Config, Phi3ForCausalLM, {}, {"norms": 5, "rotary": 2}),
}
IDS = torch.randint(101, (2, 9), generator=torch.Generator().manual_seed(2))


def build(name: str = "llama", **options: Any) -> Any:
    torch.manual_seed(0)
    config, model, own, _ = MODELS[name]
    made = model(config(**SIZES, **own, **options)).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for key, parameter in made.named_parameters():
        if "norm" in key:  # neither 0 nor 1: the weight must reach values and gradients
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return made


def outcome(model: Any) -> list[Tensor]:
    """Logits and their gradient to the embeddings."""
    embedded = model.get_input_embeddings()(IDS).detach().requires_grad_()
    logits = model(inputs_embeds=embedded).logits
    return [logits.detach(), torch.autograd.grad(logits.float().square().sum(), embedded)[0]]


def difference(ours: Tensor, own: Tensor) -> float:
    return float((ours.double() - own.double()).norm() / own.double().norm())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")
def test_models_give_the_values_and_gradients_of_transformers(name: str) -> None:
    plain = build(name)
    ours = copy.deepcopy(plain)
    assert fuse_layers(ours) == MODELS[name][3]
    results = outcome(ours)
    for a, b in zip(results, outcome(plain), strict=True):
        assert difference(a, b) < 2e-6
    with torch.no_grad():
        assert torch.equal(ours(IDS).logits, results[0])  # with and without gradient the same to the bit
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in ours.named_modules()] == [n for n, _ in plain.named_modules()]


def test_sixteen_bit_models_keep_the_rounding_of_transformers() -> None:
    plain = build().bfloat16()
    ours = copy.deepcopy(plain)
    assert fuse_layers(ours)["norms"] == 0
    late = build()
    fuse_layers(late)
    late.bfloat16()  # cast after it was prepared
    expected = outcome(plain)
    for model in (ours, late):
        assert all(torch.equal(a, b) for a, b in zip(outcome(model), expected, strict=True))


def test_autocast_keeps_the_dtypes_of_transformers() -> None:
    plain, ours = build(), build()
    fuse_layers(ours)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a, b = ours(IDS).logits, plain(IDS).logits
    assert a.dtype == b.dtype
    assert difference(a, b) < 1e-2


def random64(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def test_gradcheck_in_float64() -> None:
    x, w = random64(2, 3, 5).requires_grad_(), random64(5)
    assert torch.autograd.gradcheck(lambda x: fused._rms_norm(x, w, 1e-2), (x,))
    q, cos, sin = random64(1, 2, 3, 6).requires_grad_(), random64(1, 1, 3, 6), random64(1, 1, 3, 6).sin()
    assert torch.autograd.gradcheck(lambda q: fused._rotate(q, cos, sin), (q,))


def test_golden_norm_and_rotation() -> None:
    x = torch.tensor([[3.0, 4.0]])  # mean square 12.5
    y = fused._rms_norm(x, torch.tensor([1.0, 10.0]), 0.0)
    assert torch.allclose(y, torch.tensor([[3.0, 40.0]]) / 12.5**0.5)
    quarter = fused._rotate(torch.tensor([[[[1.0, 2.0]]]]), torch.zeros(1, 1, 1, 2), torch.ones(1, 1, 1, 2))
    assert quarter.tolist() == [[[[-2.0, 1.0]]]]  # a quarter turn


@pytest.mark.parametrize("weight", [0.0, 1.0, -1.0, 0.5])
def test_the_kinds_of_norm_are_told_apart(weight: float) -> None:
    for norm, offset in ((LlamaRMSNorm(8), 0.0), (Qwen3_5RMSNorm(8), 1.0)):
        nn.init.constant_(norm.weight, weight)
        norm.requires_grad_(False)
        assert fused._offset(norm) == offset


class OddRMSNorm(LlamaRMSNorm):
    """Looks like any other."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) * 1.001


class OtherEpsilonRMSNorm(LlamaRMSNorm):
    """Does not use the ε that it names."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * hidden_states * torch.rsqrt(variance + 1.01 * self.variance_epsilon)


class DetachedRMSNorm(LlamaRMSNorm):
    """The same values with another gradient."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        scale = torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * hidden_states * scale.detach()


@pytest.mark.parametrize("kind", [OddRMSNorm, OtherEpsilonRMSNorm, DetachedRMSNorm])
def test_a_norm_that_computes_something_else_is_left_alone(
    kind: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    net = nn.Sequential(kind(8)).requires_grad_(False)
    with caplog.at_level(logging.INFO, "draco"):
        assert fuse_layers(net)["norms"] == 0
    assert kind.__name__ in caplog.text
    assert "forward" not in vars(net[0])


def test_gated_trainable_patched_and_empty_norms_are_left_alone() -> None:
    assert fuse_layers(nn.Sequential(Qwen3_5RMSNormGated(8).requires_grad_(False)))["norms"] == 0
    assert fuse_layers(nn.Sequential(LlamaRMSNorm(8)))["norms"] == 0  # trainable
    patched = LlamaRMSNorm(8).requires_grad_(False)
    vars(patched)["forward"] = lambda x: x
    assert fuse_layers(nn.Sequential(patched))["norms"] == 0
    with torch.device("meta"):
        assert fuse_layers(nn.Sequential(LlamaRMSNorm(8).requires_grad_(False)))["norms"] == 0


def test_a_norm_that_becomes_trainable_gets_its_gradient() -> None:
    norm = LlamaRMSNorm(8).requires_grad_(False)
    assert fuse_layers(nn.Sequential(norm))["norms"] == 1
    norm.weight.requires_grad_(True)
    norm(torch.ones(2, 8)).sum().backward()
    assert norm.weight.grad is not None


def test_a_rotation_of_another_kind_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    own = modeling_llama.apply_rotary_pos_emb

    def interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **_: Any) -> Any:
        q, k = own(q.flip(-1), k.flip(-1), cos, sin)
        return q.flip(-1), k.flip(-1)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", interleaved)
    assert fuse_layers(build())["rotary"] == 0


def test_nothing_is_patched_in_transformers() -> None:
    before = modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaAttention.forward, LlamaRMSNorm.forward
    other = build()
    expected = outcome(other)
    fuse_layers(build())
    assert before == (
        modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaAttention.forward, LlamaRMSNorm.forward
    )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(outcome(other), expected, strict=True))


def test_the_adapter_and_its_files_stay_the_same(tmp_path: Path) -> None:
    config = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    saved = []
    for name in ("plain", "fused"):
        model = get_peft_model(build(), config)
        generator = torch.Generator().manual_seed(3)
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.data = torch.randn(parameter.shape, generator=generator)
        if name == "fused":
            assert fuse_layers(model) == {"norms": 5, "rotary": 2}
        model.save_pretrained(str(tmp_path / name))
        saved.append((tmp_path / name / "adapter_model.safetensors").read_bytes())
    assert saved[0] == saved[1]


def test_the_check_leaves_the_random_state_alone() -> None:
    model = build()
    before = torch.get_rng_state()
    assert fuse_layers(model) == {"norms": 5, "rotary": 2}
    assert torch.equal(torch.get_rng_state(), before)
