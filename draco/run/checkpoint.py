"""Checkpoints without pickle: adapter in PEFT format, optimizer and random streams as safetensors, the rest as JSON.

    checkpoints/step=000012/
        adapter/adapter_model.safetensors, adapter_config.json
        optimizer.safetensors       "PARAMETER/STATE" → tensor
        rng.safetensors             torch, numpy, python
        state.json                  counters, options of the optimizer, states of loader and stages
        rank=0001/rng.safetensors, stages.json       random streams and states of stages of every further process

A folder is written under a temporary name, flushed and renamed, so a half-written checkpoint is never used. The base
weights are never gathered or written. Sampling is keyed by (seed, step, task, sample) and needs no random state; the
random streams are saved for LoRA dropout and plug-ins.

Size: an adapter parameter takes 4 bytes in float32 and 8 for the two moments of AdamW. A rank-16 LoRA on all linear
layers of a 27B model has 116.7M parameters: 1.40 GB a checkpoint. With the defaults (`keep_last` 3 and every epoch end)
the paper's run of 100 steps and 20 epochs keeps 22 of them, 31 GB.
"""

from __future__ import annotations

import hashlib
import json
import random
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
    "checkpoints", "chosen", "digest", "folder_of", "kept", "latest", "load", "load_optimizer", "prune", "read_stages",
    "read_state", "restore_rng", "rng_state", "save", "size_of",
]  # fmt: skip


def folder_of(run: Path, step: int) -> Path:
    """The folder of the checkpoint after `step` batches."""
    return run / "checkpoints" / files.step_name(step)


def checkpoints(run: Path) -> list[Path]:
    """All complete checkpoints of a run, oldest first."""
    return files.step_paths(run / "checkpoints")


def latest(run: Path) -> Path:
    """The newest complete checkpoint.

    Raises:
        ConfigError: there is none.
    """
    found = checkpoints(run)
    if not found:
        raise ConfigError(f"{run} has no checkpoint yet; train on with resume={run}")
    return found[-1]


def chosen(run: Path, which: str) -> list[Path | None]:
    """The checkpoints that an option names, oldest first; None stands for the untrained policy.

    Args:
        which: `last`, `base`, step numbers with commas, or `lastN`: the last N epoch ends (Section 4.1.3).

    Raises:
        ConfigError: no such checkpoint, or the run's checkpoints do not say how long its epochs are.
    """
    kept = {files.step_of(folder): folder for folder in checkpoints(run)}
    lists = ", ".join(map(str, kept)) or "none"
    if which == "base":
        return [None]
    if which == "last":
        return [latest(run)]
    if which.startswith("last") and which.removeprefix("last").isdigit():
        count, epoch = int(which.removeprefix("last")), read_state(latest(run)).get("epoch_steps")
        if epoch is None:
            raise ConfigError(f"checkpoints={which}: this run did not write down how long its epochs are; name steps")
        ends = [step for step in kept if step and step % epoch == 0]
        if len(ends) < count or not count:
            raise ConfigError(
                f"checkpoints={which}: the run has {len(ends)} epoch-end checkpoint(s) (an epoch is {epoch} steps; "
                f"kept steps: {lists}); train on, or name steps"
            )
        return [kept[step] for step in ends[-count:]]
    steps = which.split(",")
    if not all(step.isdigit() for step in steps):
        raise ConfigError(f"checkpoints={which}: expected last, base, lastN or step numbers; kept steps: {lists}")
    if missing := [step for step in steps if int(step) not in kept]:
        raise ConfigError(f"checkpoint={','.join(missing)} is not there; kept steps: {lists}; or use last or base")
    return [kept[int(step)] for step in steps]


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

    If the policy is sharded, every rank must call this: the shards are gathered, and rank 0 writes.

    Args:
        run: run folder.
        step: number of batches that the weights were trained on.
        policy, optimizer: what is saved.
        state: everything else, as JSON values.
        rng: random streams, see `rng_state`; None: the current ones.
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
        part = temporary / _rank_folder(number)
        part.mkdir()
        save_file(dict(streams), part / "rng.safetensors")
        (part / "stages.json").write_text(json.dumps(stages, indent=1), encoding="utf-8")
    files.publish(temporary, folder)
    return folder


def read_state(folder: Path) -> dict[str, Any]:
    """Content of state.json.

    Raises:
        ConfigError: it is missing or not JSON.
    """
    state: dict[str, Any] = _read_json(folder, "state.json")
    return state


def _rank_folder(number: int) -> str:
    return f"rank={number:04d}"


def read_stages(folder: Path) -> list[dict[str, Any]]:
    """States of the stages, by class name, of every rank that took part in saving the checkpoint."""
    state = read_state(folder)
    others = range(1, state["world_size"])
    return [state["stages"], *(_read_json(folder, f"{_rank_folder(number)}/stages.json") for number in others)]


def load(folder: Path, policy: Policy) -> None:
    """Load the adapter and its version into the policy."""
    policy.load_adapter(folder / "adapter")
    policy.version = read_state(folder)["policy_version"]


def load_optimizer(folder: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Load the optimizer's tensors and options.

    Raises:
        ConfigError: the file is missing, damaged, or belongs to another adapter.
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
    """The random streams of this process as tensors: torch (CPU and every GPU), global numpy, and Python."""
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
    """Restore the random streams of a rank; False if the checkpoint was saved by fewer ranks.

    Raises:
        ConfigError: the file is missing or damaged.
    """
    if number:
        if number >= read_state(folder)["world_size"]:
            return False
        folder = folder / _rank_folder(number)
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
    """A hash of the training tasks, to notice when they have changed."""
    return hashlib.sha256("\0".join(f"{t.id}\0{t.instruction}" for t in tasks).encode()).hexdigest()[:32]


def size_of(policy: Policy) -> int:
    """Size of a checkpoint in bytes: the adapter, and two float32 moments for each parameter."""
    return sum(p.numel() * (p.element_size() + 8) for p in policy.parameters() if p.requires_grad)


def kept(done: int, *, epoch: int, save_every: int, keep_last: int, keep_every: int) -> list[int]:
    """Steps whose checkpoints exist after `done` batches; for the arguments see `prune`.

    >>> kept(12, epoch=5, save_every=2, keep_last=2, keep_every=4)
    [4, 5, 8, 10, 12]
    """
    saved = [s for s in range(1, done + 1) if s % save_every == 0 or s % epoch == 0 or s == done]
    return _kept(saved, epoch, keep_last, keep_every)


def prune(run: Path, *, epoch: int, keep_last: int, keep_every: int = 0) -> None:
    """Delete old checkpoints.

    Args:
        run: run folder.
        epoch: batches of an epoch; checkpoints of epoch ends are kept.
        keep_last: number of newest checkpoints that are kept.
        keep_every: multiples of it are kept; 0 = none.
    """
    folders = checkpoints(run)
    keep = _kept([files.step_of(folder) for folder in folders], epoch, keep_last, keep_every)
    for folder in folders:
        if files.step_of(folder) not in keep:
            files.remove(folder)


def _kept(saved: list[int], epoch: int, keep_last: int, keep_every: int) -> list[int]:
    return sorted({*saved[-keep_last:], *(s for s in saved if s % epoch == 0 or (keep_every and s % keep_every == 0))})


def _read_json(folder: Path, name: str) -> Any:
    try:
        return files.read_json(folder / name)
    except (OSError, ValueError) as error:
        raise _damaged(folder, name, error) from error


def _tensors(folder: Path, name: str) -> dict[str, Tensor]:
    try:
        return load_file(folder / name)
    except (OSError, SafetensorError) as error:
        raise _damaged(folder, name, error) from error


def _damaged(folder: Path, name: str, error: Exception) -> ConfigError:
    reason = "not found" if isinstance(error, FileNotFoundError) else " ".join(str(error).split())
    return ConfigError(f"checkpoint {folder} is damaged: {name}: {reason}; delete that folder to use an older one")


def _names(policy: Policy) -> dict[int, str]:
    return {id(p): name for name, p in policy.named_parameters() if p.requires_grad}
