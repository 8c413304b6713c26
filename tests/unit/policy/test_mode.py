"""Training mode: the frozen base model computes what it computes when it is served; only the adapter may be random."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.families import save
from support.policies import TINY, perturb
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from draco.policy.policy import Policy
from draco.policy.structure import evaluating, hidden_states

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")


def twice(policy: Policy) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states in training mode, two passes, and in eval mode."""
    ids = torch.arange(1, 30).unsqueeze(0)
    policy.train()
    with torch.no_grad():
        first, second = (hidden_states(policy.model, ids) for _ in range(2))
        with policy.sampling():
            return first, second, hidden_states(policy.model, ids)


@pytest.mark.parametrize("family", ["gpt2", "opt", "gpt_bigcode", "seed_oss", "phimoe", "mixtral", "granitemoe"])
def test_the_base_model_is_not_random(family: str, tmp_path: Path) -> None:
    noise = {
        "gpt2": {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2},
        "opt": {"dropout": 0.2, "layerdrop": 0.5, "attention_dropout": 0.2},
        "gpt_bigcode": {"resid_pdrop": 0.2, "attn_pdrop": 0.2},
        "phimoe": {"router_jitter_noise": 0.2, "input_jitter_noise": 0.2, "attention_dropout": 0.2},
        "mixtral": {"router_jitter_noise": 0.2, "attention_dropout": 0.2},
    }.get(family, {"attention_dropout": 0.2})
    policy = Policy(str(save(tmp_path / "m", family, **noise)), gradient_checkpointing=True)
    perturb(policy)
    first, second, served = twice(policy)
    assert torch.equal(first, second)
    assert torch.allclose(first, served, atol=1e-6)


def test_the_adapter_keeps_its_dropout() -> None:
    policy = Policy(TINY, dropout=0.5)
    perturb(policy)
    first, second, served = twice(policy)
    assert not torch.equal(first, second)
    assert torch.equal(served, twice(policy)[2])


def test_checkpointing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(TINY, gradient_checkpointing=True)
    policy.train()
    blocks = [m for m in policy.modules() if isinstance(m, GradientCheckpointingLayer)]
    assert blocks
    assert all(block.training and block.gradient_checkpointing for block in blocks)


def test_a_policy_inside_a_module_trains_the_same_way() -> None:
    """Lightning calls `train` of what holds the policy."""
    outer = nn.ModuleList([Policy(TINY)])
    outer.train()
    assert not any(m.training for n, m in outer.named_modules() if n.endswith(("self_attn", "mlp", "norm")))
    assert outer[0].model.training


def test_every_layer_gets_its_mode_back() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1), nn.Sequential(nn.Dropout(0.1)))
    model[1].eval()
    before = [m.training for m in model.modules()]
    with evaluating(model):
        assert not any(m.training for m in model.modules())
    assert [m.training for m in model.modules()] == before
