"""Every option of the loss and the update against a brute force of full logits, one trajectory at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.factory import credits_of, with_step_advantages
from support.models import relative
from support.module import gradients, prepared
from support.policies import TINY
from torch import Tensor

from draco.core.errors import AdapterError, ConfigError
from draco.core.types import Credit
from draco.module import GRPOModule, StepRecord
from draco.policy.policy import Policy
from draco.update.options import LossOptions, UpdateOptions


def token_logprobs(policy: Policy, ids: Sequence[int], step_of: Sequence[int]) -> Tensor:
    logits = policy.model(input_ids=torch.tensor([ids])).logits[0]
    steps = [i for i, j in enumerate(step_of) if j >= 0]
    return torch.stack([logits[i - 1].log_softmax(-1)[ids[i]] for i in steps])


def brute_force(
    policy: Policy, credits: list[Credit], loss: LossOptions, old: dict[int, Tensor] | None = None
) -> Tensor:
    """Gradient of the loss as its docstring says it; `old` holds old log-probs by id of the trajectory."""
    total, tokens, count = torch.zeros(()), 0, 0
    for credit in credits:
        for t, advantages in zip(credit.judgement.group.trajectories, credit.step_advantages, strict=True):
            now = token_logprobs(policy, t.token_ids, t.step_of)
            with torch.no_grad(), policy.reference():
                reference = token_logprobs(policy, t.token_ids, t.step_of)
            before = now.detach() if old is None else old[id(t)]
            a = torch.tensor([advantages[j] for j in t.step_of if j >= 0])
            engine = torch.tensor([x for x, j in zip(t.logprobs, t.step_of, strict=True) if j >= 0])
            ratio = (now - before).exp()
            clipped = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
            surrogate = -torch.minimum(ratio * a, clipped * a)
            if loss.dual_clip:
                surrogate = torch.where(a < 0, torch.minimum(surrogate, -loss.dual_clip * a), surrogate)
            if loss.tis_cap:
                surrogate = surrogate * (before - engine).exp().clamp(max=loss.tis_cap)
            d = reference - now
            each = surrogate + loss.kl_coef * (d.exp() - d - 1)
            total = total + (each.mean() if loss.aggregation == "sequence_mean" else each.sum())
            tokens, count = tokens + len(each), count + 1
    parameters = [p for p in policy.parameters() if p.requires_grad]
    denominator = {"token_mean": tokens, "sequence_mean": count}.get(
        loss.aggregation, count * (loss.constant_length or 0)
    )
    return torch.cat([g.flatten() / denominator for g in torch.autograd.grad(total, parameters)])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kl_coef": 0.0},
        {"aggregation": "sequence_mean"},
        {"aggregation": "constant_length", "constant_length": 37},
        {"tis_cap": 0.01},
        {"tis_cap": 2.0, "aggregation": "sequence_mean", "kl_coef": 0.5},
    ],
)
def test_the_gradient_is_that_of_the_formula(new_policy: Callable[[], Policy], options: dict[str, Any]) -> None:
    loss = LossOptions(**options)
    module = prepared(new_policy, loss=loss)
    assert module.packed
    credits = credits_of(module.policy)
    expected = brute_force(module.policy, credits, loss)
    assert relative(gradients(module, credits), expected) < 1e-5
    if options:  # the option changes something
        assert relative(brute_force(module.policy, credits, LossOptions()), expected) > 1e-3


def test_packed_and_unpacked_gradients_agree(new_policy: Callable[[], Policy]) -> None:
    packed = prepared(new_policy)
    credits = credits_of(packed.policy)
    expected = gradients(packed, credits)
    single = prepared(new_policy, update=UpdateOptions(packing="off"))
    assert (packed.packed, single.packed) == (True, False)
    assert relative(gradients(single, credits), expected) < 1e-6
    assert packed.record is not None
    assert packed.record.metrics["update/padding_share"] == 0.0


def test_without_kl_the_reference_never_runs(new_policy: Callable[[], Policy], monkeypatch: pytest.MonkeyPatch) -> None:
    module = prepared(new_policy, loss=LossOptions(kl_coef=0.0))
    credits = credits_of(module.policy)
    monkeypatch.setattr(Policy, "reference", lambda self: pytest.fail("the reference ran"))
    gradients(module, credits)


def test_gradient_checkpointing_changes_no_gradient(new_policy: Callable[[], Policy]) -> None:
    module = prepared(new_policy)
    credits = credits_of(module.policy)
    expected = gradients(module, credits)

    def checkpointed() -> Policy:
        built = new_policy()
        built.model.get_base_model().gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
        return built

    assert relative(gradients(prepared(checkpointed), credits), expected) < 1e-6


# --- several updates a batch ---


def trained(new_policy: Callable[[], Policy], credits: list[Credit], lr: float, **update: Any) -> GRPOModule:
    """One whole `update` with plain SGD and no clipping of the norm."""
    module = prepared(new_policy, update=UpdateOptions(grad_clip=1e9, **update))
    optimizer = torch.optim.SGD(module.trainable(), lr=lr)
    module.optimizers = lambda: optimizer  # type: ignore[method-assign,assignment]
    module.record = StepRecord(0)
    module.update(credits)
    return module


def test_later_shares_use_the_log_probs_from_before_the_first_step(new_policy: Callable[[], Policy]) -> None:
    lr, loss = 2.0, LossOptions()
    policy = new_policy()
    credits = credits_of(policy)
    with torch.no_grad():
        old = {
            id(t): token_logprobs(policy, t.token_ids, t.step_of)
            for c in credits
            for t in c.judgement.group.trajectories
        }
    parameters = [p for p in policy.parameters() if p.requires_grad]
    for share in ([credits[0], credits[2]], [credits[1]]):  # groups are dealt out in turn
        gradient = brute_force(policy, share, loss, old)
        for p, g in zip(parameters, gradient.split([p.numel() for p in parameters]), strict=True):
            p.data -= lr * g.view_as(p)
    module = trained(new_policy, credits[::-1], lr, updates_per_batch=2)
    weights = torch.cat([p.detach().flatten() for p in module.trainable()])
    assert relative(weights, torch.cat([p.detach().flatten() for p in parameters])) < 1e-5
    assert (module.batches_done, module.policy.version) == (1, 2)
    assert module.record is not None
    assert module.record.metrics["update/clip_share"] > 0
    assert module.record.metrics["update/ratio_max"] > 1.2
    once = trained(new_policy, credits, lr)
    assert once.record is not None
    assert once.record.metrics["update/clip_share"] == 0
    assert (once.batches_done, once.policy.version) == (1, 1)


def test_a_share_without_groups_makes_no_step(new_policy: Callable[[], Policy]) -> None:
    module = trained(new_policy, credits_of(new_policy(), groups=1), 0.1, updates_per_batch=3)
    assert (module.batches_done, module.policy.version) == (1, 1)


def test_the_learning_rate_falls_linearly_over_decay_steps(new_policy: Callable[[], Policy]) -> None:
    assert [UpdateOptions(decay_steps=4).lr_factor(k) for k in range(6)] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert [UpdateOptions().lr_factor(k) for k in (0, 10**6)] == [1.0, 1.0]
    credits = credits_of(new_policy())
    module = prepared(new_policy, update=UpdateOptions(decay_steps=4))
    optimizer = torch.optim.SGD(module.trainable(), lr=0.8)
    module.optimizers = lambda: optimizer  # type: ignore[method-assign,assignment]
    rates = []
    for done in (0, 1, 3):
        module.batches_done, module.record = done, StepRecord(done)
        module.update(credits)
        rates.append((module.record.metrics["update/lr"], optimizer.param_groups[0]["lr"]))
    assert rates == [(pytest.approx(r), pytest.approx(r)) for r in (0.8, 0.6, 0.2)]


def test_nan_shows_in_the_norm_whichever_share_it_is_in(new_policy: Callable[[], Policy]) -> None:
    credits = credits_of(new_policy(), groups=2)
    poisoned = with_step_advantages(credits[0], math.nan)
    module = trained(new_policy, [poisoned, credits[1]], 0.1, updates_per_batch=2)
    assert module.record is not None
    assert math.isnan(module.record.metrics["update/grad_norm"])
    assert (module.batches_done, module.policy.version) == (1, 1)


# --- precision and adapters ---


def test_bf16_weights_keep_adapter_and_optimizer_in_float32(new_policy: Callable[[], Policy]) -> None:
    def half() -> Policy:
        built = Policy(TINY, dtype="bfloat16")
        built.load_state_dict({k: v for k, v in new_policy().state_dict().items() if "lora_" in k}, strict=False)
        return built

    full = prepared(new_policy)
    credits = credits_of(full.policy)
    expected = gradients(full, credits)
    module = prepared(half)
    assert module.packed
    assert {p.dtype for p in module.trainable()} == {torch.float32}
    assert {p.dtype for p in module.policy.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert relative(gradients(module, credits), expected) < 0.1  # bf16 has 8 bits
    optimizer = torch.optim.AdamW(module.trainable())
    optimizer.step()
    states = [s for state in optimizer.state.values() for s in state.values()]
    assert {s.dtype for s in states} == {torch.float32}


def test_the_reference_is_what_the_config_says(new_policy: Callable[[], Policy], tmp_path: Path) -> None:
    start = new_policy()
    start.save_adapter(tmp_path / "start")
    credits = credits_of(start)

    def going_on(reference: Any) -> Callable[[], Policy]:
        return lambda: Policy(TINY, adapter=str(tmp_path / "start"), reference=reference)

    base, frozen = (prepared(going_on(kind), loss=LossOptions(kl_coef=5.0)) for kind in ("base", "adapter"))
    for module, names in ((base, {"default"}), (frozen, {"default"})):
        trained_names = {n.split(".")[-2] for n, p in module.policy.named_parameters() if p.requires_grad}
        assert trained_names == names
        expected = brute_force(module.policy, credits, LossOptions(kl_coef=5.0))
        assert relative(gradients(module, credits), expected) < 1e-5
        assert {n.split(".")[-2] for n, p in module.policy.named_parameters() if p.requires_grad} == names
    assert base.record is not None
    assert frozen.record is not None
    assert base.record.metrics["update/kl"] > 1e-3
    assert frozen.record.metrics["update/kl"] == pytest.approx(0.0, abs=1e-9)  # nothing has moved yet

    for p in frozen.trainable():
        p.data += 0.01
    gradients(frozen, credits)
    assert frozen.record.metrics["update/kl"] > 1e-3  # the reference stayed where it was
    frozen.policy.save_adapter(tmp_path / "saved")
    assert sorted(f.name for f in (tmp_path / "saved").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors"
    ]  # fmt: skip
    again = Policy(TINY, adapter=str(tmp_path / "saved"))
    assert all(torch.equal(v, again.adapter_state()[k]) for k, v in frozen.policy.adapter_state().items())


def test_an_adapter_of_another_scale_or_a_broken_one_is_refused(
    new_policy: Callable[[], Policy], tmp_path: Path
) -> None:
    saved = tmp_path / "adapter"
    new_policy().save_adapter(saved)
    with pytest.raises(AdapterError, match=r"has lora_alpha=32, this policy 640 \(policy\.alpha\)"):
        Policy(TINY, adapter=str(saved), alpha=640)
    weights = saved / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(AdapterError, match="cannot be read"):
        Policy(TINY, adapter=str(saved))


def test_an_adapter_of_another_base_is_warned_about(
    new_policy: Callable[[], Policy], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = tmp_path / "adapter"
    new_policy().save_adapter(saved)
    Policy(TINY, adapter=str(saved))
    assert "are they the same model" not in caplog.text
    config = saved / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "some/other-model"}))
    Policy(TINY, adapter=str(saved))
    assert "was trained on some/other-model" in caplog.text


def test_bad_options_are_named(tmp_path: Path) -> None:
    for options, message in (
        ({"aggregation": "mean"}, "loss.aggregation is 'mean'; expected token_mean, sequence_mean or constant_length"),
        ({"aggregation": "constant_length"}, "loss.constant_length is null; expected an integer ≥ 1"),
        ({"tis_cap": 0.0}, "loss.tis_cap is 0.0"),
        ({"clip_low": 1.0}, "loss.clip_low is 1.0; expected a number ≥ 0 and < 1"),
        ({"kl_coef": -1.0}, "loss.kl_coef is -1.0; expected a number ≥ 0"),
        ({"kl_coef": "abc"}, "loss.kl_coef is 'abc'"),
        ({"clip_low": 1.5}, "loss.clip_low is 1.5; expected a number ≥ 0 and < 1"),
        ({"dual_clip": 1.0}, "loss.dual_clip is 1.0; expected a number > 1, or null"),
        ({"dual_clip": 0.5}, "loss.dual_clip is 0.5; expected a number > 1, or null"),
    ):
        with pytest.raises(ConfigError, match=message):
            LossOptions(**options)  # type: ignore[arg-type]
    for options, message in (
        ({"updates_per_batch": 2, "order": "arrival"}, "needs update.order=batch"),
        ({"updates_per_batch": 0}, "update.updates_per_batch is 0; expected an integer ≥ 1"),
        ({"grad_clip": -1}, "update.grad_clip is -1; expected a number > 0"),
        ({"packing": "on"}, "update.packing is 'on'; expected auto or off"),
    ):
        with pytest.raises(ConfigError, match=message):
            UpdateOptions(**options)  # type: ignore[arg-type]
    for options, message in (
        ({"dtype": "float99"}, "policy.dtype is 'float99'; expected float32, bfloat16 or float16"),
        ({"dtype": "int8"}, "policy.dtype is 'int8'"),
        ({"rank": 0}, "policy.rank is 0; expected an integer ≥ 1"),
        ({"dropout": 1.0}, "policy.dropout is 1.0; expected a number ≥ 0 and < 1"),
        ({"targets": "nope"}, r"policy.targets is 'nope', which fits no layer of .*names among .*q_proj"),
    ):
        with pytest.raises(ConfigError, match=message):
            Policy(TINY, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"policy\.reference is 'adaptor'"):
        Policy(TINY, reference="adaptor")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"needs policy\.adapter"):
        Policy(TINY, reference="adapter")
