"""`all-linear`: which layers get an adapter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.families import save
from support.policies import perturb

from draco.policy.policy import Policy

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")


def adapted(policy: Policy) -> set[str]:
    """Names of layers with an adapter."""
    return {
        n.partition(".lora_A")[0].removeprefix("base_model.model.") for n in policy.adapter_state() if "lora_A" in n
    }


def test_towers_are_left_out(tmp_path: Path) -> None:
    names = adapted(Policy(str(save(tmp_path / "m", "gemma3 multimodal"))))
    assert any("language_model" in name for name in names)
    assert not any("vision" in name or "projector" in name for name in names)


@pytest.mark.parametrize("family", ["phimoe", "llama4"])
def test_routers_are_left_out(family: str, tmp_path: Path) -> None:
    """Their class derives from a linear layer, but they return a tuple."""
    policy = Policy(str(save(tmp_path / "m", family)))
    assert not any(name.endswith("router") for name in adapted(policy))
    with torch.no_grad():
        assert policy.model(input_ids=torch.arange(1, 9).unsqueeze(0)).logits.isfinite().all()


def test_what_peft_cannot_adapt_is_left_out(tmp_path: Path) -> None:
    names = {name.rsplit(".", 1)[-1] for name in adapted(Policy(str(save(tmp_path / "m", "falcon_h1"))))}
    assert "in_proj" in names
    assert "out_proj" not in names


def test_an_adapter_with_exceptions_comes_back(tmp_path: Path) -> None:
    folder = str(save(tmp_path / "m", "llama4"))
    policy = Policy(folder)
    perturb(policy)
    policy.save_adapter(tmp_path / "adapter")
    again = Policy(folder, adapter=str(tmp_path / "adapter"), reference="adapter")
    assert again.adapter_state().keys() == policy.adapter_state().keys()
    assert all(torch.equal(again.adapter_state()[n], p) for n, p in policy.adapter_state().items())
