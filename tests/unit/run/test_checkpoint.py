"""Checkpoints: complete or absent, no pickle, and they fit or are refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.module import make_module
from support.policies import TINY

from callbacks.checkpoint import Checkpoints
from draco.core.errors import AdapterError, ConfigError, TrainingStopped
from draco.policy.policy import Policy
from draco.run import checkpoint
from draco.run.checkpoint import checkpoints, rng_state


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
        "adapter/adapter_config.json", "adapter/adapter_model.safetensors", "optimizer.safetensors",
        "rng.safetensors", "state.json",
    ]  # fmt: skip
    lora = sum(p.numel() * p.element_size() for p in policy.parameters() if p.requires_grad)
    assert (folder / "adapter" / "adapter_model.safetensors").stat().st_size < lora * 1.2 + 20_000


def test_a_half_written_checkpoint_is_never_picked_up(tmp_path: Path, new_policy: Callable[[], Policy]) -> None:
    policy = new_policy()
    good = checkpoint.save(tmp_path, 1, policy, trained(policy), {})
    for name in ("step=000002.tmp", "step=000002.old.tmp", "step=000003.gone.tmp", "step=12"):
        (tmp_path / "checkpoints" / name).mkdir()
    assert checkpoint.checkpoints(tmp_path) == [good]
    with pytest.raises(ConfigError, match="has no checkpoint yet"):
        checkpoint.latest(tmp_path / "empty")


def test_prune_keeps_the_last_and_the_epoch_ends(tmp_path: Path) -> None:
    for step in range(1, 9):
        checkpoint.folder_of(tmp_path, step).mkdir(parents=True)
    checkpoint.prune(tmp_path, epoch=3, keep_last=2)
    assert [f.name for f in checkpoint.checkpoints(tmp_path)] == [f"step=00000{n}" for n in (3, 6, 7, 8)]


def test_prune_keeps_every_so_many(tmp_path: Path) -> None:
    for step in range(1, 10):
        checkpoint.folder_of(tmp_path, step).mkdir(parents=True)
    checkpoint.prune(tmp_path, epoch=5, keep_last=1, keep_every=4)
    left = [int(f.name[5:]) for f in checkpoint.checkpoints(tmp_path)]
    assert left == [4, 5, 8, 9] == checkpoint.kept(9, epoch=5, save_every=1, keep_last=1, keep_every=4)


def test_steps_of_seven_digits_are_in_order(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000):
        checkpoint.folder_of(tmp_path, step).mkdir(parents=True)
    assert checkpoint.latest(tmp_path) == checkpoint.folder_of(tmp_path, 1_000_000)


@pytest.mark.parametrize("name", ["state.json", "optimizer.safetensors", "rng.safetensors"])
@pytest.mark.parametrize("content", [None, b"", b"{nonsense"])
def test_a_missing_or_broken_file_is_one_line(
    tmp_path: Path, new_policy: Callable[[], Policy], name: str, content: bytes | None
) -> None:
    policy = new_policy()
    optimizer = trained(policy)
    folder = checkpoint.save(tmp_path, 1, policy, optimizer, {})
    (folder / name).unlink() if content is None else (folder / name).write_bytes(content)

    def load() -> None:
        checkpoint.read_state(folder)
        checkpoint.load_optimizer(folder, policy, optimizer)
        checkpoint.restore_rng(folder)

    with pytest.raises(ConfigError, match=f"damaged: {name}.*delete that folder") as caught:
        load()
    assert "\n" not in str(caught.value)


def test_an_optimizer_of_another_adapter_is_refused(tmp_path: Path, new_policy: Callable[[], Policy]) -> None:
    policy = new_policy()
    folder = checkpoint.save(tmp_path, 1, policy, trained(policy), {})
    other = Policy(TINY, rank=8)
    with pytest.raises(ConfigError, match=r"of another adapter: .*lora_A"):
        checkpoint.load_optimizer(folder, other, torch.optim.AdamW(other.parameters()))


def test_options_of_the_optimizer_come_back(tmp_path: Path, new_policy: Callable[[], Policy]) -> None:
    policy = new_policy()
    optimizer = trained(policy)
    optimizer.param_groups[0]["lr"] = 0.125
    folder = checkpoint.save(tmp_path, 1, policy, optimizer, {})
    fresh = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1.0)
    checkpoint.load_optimizer(folder, policy, fresh)
    assert fresh.param_groups[0]["lr"] == 0.125
    assert fresh.param_groups[0]["betas"] == (0.9, 0.999)


def test_every_random_stream_goes_on(tmp_path: Path, new_policy: Callable[[], Policy]) -> None:
    def draw() -> list[float]:
        return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()]

    policy = new_policy()
    random.gauss(0, 1), np.random.randn()  # each leaves its second value behind
    folder = checkpoint.save(tmp_path, 1, policy, trained(policy), {})
    expected = draw()
    draw()
    checkpoint.restore_rng(folder)
    assert draw() == expected


def test_the_size_is_what_is_written(tmp_path: Path, new_policy: Callable[[], Policy]) -> None:
    policy = new_policy()
    folder = checkpoint.save(tmp_path, 1, policy, trained(policy), {})
    written = sum(f.stat().st_size for f in folder.rglob("*.safetensors") if f.name != "rng.safetensors")
    assert checkpoint.size_of(policy) == pytest.approx(written, rel=0.1)


def test_a_27b_adapter_takes_what_the_docstring_says() -> None:
    assert round(116.7e6 * 12 / 1e9, 2) == 1.40
    assert len(checkpoint.kept(100, epoch=5, save_every=1, keep_last=3, keep_every=0)) == 22
    assert "1.40 GB" in str(checkpoint.__doc__)


def test_a_wrong_adapter_is_refused_with_what_differs(tmp_path: Path, new_policy: Callable[[], Policy]) -> None:
    new_policy().save_adapter(tmp_path / "adapter")
    with pytest.raises(AdapterError, match=r"rank 16\) does not fit pkg://draco\.policy\.tiny.*\(16, "):
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


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_rank_that_saves_says_so(
    rank: int,
    tmp_path: Path,
    new_policy: Callable[[], Policy],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("callbacks.checkpoint.rank", lambda: rank)
    module = make_module(new_policy)
    module.policy, module.batches_done = new_policy(), 3
    trainer: Any = SimpleNamespace(
        optimizers=[module.configure_optimizers()], train_dataloader=SimpleNamespace(steps_per_epoch=9, steps=9)
    )
    saving = Checkpoints(str(tmp_path))
    saving._copied = (3, {"world_size": 1, "stages": {}}, rng_state(), [])
    saving.on_exception(trainer, module, TrainingStopped("a guard"))
    assert ("saved" in caplog.text) is bool(checkpoints(tmp_path)) is (rank == 0)
