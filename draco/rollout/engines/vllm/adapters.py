"""Versions of the adapter on disk, as servers load them.

A version's name holds a hash of its content, ``draco-v000012-9f3c5a1b``: two different adapters never share a name, so
nothing that a server keeps under a name (weights, prefix cache) can be stale. A folder is written under another name
and renamed when it is complete. The last two stay.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from safetensors.torch import load_file, save_file
from torch import Tensor

from draco.core.errors import EngineError
from draco.policy.policy import Policy
from draco.policy.sharding import full

__all__ = ["PREFIX", "Adapter", "AdapterStore", "adapter_rank", "served_keys"]

PREFIX = "draco-v"
ADAPTER_FILE = "adapter_model.safetensors"
_KEPT = 2


@dataclass(frozen=True, slots=True)
class Adapter:
    """One version."""

    name: str  #: what requests name as their model
    folder: Path
    trained: bool  #: some B ≠ 0: it changes the base model's answers


class AdapterStore:
    """Writes versions into a folder.

    Args:
        folder: where they go.
        writer: False on ranks that wait for another one to write.
        patience_s: how long those wait.
    """

    def __init__(self, folder: Path, *, writer: bool = True, patience_s: float = 600.0) -> None:
        self.folder, self.writer, self.patience_s = folder, writer, patience_s

    def publish(self, policy: Policy) -> Adapter:
        """The policy's adapter as a complete folder. Of a sharded policy every rank must call it.

        Raises:
            EngineError: the writing rank did not write it.
        """
        state = {name: full(tensor).detach().cpu().contiguous() for name, tensor in policy.adapter_state().items()}
        config = policy.model.peft_config[policy.model.active_adapter]
        return self._publish(state, str(policy.model.config.model_type), config, policy.version)

    def publish_folder(self, source: Path, model_type: str) -> Adapter:
        """The adapter of a checkpoint, in PEFT's format, as a complete folder that vLLM can load."""
        return self._publish(load_file(source / ADAPTER_FILE), model_type, PeftConfig.from_pretrained(str(source)), 0)

    def _publish(self, state: Mapping[str, Tensor], model_type: str, config: PeftConfig, version: int) -> Adapter:
        name = f"{PREFIX}{version:06d}-{_digest(state)}"
        adapter = Adapter(name, self.folder / name, any(bool(t.any()) for k, t in state.items() if "lora_B" in k))
        if adapter.folder.is_dir():
            return adapter
        if self.writer:
            self._write(served_keys(model_type, state), config, adapter.folder)
            self._prune(adapter)
        else:
            self._wait(adapter.folder)
        return adapter

    def _write(self, state: dict[str, Tensor], config: PeftConfig, folder: Path) -> None:
        part = folder.with_name(f".{folder.name}-{socket.gethostname()}-{os.getpid()}")  # each machine may write
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        save_file(state, part / ADAPTER_FILE, metadata={"format": "pt"})
        config.save_pretrained(str(part))
        try:
            part.rename(folder)
        except OSError:
            shutil.rmtree(part, ignore_errors=True)
            if not folder.is_dir():
                raise

    def _prune(self, current: Adapter) -> None:
        """Keep the newest two: a server may still be reading the older one."""
        older: list[tuple[int, Path]] = []
        for folder in self.folder.glob(PREFIX + "*"):
            with contextlib.suppress(FileNotFoundError):  # another machine's writer prunes the same folder
                older.append((folder.stat().st_mtime_ns, folder))
        for _, folder in sorted(o for o in older if o[1] != current.folder)[: -(_KEPT - 1)]:
            shutil.rmtree(folder, ignore_errors=True)

    def _wait(self, folder: Path) -> None:
        until = time.monotonic() + self.patience_s
        while not folder.is_dir():
            if time.monotonic() > until:
                raise EngineError(
                    f"{folder} did not appear within {self.patience_s:.0f} s: the ranks' adapters differ, or they do "
                    "not share the run folder (set engine.adapter_dir to a folder that all of them see)"
                )
            time.sleep(0.05)


def adapter_rank(folder: Path) -> int:
    """Rank of an adapter in PEFT's format."""
    config: Any = PeftConfig.from_pretrained(str(folder))
    return int(config.r)


def served_keys(model_type: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Adapter weights under the names that vLLM looks for.

    transformers' text-only class of `qwen3_5` calls its layers ``model.layers``; vLLM serves the same checkpoint as
    ``Qwen3_5ForConditionalGeneration``, whose names are ``model.language_model.layers``, and silently ignores weights
    that it has no module for (vllm#39369). Its text-only class understands the longer names as well.
    """
    if not model_type.startswith("qwen3_5"):
        return dict(state)
    short, long = "base_model.model.model.", "base_model.model.model.language_model."
    return {
        long + key.removeprefix(short) if key.startswith(short) and not key.startswith(long) else key: tensor
        for key, tensor in state.items()
    }


def _digest(state: Mapping[str, Tensor]) -> str:
    found: Any = hashlib.blake2b(digest_size=4)
    for key in sorted(state):
        found.update(key.encode())
        found.update(state[key].view(torch.uint8).numpy())
    return str(found.hexdigest())
