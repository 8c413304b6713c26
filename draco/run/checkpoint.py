"""Checkpoints without pickle: adapter in PEFT format, optimizer and random streams as safetensors, the rest as JSON.

    checkpoints/step=000012/
        adapter/adapter_model.safetensors, adapter_config.json
        optimizer.safetensors       "PARAMETER/STATE" → tensor
        rng.safetensors             torch, numpy, python
        state.json                  counters, options of the optimizer, states of loader and stages
        rank=0001/rng.safetensors, stages.json       the same of every further process

A folder is written under a temporary name, reaches the disk and is renamed, so a half-written checkpoint is never
picked up. The base weights are never gathered or written. Sampling is keyed by (seed, step, task, sample) and needs no
random state; the process's own streams are kept all the same, for LoRA dropout and plug-ins.

Size: an adapter parameter takes 4 bytes in float32 and 8 for the two moments of AdamW. A rank-16 LoRA on all linear
layers of a 27B model has 116.7M parameters: 1.40 GB a checkpoint. With the defaults (`keep_last` 3 and every epoch end)
the paper's run of 100 steps and 20 epochs keeps 22 of them, 31 GB.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draco.core import files
from draco.core.distributed import rank
from draco.core.errors import ConfigError
from draco.core.types import Task
from draco.policy.policy import Policy
from draco.policy.sharding import full, like

__all__ = [
    "checkpoints", "digest", "folder_of", "kept", "latest", "load", "load_optimizer", "prune", "read_stages",
    "read_state", "restore_rng", "rng_state", "save", "size_of",
]  # fmt: skip

_NAME = re.compile(r"step=(\d{6,})")


def folder_of(run: Path, step: int) -> Path:
    """Folder of the checkpoint after `step` batches."""
    return run / "checkpoints" / f"step={step:06d}"


def checkpoints(run: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    return sorted((p for p in (run / "checkpoints").glob("step=*") if _NAME.fullmatch(p.name)), key=_step)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step="))


def latest(run: Path) -> Path:
    """Newest complete checkpoint.

    Raises:
        ConfigError: there is none.
    """
    found = checkpoints(run)
    if not found:
        raise ConfigError(f"{run} has no checkpoint yet; train on with resume={run}")
    return found[-1]


def save(
    run: Path,
    step: int,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    rng: Mapping[str, Tensor] | None = None,
    others: Sequence[tuple[Mapping[str, Any], Mapping[str, Tensor]]] = (),
) -> Path:
    """Write a checkpoint after `step` batches and return its folder.

    Of a sharded policy every rank must call it: the parts are gathered, and rank 0 writes.

    Args:
        run: run folder.
        step: batches behind the weights.
        policy, optimizer: what is saved.
        state: JSON-able rest.
        rng: random streams, see `rng_state`; those of now if None.
        others: states of the stages and random streams of ranks 1, 2, …
    """
    folder = folder_of(run, step)
    temporary = folder.with_name(folder.name + ".tmp")
    if rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    policy.save_adapter(temporary / "adapter")
    names = _names(policy)
    tensors = {
        f"{names[id(p)]}/{key}": full(value).contiguous()
        for p, values in optimizer.state.items()
        for key, value in values.items()
    }
    if rank():
        return folder
    save_file(tensors, temporary / "optimizer.safetensors")
    save_file(dict(rng_state() if rng is None else rng), temporary / "rng.safetensors")
    options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    content = {"step": step, "policy_version": policy.version, "optimizer": options, **state}
    (temporary / "state.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    for number, (stages, streams) in enumerate(others, 1):
        part = _of_rank(temporary, number)
        part.mkdir()
        save_file(dict(streams), part / "rng.safetensors")
        (part / "stages.json").write_text(json.dumps(stages, indent=1), encoding="utf-8")
    files.publish(temporary, folder)
    return folder


def read_state(folder: Path) -> dict[str, Any]:
    """Content of state.json.

    Raises:
        ConfigError: it is missing or no JSON.
    """
    try:
        state: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(folder, "state.json", error) from error
    return state


def _of_rank(folder: Path, number: int) -> Path:
    return folder / f"rank={number:04d}"


def read_stages(folder: Path) -> list[dict[str, Any]]:
    """States of the stages, by class name, of every rank that the checkpoint was saved by."""
    state = read_state(folder)
    found = [state["stages"]]
    for number in range(1, state["world_size"]):
        try:
            found.append(json.loads((_of_rank(folder, number) / "stages.json").read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise _damaged(folder, f"rank={number:04d}/stages.json", error) from error
    return found


def load(folder: Path, policy: Policy) -> None:
    """Load the adapter and its version into the policy."""
    policy.load_adapter(folder / "adapter")
    policy.version = read_state(folder)["policy_version"]


def load_optimizer(folder: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Load the optimizer's tensors and options.

    Raises:
        ConfigError: the file is missing, damaged, or of another adapter.
    """
    tensors = _tensors(folder, "optimizer.safetensors")
    names = _names(policy)
    parameters = {names[id(p)]: p for p in policy.parameters() if p.requires_grad}
    state: dict[Tensor, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, field = key.rsplit("/", 1)
        if name not in parameters or (value.dim() and value.shape != parameters[name].shape):
            raise ConfigError(f"{folder}/optimizer.safetensors is of another adapter: {name} does not fit this one")
        target = parameters[name]
        state.setdefault(target, {})[field] = value if field == "step" else like(value, target)
    optimizer.state.update(state)
    for group, options in zip(optimizer.param_groups, read_state(folder).get("optimizer", ()), strict=False):
        group.update({k: tuple(v) if isinstance(v, list) else v for k, v in options.items()})


def rng_state() -> dict[str, Tensor]:
    """The random streams of this process as tensors: torch (CPU and every GPU), numpy's and Python's global ones."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    assert (version, kind) == (3, "MT19937")
    tensors = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([*(int(k) for k in keys), position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        tensors |= {f"cuda_{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    return tensors


def restore_rng(folder: Path, number: int = 0) -> bool:
    """Put the random streams of a rank back; False if the checkpoint was saved by fewer ranks.

    Raises:
        ConfigError: the file is missing or damaged.
    """
    if number:
        if number >= read_state(folder)["world_size"]:
            return False
        folder = _of_rank(folder, number)
    tensors = _tensors(folder, "rng.safetensors")
    torch.set_rng_state(tensors["torch"])
    gauss = tensors["python_gauss"].tolist()
    random.setstate((3, tuple(tensors["python"].tolist()), gauss[0] if gauss else None))
    *keys, position, has_gauss = tensors["numpy"].tolist()
    np.random.set_state(
        ("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, tensors["numpy_gauss"].item())
    )
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            if f"cuda_{i}" in tensors:
                torch.cuda.set_rng_state(tensors[f"cuda_{i}"], i)
    return True


def digest(tasks: Iterable[Task]) -> str:
    """Tells other training tasks from these."""
    return hashlib.sha256("\0".join(f"{t.id}\0{t.instruction}" for t in tasks).encode()).hexdigest()[:32]


def size_of(policy: Policy) -> int:
    """Bytes of a checkpoint: the adapter and two float32 moments a parameter."""
    return sum(p.numel() * (p.element_size() + 8) for p in policy.parameters() if p.requires_grad)


def kept(done: int, *, epoch: int, save_every: int, keep_last: int, keep_every: int) -> list[int]:
    """Steps whose checkpoints are there after `done` batches.

    >>> kept(12, epoch=5, save_every=2, keep_last=2, keep_every=4)
    [4, 5, 8, 10, 12]
    """
    saved = [s for s in range(1, done + 1) if s % save_every == 0 or s % epoch == 0 or s == done]
    return sorted({*saved[-keep_last:], *(s for s in saved if s % epoch == 0 or (keep_every and s % keep_every == 0))})


def prune(run: Path, keep_last: int, keep: frozenset[int], keep_every: int = 0) -> None:
    """Delete checkpoints; the last few, epoch ends and every so many steps stay.

    Args:
        run: run folder.
        keep_last: number of newest ones that stay.
        keep: steps that stay (epoch ends).
        keep_every: multiples of it stay; 0 = none.
    """
    for folder in checkpoints(run)[:-keep_last]:
        step = _step(folder)
        if step not in keep and not (keep_every and step % keep_every == 0):
            files.remove(folder)


def _tensors(folder: Path, name: str) -> dict[str, Tensor]:
    try:
        return load_file(folder / name)
    except (OSError, SafetensorError) as error:
        raise _damaged(folder, name, error) from error


def _damaged(folder: Path, name: str, error: Exception) -> ConfigError:
    reason = "not found" if isinstance(error, FileNotFoundError) else " ".join(str(error).split())
    return ConfigError(f"checkpoint {folder} is damaged: {name}: {reason}; delete that folder to use the one before")


def _names(policy: Policy) -> dict[int, str]:
    return {id(p): name for name, p in policy.named_parameters() if p.requires_grad}
