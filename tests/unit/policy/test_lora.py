"""The short LoRA forward pass against PEFT's own: values, gradients, and everything that must fall back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn

from draco.policy import lora
from draco.policy.lora import fuse_lora


class Net(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 10, bias=bias), nn.Linear(10, 4, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.two(torch.tanh(self.one(x)))
        return result


def build(bias: bool = True, **options: Any) -> Any:
    torch.manual_seed(0)
    net = Net(bias)
    net.requires_grad_(False)
    model = get_peft_model(net, LoraConfig(r=3, lora_alpha=12, target_modules=["one", "two"], **options))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator)
    return model


def outcome(model: Any, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = model(x)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *parameters])]


X = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_are_those_of_peft(bias: bool) -> None:
    ours = build(bias)
    assert fuse_lora(ours) == 2
    results = outcome(ours, X)
    for a, b in zip(results, outcome(build(bias), X), strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-6
    with torch.no_grad():
        assert torch.equal(ours(X), results[0])


def test_gradcheck_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, a, b = random(2, 3, 5).requires_grad_(), random(2, 5).requires_grad_(), random(4, 2).requires_grad_()
    w, bias = random(4, 5), random(4)
    assert torch.autograd.gradcheck(lambda x, a, b: lora._LoraLinear.apply(x, w, bias, a, b, 1.7), (x, a, b))


def test_the_adapter_switch_still_works() -> None:
    ours, plain = build(), build()
    fuse_lora(ours)
    with ours.disable_adapter(), plain.disable_adapter():
        assert torch.equal(ours(X), plain(X))
    ours.add_adapter("other", LoraConfig(r=2, target_modules=["one", "two"]))
    ours.set_adapter("other")
    assert {n.split(".")[-2] for n, p in ours.named_parameters() if p.requires_grad} == {"other"}
    with plain.disable_adapter():
        assert torch.allclose(ours(X), plain(X))  # a new adapter is the identity
    ours.set_adapter("default")
    assert torch.allclose(ours(X), plain(X), atol=1e-6)


@pytest.mark.parametrize("case", ["dropout", "dora", "bf16", "merged"])
def test_what_is_not_plain_falls_back_to_peft(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"dropout": {"lora_dropout": 0.5}, "dora": {"use_dora": True}}.get(case, {})
    ours, plain = build(**options), build(**options)
    fuse_lora(ours)
    x = X
    for model in (ours, plain):
        if case == "bf16":
            for name, parameter in model.named_parameters():
                if "lora_" not in name:
                    parameter.data = parameter.data.bfloat16()
            x = X.bfloat16()
        if case == "merged":
            model.merge_adapter()
    called: list[int] = []
    real = Linear.forward

    def spy(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        called.append(1)
        return real(self, *args, **kwargs)

    torch.manual_seed(3)
    expected = plain(x)
    monkeypatch.setattr(Linear, "forward", spy)
    torch.manual_seed(3)
    assert torch.equal(ours(x), expected)
    assert len(called) == 2


def test_only_plain_layers_are_touched() -> None:
    model = get_peft_model(nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 2)), LoraConfig(target_modules=["0", "1"]))  # type: ignore[arg-type]
    assert fuse_lora(model) == 1
