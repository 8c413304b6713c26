"""Checkpoints: complete or absent, no pickle, and they fit or are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from draco import checkpoint
from draco.errors import AdapterError, ConfigError
from draco.policy import Policy

TINY = "pkg://draco.policies.tiny"


def trained(policy: Policy) -> torch.optim.Optimizer:
    """One AdamW step on made-up gradients."""
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-3)
    generator = torch.Generator().manual_seed(3)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()
    policy.version = 1
    return optimizer


def test_adapter_and_optimizer_go_on_bit_for_bit(tmp_path: Path, new_policy: Callable[[], Policy]) -> None:
    first = new_policy()
    optimizer = trained(first)
    folder = checkpoint.save(tmp_path, 5, first, optimizer, {"stages": {"X": {"a": 1}}})
    second = new_policy()
    other = torch.optim.AdamW([p for p in second.parameters() if p.requires_grad], lr=1e-3)
    checkpoint.load(folder, second)
    checkpoint.load_optimizer(folder, second, other)
    assert second.version == 1
    assert checkpoint.read_state(folder)["stages"] == {"X": {"a": 1}}
    for policy, opt in ((first, optimizer), (second, other)):
        for p in policy.parameters():
            p.grad = torch.full_like(p, 0.1) if p.requires_grad else None
        opt.step()
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_nothing_is_pickled_and_no_base_weight_is_written(tmp_path: Path, new_policy: Callable[[], Policy]) -> None:
    policy = new_policy()
    folder = checkpoint.save(tmp_path, 1, policy, trained(policy), {})
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    assert names == [
        "adapter/adapter_config.json", "adapter/adapter_model.safetensors", "optimizer.safetensors", "state.json",
    ]  # fmt: skip
    lora = sum(p.numel() * p.element_size() for p in policy.parameters() if p.requires_grad)
    assert (folder / "adapter" / "adapter_model.safetensors").stat().st_size < lora * 1.2 + 20_000


def test_a_half_written_checkpoint_is_never_picked_up(tmp_path: Path, new_policy: Callable[[], Policy]) -> None:
    policy = new_policy()
    good = checkpoint.save(tmp_path, 1, policy, trained(policy), {})
    (tmp_path / "checkpoints" / "step=000002.tmp").mkdir()
    assert checkpoint.latest(tmp_path) == good
    with pytest.raises(ConfigError, match="no checkpoint to resume from"):
        checkpoint.latest(tmp_path / "empty")


def test_prune_keeps_the_last_and_the_epoch_ends(tmp_path: Path) -> None:
    for step in range(1, 9):
        checkpoint.folder_of(tmp_path, step).mkdir(parents=True)
    checkpoint.prune(tmp_path, 2, frozenset({3}))
    assert [f.name for f in checkpoint.checkpoints(tmp_path)] == ["step=000003", "step=000007", "step=000008"]


def test_a_wrong_adapter_is_refused_with_what_differs(tmp_path: Path, new_policy: Callable[[], Policy]) -> None:
    new_policy().save_adapter(tmp_path / "adapter")
    with pytest.raises(AdapterError, match=r"rank 16\) does not fit pkg://draco\.policies\.tiny.*\(16, "):
        Policy(TINY, rank=8, adapter=str(tmp_path / "adapter"))
    with pytest.raises(AdapterError, match="tensors differ"):
        Policy(TINY, targets=["q_proj"], adapter=str(tmp_path / "adapter"))
    with pytest.raises(AdapterError, match="not a PEFT adapter"):
        Policy(TINY, adapter=str(tmp_path))


def test_training_can_start_from_an_adapter(tmp_path: Path, new_policy: Callable[[], Policy]) -> None:
    saved = new_policy()
    saved.save_adapter(tmp_path / "adapter")
    again = Policy(TINY, adapter=str(tmp_path / "adapter"))
    for name, value in saved.adapter_state().items():
        assert torch.equal(again.adapter_state()[name], value)
    assert any(p.requires_grad for p in again.parameters())


@pytest.mark.parametrize("path", ["pkg://no.such.package", "/no/such/folder", "nobody/nothing"])
def test_a_missing_model_is_one_clear_line(path: str) -> None:
    with pytest.raises(ConfigError, match=r"policy\.path=") as caught:
        Policy(path)
    assert "\n" not in str(caught.value)
