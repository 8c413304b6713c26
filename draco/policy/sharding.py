"""Sharded training (FSDP2): no rank ever holds the full base model.

A policy built with `sharded=True` has a base model without memory: its parameters are on the meta device, the adapter
is real. `shard` splits every decoder layer, and the rest of the model, over the data-parallel ranks. Each rank reads
only its own rows from the safetensors files. A layer is gathered only while it computes.

FSDP averages gradients over ranks. `set_gradient_divide_factor(1)` makes that a sum, because the update divides later,
by one global denominator. Every forward and backward pass is a collective, so all ranks must run the same number of
micro-batches: `draco.update.packing.balance` spreads a rank's rows over them, or the update adds empty ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from draco.core.errors import ConfigError
from draco.policy.structure import base_model

__all__ = [
    "ShardedStrategy", "call_with_head", "full", "gathered", "is_sharded", "like", "on_meta", "phantoms", "shard",
]  # fmt: skip

T = TypeVar("T")

#: Names of the text model inside checkpoints of multimodal classes, e.g. Qwen3_5ForConditionalGeneration.
_PREFIXES = (("", ""), ("model.", "model.language_model."), ("model.", "language_model.model."))


class ShardedStrategy(ModelParallelStrategy):
    """Lightning's ModelParallelStrategy with every process in the data-parallel dimension."""

    def __init__(self, **options: Any) -> None:
        super().__init__(data_parallel_size=1, tensor_parallel_size=1, save_distributed_checkpoint=False, **options)

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()


# --- building without memory ------------------------------------------------------------------------------------------


@contextmanager
def on_meta() -> Iterator[None]:
    """Parameters that modules register in the body lose their memory at once; buffers stay as they are."""
    register = nn.Module.register_parameter

    def without_memory(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(self, name, parameter)

    nn.Module.register_parameter = without_memory  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@contextmanager
def phantoms(model: nn.Module) -> Iterator[None]:
    """In the body, meta parameters look like CPU tensors (one element, repeated). PEFT then makes a real adapter,
    from the same random numbers as for a model with weights."""
    meta = dict(model.named_parameters())
    for name, parameter in meta.items():
        _set(model, name, nn.Parameter(torch.zeros(1, dtype=parameter.dtype).expand(parameter.shape), False))
    owners = {id(p): name for name, p in model.named_parameters()}
    _tie(model)
    try:
        yield
    finally:
        for module in model.modules():
            for key, parameter in list(module.named_parameters(recurse=False)):
                if (owner := owners.get(id(parameter))) is not None:
                    module.register_parameter(key, meta[owner])
        _tie(model)


def _tie(model: nn.Module) -> None:
    if tie := getattr(model, "tie_weights", None):
        tie()


def _set(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, key = name.rpartition(".")
    model.get_submodule(owner).register_parameter(key, parameter)


# --- sharding ---------------------------------------------------------------------------------------------------------


def is_sharded(model: nn.Module) -> bool:
    """Whether `shard` has split this model."""
    return isinstance(base_model(model), FSDPModule)


def shard(model: nn.Module, mesh: DeviceMesh, *, folder: Path | None, device: torch.device) -> None:
    """Split a PEFT model over the ranks of a mesh and read this rank's part of the weights.

    Each decoder layer is an FSDP unit. Embedding, final norm and head are one more, which `call_with_head` gathers.

    Args:
        model: PEFT model whose base was built under `on_meta`.
        mesh: one dimension.
        folder: of the safetensors files; None leaves weights undefined (planning).
        device: of the shards.

    Raises:
        ConfigError: files or tensors are missing or of another shape.
    """
    base = base_model(model)
    low = {p.dtype for p in base.parameters() if not p.requires_grad and p.dtype.itemsize < 4}
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": True}
    if low:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=min(low, key=str), reduce_dtype=torch.float32)
    for layer in _layers(base):
        fully_shard(layer, **options)
    base.draco_call = _call
    fully_shard(base, **options)
    register_fsdp_forward_method(base, "draco_call")
    for module in base.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    if folder is not None:
        _load(base, _Weights(folder), device)
        _move_buffers(base, device)


def _call(work: Callable[[], T]) -> T:
    return work()


def _layers(base: nn.Module) -> Sequence[nn.Module]:
    """The decoder layers of a transformers model."""
    found = [m for m in base.modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
    names = set(getattr(base, "_no_split_modules", None) or ())
    chosen = [m for m in found if {type(x).__name__ for x in m} <= names]
    if len(chosen) != 1:
        raise ConfigError(f"{type(base).__name__} names no decoder layers to shard by; use trainer=ddp")
    return list(chosen[0])


def call_with_head(model: nn.Module, work: Callable[[], T]) -> T:
    """Run `work` while embedding, final norm and head of a sharded model are gathered; other models just run it."""
    base = base_model(model)
    return cast(T, cast(Any, base).draco_call(work)) if isinstance(base, FSDPModule) else work()


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Gather the model on every rank while the body runs, so that ranks may make different numbers of forward passes.

    Every rank must enter it. Only for models that fit on one device.
    """
    if not is_sharded(model):
        yield
        return
    units = [m for m in base_model(model).modules() if isinstance(m, FSDPModule)]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.reshard()
            unit.set_reshard_after_forward(True, recurse=False)


class _Weights:
    """Tensors of a model folder, read by rows."""

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        single = folder / "model.safetensors"
        if index.is_file():
            names: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            self.files = {name: folder / file for name, file in names.items()}
        elif single.is_file():
            with safe_open(single, "pt") as file:
                self.files = dict.fromkeys(file.keys(), single)
        else:
            raise ConfigError(
                f"sharded loading reads safetensors, and {folder} has no model.safetensors; use trainer=ddp"
            )
        self.folder = folder

    def rows(self, name: str, shape: torch.Size, start: int, stop: int) -> Tensor:
        """Rows of a tensor.

        Raises:
            ConfigError: it is missing, or of another shape.
        """
        for ours, theirs in _PREFIXES:
            key = theirs + name.removeprefix(ours) if name.startswith(ours) else name
            if key in self.files:
                break
        else:
            raise ConfigError(f"{self.folder} has no tensor {name}: its weights are of another model class")
        with safe_open(self.files[key], "pt") as file:
            part = file.get_slice(key)
            if tuple(part.get_shape()) != tuple(shape):
                raise ConfigError(f"{key} in {self.folder} is {part.get_shape()}, expected {list(shape)}")
            return cast(Tensor, part[start:stop]) if len(shape) else file.get_tensor(key)


@torch.no_grad()
def _load(base: nn.Module, weights: _Weights, device: torch.device) -> None:
    """Give every meta shard its rows."""
    state: dict[str, nn.Parameter] = {}
    read: dict[int, nn.Parameter] = {}  # tied weights are read once
    for name, parameter in base.named_parameters(remove_duplicate=False):
        if id(parameter) in read:
            state[name] = read[id(parameter)]
            continue
        local = cast(Any, parameter).to_local()
        if not local.is_meta:
            continue
        mesh = cast(Any, parameter).device_mesh
        each = -(-parameter.shape[0] // mesh.size())
        start = min(mesh.get_local_rank() * each, parameter.shape[0])
        stop = min(start + each, parameter.shape[0])
        assert stop - start == local.shape[0]
        plain = name.replace("base_layer.", "")
        rows = weights.rows(plain, parameter.shape, start, stop).to(device=device, dtype=parameter.dtype)
        placed = DTensor.from_local(
            rows.clone().contiguous(), mesh, cast(Any, parameter).placements, shape=parameter.shape,
            stride=parameter.stride(), run_check=False,
        )  # fmt: skip
        state[name] = read[id(parameter)] = nn.Parameter(placed, requires_grad=False)
    base.load_state_dict(state, strict=False, assign=True)
    left = [n for n, p in base.named_parameters() if p.is_meta]
    if left:
        raise ConfigError(f"{weights.folder} gave no weights for {', '.join(left[:3])}")


def _move_buffers(base: nn.Module, device: torch.device) -> None:
    for module in base.modules():
        for key, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[key] = buffer.to(device)


# --- shards and full tensors ------------------------------------------------------------------------------------------


def full(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered on the CPU (a collective); any other tensor as it is."""
    return tensor.full_tensor().cpu() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def like(tensor: Tensor, target: Tensor) -> Tensor:
    """`tensor` sharded and placed as `target` is."""
    if not isinstance(target, DTensor):
        return tensor.to(target.device)
    device = target.to_local().device
    return distribute_tensor(tensor.to(device), target.device_mesh, target.placements, src_data_rank=None)
