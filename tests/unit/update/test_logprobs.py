"""Chunked log-probabilities against plain log_softmax: values, gradients, memory, and the models that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from draco.core.errors import ConfigError
from draco.policy.structure import check_head, hidden_states, output_head
from draco.update.logprobs import step_logprobs

ROWS, WIDTH, VOCAB = 23, 16, 101


def example(dtype: torch.dtype = torch.float32, bias: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(VOCAB, (ROWS,), generator=generator)
    return hidden, weight, targets, torch.randn(VOCAB, generator=generator).to(dtype) if bias else None


def plain(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor]:
    """log_softmax over full float64 logits."""
    logits = hidden.double() @ weight.double().T
    logits = (logits if bias is None else logits + bias.double()) / temperature
    logs = logits.log_softmax(-1)
    return logs.gather(1, targets.unsqueeze(1)).squeeze(1), -(logs.exp() * logs).sum(-1)


def relative(ours: Tensor, reference: Tensor) -> float:
    """Largest difference over the largest magnitude."""
    return float((ours.detach().double() - reference.detach().double()).abs().max() / reference.detach().abs().max())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("token_chunk", "vocab_chunk"), [(1024, 4096), (7, 4096), (1024, 30), (5, 13), (1, 1)])
def test_values_and_gradients_match_log_softmax(
    token_chunk: int, vocab_chunk: int, temperature: float, bias: bool
) -> None:
    hidden, weight, targets, b = example(bias=bias)
    upstream = torch.linspace(-1, 1, ROWS)
    chunks = {"token_chunk": token_chunk, "vocab_chunk": vocab_chunk}
    logprobs, entropy = step_logprobs(hidden, weight, targets, temperature=temperature, bias=b, **chunks)
    reference, reference_entropy = plain(hidden, weight, targets, b, temperature)
    (gradient,) = torch.autograd.grad(logprobs @ upstream, hidden)
    (reference_gradient,) = torch.autograd.grad(reference @ upstream.double(), hidden)
    assert logprobs.dtype == torch.float32
    assert not entropy.requires_grad
    assert relative(logprobs, reference) < 1e-6
    assert relative(entropy, reference_entropy) < 1e-5  # a difference of two numbers of about 10
    assert relative(gradient, reference_gradient) < 1e-6
    with torch.no_grad():
        quick, quick_entropy = step_logprobs(hidden, weight, targets, temperature=temperature, bias=b, **chunks)
        bare, none = step_logprobs(
            hidden, weight, targets, temperature=temperature, bias=b, with_entropy=False, **chunks
        )
    assert torch.equal(quick, logprobs)  # the reference pass and the policy pass agree to the bit
    assert torch.equal(bare, logprobs)
    assert relative(quick_entropy, reference_entropy) < 1e-5  # a difference of two numbers of about 10
    assert not none.any()


def test_gradcheck_in_float64() -> None:
    hidden, weight, targets, bias = example(torch.float64, bias=True)

    def function(h: Tensor) -> Tensor:
        return step_logprobs(h, weight, targets, temperature=0.8, token_chunk=5, vocab_chunk=17, bias=bias)[0]

    assert torch.autograd.gradcheck(function, (hidden,))


def test_sixteen_bit_input_accumulates_in_float32() -> None:
    hidden, weight, targets, _ = example(torch.bfloat16)
    logprobs, _ = step_logprobs(hidden, weight, targets, token_chunk=5, vocab_chunk=17)
    reference, _ = plain(hidden, weight, targets, None, 1.0)
    (gradient,) = torch.autograd.grad(logprobs.sum(), hidden)
    (reference_gradient,) = torch.autograd.grad(reference.sum(), hidden)
    assert logprobs.dtype == torch.float32
    assert relative(logprobs, reference) < 1e-6  # the logits of a bf16 product would be off by 4e-3
    assert gradient.dtype == torch.bfloat16
    assert relative(gradient, reference_gradient) < 2**-7


def test_autocast_does_not_round_the_head() -> None:
    hidden, weight, targets, _ = example()
    reference, _ = plain(hidden, weight, targets, None, 1.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs, _ = step_logprobs(hidden, weight, targets)
    assert relative(logprobs, reference) < 1e-6


def test_huge_logits_stay_finite() -> None:
    hidden, weight, targets, _ = example()
    logprobs, entropy = step_logprobs(hidden * 1e4, weight, targets, vocab_chunk=13)
    assert bool(torch.isfinite(logprobs).all())
    assert bool((logprobs <= 0).all())
    assert bool(torch.isfinite(entropy).all())


@pytest.mark.parametrize("factor", [1.0, 400.0])
@pytest.mark.parametrize("late", [0, 3, 60, 100])
def test_logits_that_outgrow_the_unshifted_powers(late: int, factor: float) -> None:
    """From word `late` on the head is `factor` times as large: powers without a shift would be infinite."""
    hidden, weight, targets, _ = example()
    weight = 0.3 * weight  # small at first
    weight[late:] *= factor
    logprobs, entropy = step_logprobs(hidden, weight, targets, token_chunk=9, vocab_chunk=13)
    reference, reference_entropy = plain(hidden, weight, targets, None, 1.0)
    (gradient,) = torch.autograd.grad(logprobs.sum(), hidden)
    (reference_gradient,) = torch.autograd.grad(reference.sum(), hidden)
    assert relative(logprobs, reference) < 1e-6
    assert relative(gradient, reference_gradient) < (2e-6 if factor == 1 else 3e-5)  # logits of 480 end at 3e-5
    assert float((entropy - reference_entropy.detach()).abs().max()) < 1e-4 * factor**0.5
    with torch.no_grad():
        quick, quick_entropy = step_logprobs(hidden, weight, targets, token_chunk=9, vocab_chunk=13)
    assert torch.equal(quick, logprobs)
    assert float((quick_entropy - reference_entropy.detach()).abs().max()) < 1e-4 * factor**0.5


def test_logits_far_below_zero_keep_their_precision() -> None:
    """Powers of 2 ** −300 would all be 0."""
    hidden, weight, targets, _ = example()
    bias = torch.full((VOCAB,), -300.0)
    logprobs, _ = step_logprobs(hidden, weight, targets, bias=bias, vocab_chunk=13)
    reference, _ = plain(hidden, weight, targets, bias, 1.0)
    assert float((logprobs.double() - reference).detach().abs().max()) < 1e-4  # float32 logits of −300 end at 3e-5


def test_no_rows() -> None:
    hidden, weight, targets, _ = example()
    logprobs, entropy = step_logprobs(hidden[:0], weight, targets[:0])
    assert logprobs.shape == entropy.shape == (0,)
    (gradient,) = torch.autograd.grad(logprobs.sum(), hidden)
    assert not gradient.any()


class LargestAllocation(TorchDispatchMode):
    """Numel of the largest new tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in known:
                self.numel = max(self.numel, t.numel())
        return result


@pytest.mark.parametrize("gradient", [True, False])
def test_no_tensor_is_larger_than_a_chunk(gradient: bool) -> None:
    rows, width, vocab, token_chunk, vocab_chunk = 64, 4, 1000, 16, 50
    hidden = torch.randn(rows, width, requires_grad=gradient)
    weight, targets = torch.randn(vocab, width), torch.randint(vocab, (rows,))
    with LargestAllocation() as ours:
        logprobs, _ = step_logprobs(hidden, weight, targets, token_chunk=token_chunk, vocab_chunk=vocab_chunk)
        if gradient:
            logprobs.sum().backward()
    with LargestAllocation() as full:
        (hidden @ weight.T).log_softmax(-1)
    assert full.numel == rows * vocab  # the counter sees what it should
    assert ours.numel == token_chunk * vocab_chunk


def test_bad_input_is_refused() -> None:
    hidden, weight, targets, _ = example()
    with pytest.raises(ConfigError, match=r"head must be frozen.*lm_head"):
        step_logprobs(hidden, weight.clone().requires_grad_(), targets)
    with pytest.raises(ConfigError, match="head must be frozen"):
        step_logprobs(hidden, weight, targets, bias=torch.zeros(VOCAB, requires_grad=True))
    with pytest.raises(ValueError, match=r"\[N, H\] and \[V, H\]"):
        step_logprobs(hidden, weight[:, 1:], targets)
    with pytest.raises(ValueError, match=r"targets as int64 \[23\]"):
        step_logprobs(hidden, weight, targets[1:])
    with pytest.raises(ValueError, match=r"targets in 0\.\.100"):
        step_logprobs(hidden, weight, targets + VOCAB)
    with pytest.raises(ValueError, match=r"bias as \[101\]"):
        step_logprobs(hidden, weight, targets, bias=torch.zeros(3))
    with pytest.raises(ValueError, match="temperature > 0"):
        step_logprobs(hidden, weight, targets, temperature=0.0)
    with pytest.raises(ValueError, match="chunks of at least 1"):
        step_logprobs(hidden, weight, targets, token_chunk=0)


# --- models -----------------------------------------------------------------------------------------------------------


def llama(tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def adapted(model: Any, targets: list[str], **options: Any) -> Any:
    """The model with a LoRA adapter that is not the identity."""
    torch.manual_seed(1)
    config = LoraConfig(r=2, lora_alpha=4, target_modules=targets, task_type="CAUSAL_LM", **options)
    wrapped = get_peft_model(model, config)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return wrapped


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("lora", [False, True])
def test_a_model_gives_the_log_probs_of_its_own_logits(tied: bool, lora: bool) -> None:
    model: Any = llama(tied)
    model = adapted(model, ["q_proj", "down_proj"]) if lora else model.requires_grad_(False)
    ids = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(2))
    reference = model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).flatten()
    weight, bias = output_head(model)
    hidden = hidden_states(model, ids)[:, :-1].flatten(0, 1)
    logprobs, _ = step_logprobs(hidden, weight, ids[:, 1:].flatten(), bias=bias, token_chunk=4, vocab_chunk=30)
    assert relative(logprobs, reference) < 1e-6
    if not lora:
        return
    parameters = [p for p in model.parameters() if p.requires_grad]
    ours = torch.autograd.grad(logprobs.sum(), parameters)
    theirs = torch.autograd.grad(reference.sum(), parameters)
    scale = max(float(t.abs().max()) for t in theirs)
    assert all(float((a - b).abs().max()) < 1e-6 * scale for a, b in zip(ours, theirs, strict=True))
    with model.disable_adapter(), torch.no_grad():
        off, _ = step_logprobs(hidden_states(model, ids)[:, :-1].flatten(0, 1), weight, ids[:, 1:].flatten())
    assert not torch.allclose(off, logprobs)  # the adapter switch reaches the hidden states


def test_positions_and_padding_reach_the_model() -> None:
    model = llama().requires_grad_(False)
    ids = torch.randint(VOCAB, (1, 10), generator=torch.Generator().manual_seed(3))
    alone = hidden_states(model, ids[:, 4:])
    packed = hidden_states(model, ids, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]]))
    assert torch.allclose(packed[:, 4:], alone, atol=1e-6)
    mask = torch.tensor([[0] * 4 + [1] * 6])
    positions = torch.tensor([[0] * 4 + list(range(6))])
    padded = hidden_states(model, ids, positions, mask)
    assert torch.allclose(padded[:, 4:], alone, atol=1e-6)


def test_an_adapter_on_the_head_is_refused() -> None:
    ids = torch.zeros((1, 3), dtype=torch.int64)
    with pytest.raises(ConfigError, match=r"carries an adapter.*policy\.targets"):
        hidden_states(adapted(llama(), ["q_proj", "lm_head"]), ids)
    with pytest.raises(ConfigError, match=r"carries an adapter.*modules_to_save"):
        hidden_states(adapted(llama(), ["q_proj"], modules_to_save=["lm_head"]), ids)


def test_a_model_that_transforms_its_logits_is_refused() -> None:
    config = Gemma2Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
    )
    with pytest.raises(ConfigError, match=r"final_logit_softcapping=30\.0"):
        output_head(Gemma2ForCausalLM(config))


def test_check_head_finds_what_the_config_does_not_tell() -> None:
    model = llama()
    model.train()
    check_head(model)
    assert model.training
    model.register_forward_hook(lambda module, args, output: setattr(output, "logits", output.logits * 3))
    with pytest.raises(ConfigError, match="changes its logits"):
        check_head(model)


def test_something_else_than_a_language_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="causal language model of transformers"):
        output_head(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="no output head"):
        output_head(llama().model)
