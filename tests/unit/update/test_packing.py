"""Packed rows give what each trajectory gives alone; plans hold their budget; hybrids run unpacked."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from support.factory import DONE, credit_of, tasks, typed
from support.models import SIZES, build, relative
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from draco.core.types import Credit, Group
from draco.policy import attention
from draco.policy.attention import leaks_across_rows, pack_attention, packed_inputs
from draco.policy.policy import Policy
from draco.policy.structure import hidden_states
from draco.update.options import LossOptions
from draco.update.packing import MAX_PADDING, Row, collate, micro_batches, rows_of

LENGTHS = (13, 5, 21, 1)


def alone_and_packed(model: nn.Module) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states and the gradient of the embedding, of rows alone and packed."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(50, (1, n), generator=generator) for n in LENGTHS]
    weights = torch.randn(sum(LENGTHS), 32, generator=generator)
    embedding: Tensor = model.get_input_embeddings().weight  # type: ignore[operator]

    def gradient(hidden: Tensor) -> Tensor:
        return torch.autograd.grad((hidden * weights).sum(), embedding)[0]

    alone = torch.cat([hidden_states(model, row)[0] for row in rows])
    packed = hidden_states(model, torch.cat(rows, 1), **packed_inputs(model, LENGTHS, embedding.device))[0]
    return alone, packed, gradient(alone), gradient(packed)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "sliding window"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_rows_are_exact(kind: str, checkpointing: bool) -> None:
    model: Any = build(kind)
    assert pack_attention(model)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    alone, packed, gradient, packed_gradient = alone_and_packed(model)
    assert relative(packed, alone) < 1e-6
    assert relative(packed_gradient, gradient) < 1e-6


def test_rows_would_leak_without_their_boundaries() -> None:
    model: Any = build("llama")
    pack_attention(model)
    rows = torch.arange(20).unsqueeze(0)
    apart = hidden_states(model, rows, **packed_inputs(model, (8, 12), rows.device))
    assert relative(apart[:, :8], hidden_states(model, rows)[:, :8]) < 1e-6
    assert relative(apart[:, 8:], hidden_states(model, rows)[:, 8:]) > 0.1


def test_no_mask_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dense block-diagonal mask would make attention quadratic in the packed length."""
    model: Any = build("llama")
    pack_attention(model)
    seen: list[tuple[int, Any]] = []
    real = attention.scaled_dot_product_attention

    def spy(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        seen.append((q.shape[2], options["attn_mask"]))
        return real(q, k, v, **options)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", spy)
    hidden_states(model, torch.zeros(1, 40, dtype=torch.int64), **packed_inputs(model, LENGTHS, torch.device("cpu")))
    assert seen == [(n, None) for n in LENGTHS] * 2


def test_generation_is_untouched() -> None:
    ours, plain = build("llama"), build("llama")
    pack_attention(ours)
    ids = torch.arange(12).view(2, 6)
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    assert torch.equal(ours(input_ids=ids).logits, plain(input_ids=ids).logits)
    assert torch.equal(
        ours(input_ids=ids, attention_mask=mask).logits, plain(input_ids=ids, attention_mask=mask).logits
    )


def test_hybrids_are_detected() -> None:
    from transformers import Lfm2Config, MambaConfig, Qwen3_5TextConfig, Qwen3NextConfig

    for config in (Qwen3_5TextConfig(), Qwen3NextConfig(), Lfm2Config(), MambaConfig()):
        assert leaks_across_rows(config), config.model_type
    for config in (LlamaConfig(), Qwen2Config(), Qwen3Config(), MistralConfig()):
        assert leaks_across_rows(config) is None


def test_a_hybrid_runs_unpacked_and_exactly() -> None:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        **SIZES, head_dim=8, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
        linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    )  # fmt: skip
    model: Any = Qwen3_5ForCausalLM(config).eval()
    assert not pack_attention(model)
    short, long = torch.arange(1, 7).unsqueeze(0), torch.arange(1, 11).unsqueeze(0)
    padded = torch.cat([torch.nn.functional.pad(short, (0, 4)), long])
    assert relative(hidden_states(model, padded)[:1, :6], hidden_states(model, short)) < 1e-5


def test_a_model_that_leaks_unannounced_is_found_by_trying(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = build("llama")

    class Smear(nn.Module):  # a token mixer that no config field names
        def forward(self, x: Tensor) -> Tensor:
            return x + x.roll(1, dims=1)

    model.model.layers[0].mlp = Smear()
    with caplog.at_level(logging.WARNING, logger="draco"):
        assert not pack_attention(model)
    assert "LlamaForCausalLM differs by" in caplog.text
    assert model.config._attn_implementation == "sdpa"


# --- rows, plans, tensors ---


def credit(policy: Policy, turns: list[list[str]]) -> Credit:
    """Member i (from 1) has the advantage i; its step j the advantage i · j."""
    group = Group(tasks(1)[0], typed(policy.chat, [[*t, DONE] for t in turns]))
    return credit_of(group, [float(i + 1) for i in range(len(turns))], slope=1.0, offset=1.0)


@pytest.fixture
def rows(policy: Policy) -> tuple[Row, ...]:
    made = credit(policy, [[], ["<code>a</code>"], ["<code>bcd</code>", "<code>e</code>"]])
    return tuple(rows_of(made, LossOptions()))


def test_both_layouts_hold_the_same_tokens(rows: tuple[Row, ...]) -> None:
    device = torch.device("cpu")
    packed, padded = collate(rows, device, packed=True), collate(rows, device)
    expected = [
        (t.token_ids[i], row.step_advantages[t.step_of[i]], t.logprobs[i], t.token_ids[i - 1])
        for row in rows
        for t in [row.trajectory]
        for i in range(row.length)
        if t.step_of[i] >= 0
    ]
    for batch in (packed, padded):
        before = batch.input_ids.flatten()[batch.predicts]
        columns = (batch.targets, batch.advantages, batch.engine_logprobs, before)
        assert list(zip(*(c.tolist() for c in columns), strict=True)) == expected
        assert batch.tokens == sum(r.length for r in rows)
    assert packed.lengths == tuple(r.length for r in rows)
    assert packed.input_ids.shape == (1, packed.tokens)
    assert padded.input_ids.shape == (3, max(r.length for r in rows))
    assert padded.lengths is None


class Fake:
    """Only as much of a row as a plan reads."""

    def __init__(self, length: int) -> None:
        self.length = length


def test_plans_hold_their_budget() -> None:
    rows: list[Any] = [Fake(n) for n in (50, 30, 100, 20, 99, 98, 70)]
    packed = [[r.length for r in b] for b in micro_batches(rows, 120, packed=True)]
    assert packed == [[50, 30], [100, 20], [99], [98], [70]]
    unpacked = [[r.length for r in b] for b in micro_batches(rows, 300)]
    assert unpacked == [[100, 99, 98], [70], [50], [30], [20]]
    assert [len(b) for b in micro_batches([Fake(64)] * 5, 200)] == [3, 2]  # type: ignore[list-item]
    assert [[r.length for r in b] for b in micro_batches([Fake(500)], 100)] == [[500]]  # type: ignore[list-item]
    for batch in micro_batches([Fake(n) for n in range(900, 1000)], 10**6):  # type: ignore[arg-type]
        computed = len(batch) * max(r.length for r in batch)
        assert computed - sum(r.length for r in batch) <= MAX_PADDING * computed


def test_rows_carry_the_weight_of_their_aggregation(policy: Policy) -> None:
    made = credit(policy, [[], ["<code>a</code>"]])
    tokens = [sum(t.step_tokens) for t in made.judgement.group.trajectories]
    assert [r.weight for r in rows_of(made, LossOptions())] == [1.0, 1.0]
    means = rows_of(made, LossOptions(aggregation="sequence_mean"))
    assert [r.weight for r in means] == [1 / n for n in tokens]
    constant = rows_of(made, LossOptions(aggregation="constant_length", constant_length=40))
    assert [r.weight for r in constant] == [1 / 40] * 2
    batch = collate(means, torch.device("cpu"), packed=True)
    assert batch.weights is not None
    assert batch.weights.sum().item() == pytest.approx(2.0)
