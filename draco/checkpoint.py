"""Checkpoints without pickle: adapter in PEFT format, optimizer as safetensors, everything else as JSON.

    checkpoints/step=000012/
        adapter/adapter_model.safetensors, adapter_config.json
        optimizer.safetensors       "PARAMETER/STATE" → tensor
        state.json                  counters, states of loader and stages

A folder is written under a temporary name and renamed, so a half-written checkpoint is never picked up. The base
weights are never gathered or written. Random streams are keyed by (seed, step, task, sample) and need no state.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draco.errors import ConfigError
from draco.policy import Policy

__all__ = ["latest", "load", "load_optimizer", "prune", "read_state", "save"]


def folder_of(run: Path, step: int) -> Path:
    """Folder of the checkpoint after `step` batches."""
    return run / "checkpoints" / f"step={step:06d}"


def checkpoints(run: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    return sorted(p for p in (run / "checkpoints").glob("step=*") if p.is_dir() and not p.name.endswith(".tmp"))


def latest(run: Path) -> Path:
    """Newest complete checkpoint.

    Raises:
        ConfigError: there is none.
    """
    found = checkpoints(run)
    if not found:
        raise ConfigError(f"{run} has no checkpoint to resume from; start it anew with overwrite=true")
    return found[-1]


def save(
    run: Path,
    step: int,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
) -> Path:
    """Write a checkpoint after `step` batches and return its folder."""
    folder = folder_of(run, step)
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    policy.save_adapter(temporary / "adapter")
    names = _names(policy)
    tensors = {
        f"{names[id(p)]}/{key}": value.contiguous()
        for p, values in optimizer.state.items()
        for key, value in values.items()
    }
    save_file(tensors, temporary / "optimizer.safetensors")
    content = {"step": step, "policy_version": policy.version, **state}
    with open(temporary / "state.json", "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
    return folder


def read_state(folder: Path) -> dict[str, Any]:
    """Content of state.json."""
    state: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    return state


def load(folder: Path, policy: Policy) -> None:
    """Load the adapter and its version into the policy."""
    policy.load_adapter(folder / "adapter")
    policy.version = read_state(folder)["policy_version"]


def load_optimizer(folder: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Load the optimizer's tensors; every trainable parameter must have its own."""
    tensors = load_file(folder / "optimizer.safetensors")
    parameters = {name: p for p in _trainable(policy) if (name := _names(policy)[id(p)])}
    state: dict[Tensor, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, field = key.rsplit("/", 1)
        state.setdefault(parameters[name], {})[field] = value if field == "step" else value.to(parameters[name].device)
    optimizer.state.update(state)


def prune(run: Path, keep_last: int, keep: frozenset[int]) -> None:
    """Delete all but the last `keep_last` checkpoints and those after the step numbers in `keep` (epoch ends)."""
    for folder in checkpoints(run)[:-keep_last]:
        if int(folder.name.removeprefix("step=")) not in keep:
            shutil.rmtree(folder)


def _trainable(policy: Policy) -> list[torch.nn.Parameter]:
    return [p for p in policy.parameters() if p.requires_grad]


def _names(policy: Policy) -> dict[int, str]:
    return {id(p): name for name, p in policy.named_parameters() if p.requires_grad}
