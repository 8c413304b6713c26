"""LoRA adapters: added to a base model, and read from PEFT folders with a check that they fit."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from draco.core.errors import AdapterError, ConfigError
from draco.policy.sharding import phantoms
from draco.policy.structure import decoder_of

__all__ = ["add_lora", "quiet_peft", "read_adapter"]

log = logging.getLogger("draco")

#: what PEFT says while it does the right thing: layers of GPT-2 are transposed, and a model without fused experts does
#: not need the ranks that PEFT doubles for them
_HARMLESS = (
    ".*fan_in_fan_out is set to",
    "The following (rank|alpha)_pattern keys did not match",
    "You have passed exclude_modules=.* but no modules were excluded",  # the names that it resolved say it already
)
#: model types whose `out_proj` PEFT refuses: kernels read its weight and would skip an adapter
_STATE_SPACE = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
_FILES = ("adapter_config.json", "adapter_model.safetensors")


def add_lora(base: Any, config: LoraConfig, path: str, *, sharded: bool) -> PeftModel:
    """A PEFT model around `base`.

    `all-linear` means the linear layers of the text model. Left out are vision and audio towers, routers that derive
    from a linear layer but return more than a product, and what PEFT cannot adapt.

    Raises:
        ConfigError: the targets fit no layer of the model in `path`.
    """
    if config.target_modules == "all-linear" and (left_out := _left_out(base)):
        config.exclude_modules = left_out
    try:
        with phantoms(base) if sharded else nullcontext(), quiet_peft():
            return cast(PeftModel, get_peft_model(base, config))
    except ValueError as error:  # PEFT found no such layer, or cannot adapt its kind
        linear = {name.rsplit(".", 1)[-1] for name, layer in base.named_modules() if isinstance(layer, nn.Linear)}
        targets = (
            config.target_modules if isinstance(config.target_modules, str) else sorted(config.target_modules or ())
        )
        raise ConfigError(
            f"policy.targets is {targets!r}, which fits no layer of {path}: {' '.join(str(error).split())[:200]}; "
            f"expected all-linear or names among {', '.join(sorted(linear))}"
        ) from error


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Without warnings of PEFT that ask for nothing."""
    with warnings.catch_warnings():
        for text in _HARMLESS:
            warnings.filterwarnings("ignore", text)
        yield


def _left_out(base: Any) -> list[str]:
    """Full names of linear layers that `all-linear` does not mean, sorted."""
    text = {id(layer) for layer in decoder_of(base).modules()}
    found = []
    for name, layer in base.named_modules():
        if isinstance(layer, nn.Linear) and layer is not base.get_output_embeddings():
            router = "Router" in type(layer).__name__
            refused = base.config.model_type in _STATE_SPACE and name.rsplit(".", 1)[-1] == "out_proj"
            if router or refused or id(layer) not in text:
                found.append(name)
    return sorted(found)


def read_adapter(folder: Path, own: Mapping[str, Tensor], config: PeftConfig, path: str) -> dict[str, Tensor]:
    """Weights of a PEFT folder.

    Args:
        folder: with the files of one adapter.
        own: the weights that they shall replace.
        config: of the adapter that they shall replace.
        path: of the base model.

    Raises:
        AdapterError: files are missing, or keys, shapes or options differ from the adapter's here.
    """
    if missing := [name for name in _FILES if not (folder / name).is_file()]:
        raise AdapterError(f"{folder} is not a PEFT adapter: {', '.join(missing)} not found")
    try:
        saved = json.loads((folder / _FILES[0]).read_text(encoding="utf-8"))
        state = load_file(folder / _FILES[1])
    except (ValueError, SafetensorError) as error:
        raise AdapterError(f"the adapter in {folder} cannot be read: {error}") from None
    wrong = {k for k in state.keys() & own.keys() if state[k].shape != own[k].shape}
    if odd := sorted(state.keys() ^ own.keys() | wrong):
        raise AdapterError(
            f"the adapter in {folder} (rank {saved.get('r')}) does not fit {path}: {len(odd)} tensors differ, e.g. "
            f"{odd[0]} is {_shape(state.get(odd[0]))} in the file, {_shape(own.get(odd[0]))} here; use the base model, "
            "rank and target modules that it was trained with"
        )
    for name in ("lora_alpha", "use_rslora", "use_dora"):  # these change results, but no shape
        mine = getattr(config, name)
        if name in saved and saved[name] != mine:
            option = " (policy.alpha)" if name == "lora_alpha" else ""
            raise AdapterError(
                f"the adapter in {folder} has {name}={saved[name]}, this policy {mine}{option}: its weights would mean "
                "something else; set it to what it was trained with"
            )
    base = str(saved.get("base_model_name_or_path") or "")
    if base and Path(base).name != Path(str(config.base_model_name_or_path)).name:
        log.warning(
            "the adapter in %s was trained on %s, and policy.path is %s: are they the same model?", folder, base, path
        )
    return state


def _shape(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else str(tuple(tensor.shape))
