"""The policy: a frozen causal LM with a trainable LoRA adapter.

The reference policy of the KL term is the same model with the adapter switched off, so it costs no memory; a run that
goes on from an existing adapter may measure KL against that adapter instead, which costs a frozen copy of it.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from draco.config.checks import number, whole
from draco.core.distributed import rank
from draco.core.errors import AdapterError, ConfigError
from draco.core.files import resolve
from draco.core.types import Message
from draco.policy.chat import ChatFormat
from draco.policy.kernels import require_kernels
from draco.policy.sharding import full, is_sharded, like, on_meta, phantoms

log = logging.getLogger("draco")

__all__ = [
    "Policy",
]

_TRAINED, _REFERENCE = "default", "reference"  #: PEFT's names of the adapters
_DTYPES = ("float32", "bfloat16", "float16")
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


class Policy(nn.Module):
    """Base model, LoRA adapter, tokenizer and chat format.

    Args:
        path: a folder, a hub name, or ``pkg://PACKAGE`` for files shipped inside an installed Python package.
        gguf_file: file inside `path` when the weights are GGUF.
        dtype: of the frozen base weights; adapter and optimizer are float32.
        rank, alpha, dropout, targets: LoRA (Table 10: 16, 32, 0, all linear layers).
        adapter: folder of an existing PEFT adapter to go on training.
        reference: what KL is measured against: `base`, the model without adapter, or `adapter`, the weights in the
            folder `adapter` as they are now, frozen.
        gradient_checkpointing: recompute activations in the backward pass.
        trust_remote_code: run code from the model repository; off unless the user says so.
        chat_template: a Jinja file that replaces the tokenizer's own template.
        template_kwargs: extra arguments of the chat template, e.g. ``enable_thinking``.
        revision: commit, tag or branch of a hub name.
        sharded: leave the base weights out; `draco.policy.sharding.shard` gives every rank its part of them.

    Raises:
        ConfigError: the model cannot be found or loaded, or an option is out of its range.
        AdapterError: the adapter does not fit the base model.
    """

    def __init__(
        self,
        path: str,
        *,
        gguf_file: str | None = None,
        dtype: str = "float32",
        rank: int = 16,
        alpha: int = 32,
        dropout: float = 0.0,
        targets: str | Sequence[str] = "all-linear",
        adapter: str | None = None,
        reference: Literal["base", "adapter"] = "base",
        gradient_checkpointing: bool = False,
        trust_remote_code: bool = False,
        chat_template: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
        revision: str | None = None,
        sharded: bool = False,
    ) -> None:
        super().__init__()
        if reference not in ("base", "adapter"):
            raise ConfigError(f"policy.reference is {reference!r}; expected base or adapter")
        if reference == "adapter" and not adapter:
            raise ConfigError("policy.reference=adapter needs policy.adapter, the folder of the adapter to start from")
        base_type = getattr(torch, dtype, None) if isinstance(dtype, str) else None
        if not isinstance(base_type, torch.dtype) or not base_type.is_floating_point:
            raise ConfigError(f"policy.dtype is {dtype!r}; expected {', '.join(_DTYPES)}")
        whole("policy.rank", rank, 1)
        number("policy.alpha", alpha, 0, above=True)
        number("policy.dropout", dropout, 0)
        if dropout >= 1:
            raise ConfigError(f"policy.dropout is {dropout}; expected a number below 1: it would leave nothing")
        self.path, self.revision = path, revision
        self.version = 0  #: optimizer updates behind the current weights
        self.folder = folder = resolve(path)  #: where the base model's files are, or its hub name
        options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        if revision:
            options["revision"] = revision
        if sharded and gguf_file:
            raise ConfigError(f"policy.gguf_file={gguf_file} cannot be read in shards; use trainer=ddp")
        if gguf_file:
            options["gguf_file"] = gguf_file
        try:
            with _quiet_loading():
                if torch.cuda.is_available() and not gguf_file:
                    require_kernels(AutoConfig.from_pretrained(folder, **options).model_type)
                self.tokenizer = AutoTokenizer.from_pretrained(folder, **options)
                if sharded:
                    base = _without_weights(folder, dtype, options)
                else:
                    base = AutoModelForCausalLM.from_pretrained(folder, dtype=base_type, **options)
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(
                f"policy.path={path!r} could not be loaded: {str(error).splitlines()[0]}; expected a folder with a "
                "transformers model, a hub name that is in the local cache, or pkg://PACKAGE"
            ) from error
        if chat_template:
            try:
                self.tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
            except OSError as error:
                raise ConfigError(
                    f"policy.chat_template={chat_template!r} cannot be read: {error.strerror}; expected a Jinja file"
                ) from None
        self.chat = ChatFormat(self.tokenizer, **(template_kwargs or {}))
        base.requires_grad_(False)
        if gradient_checkpointing:
            base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        lora = LoraConfig(
            r=rank,
            lora_alpha=alpha,
            lora_dropout=dropout,
            target_modules=targets if isinstance(targets, str) else list(targets),
            task_type="CAUSAL_LM",
        )
        try:
            with phantoms(base) if sharded else nullcontext():
                self.model = cast(PeftModel, get_peft_model(base, lora))
        except ValueError as error:  # PEFT found no such layer, or cannot adapt its kind
            raise ConfigError(
                f"policy.targets is {targets!r}, which fits no layer of {path}: {' '.join(str(error).split())[:200]}; "
                f"expected all-linear or names among {', '.join(_linear_names(base))}"
            ) from error
        if adapter:
            self.load_adapter(Path(adapter))
        self._reference_adapter = reference == "adapter"
        if sharded and self._reference_adapter:
            raise ConfigError("policy.reference=adapter has no sharded form yet; use policy.reference=base")
        if self._reference_adapter:
            self.model.add_adapter(_REFERENCE, lora)
            set_peft_model_state_dict(self.model, self.adapter_state(), adapter_name=_REFERENCE)
            self.model.set_adapter(_TRAINED)  # trainable; the other one frozen

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.model.parameters()).device

    @property
    def context(self) -> int | None:
        """Tokens of one row that the base model was made for; None where its configuration does not say."""
        config = self.model.config
        length: int | None = getattr(config, "max_position_embeddings", None)
        rope = getattr(config, "rope_parameters", None) or {}
        if not length or rope.get("rope_type") != "yarn":  # others give the extended length
            return length
        return max(length, int(rope.get("original_max_position_embeddings", length) * rope["factor"]))

    @property
    def weights_folder(self) -> Path:
        """Folder of the base model's files; of a hub name, the one in the local cache.

        Raises:
            ConfigError: it is not there.
        """
        folder = Path(resolve(self.path))
        if folder.is_dir():
            return folder
        from huggingface_hub import snapshot_download

        try:
            return Path(snapshot_download(self.path, revision=self.revision, local_files_only=True))
        except OSError as error:
            raise ConfigError(f"policy.path={self.path!r} is not in the local cache: {error}") from error

    def adapter_state(self) -> dict[str, Tensor]:
        """LoRA weights under PEFT's file names."""
        return cast("dict[str, Tensor]", get_peft_model_state_dict(self.model, save_embedding_layers=False))

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Eval mode while an engine generates in process."""
        training = self.model.training
        self.model.eval()
        try:
            yield
        finally:
            self.model.train(training)

    @contextmanager
    def reference(self) -> Iterator[None]:
        """The reference policy: adapter off, or the initial adapter. Enter it before a graph is built."""
        if not self._reference_adapter:
            with self.model.disable_adapter():
                yield
            return
        self.model.set_adapter(_REFERENCE, inference_mode=True)
        try:
            yield
        finally:
            self.model.set_adapter(_TRAINED)

    def prompt_tokens(self, opening: Sequence[Message]) -> int:
        """Length of an opening prompt in tokens."""
        return len(self.chat.prompt_ids(opening))

    def save_adapter(self, folder: Path) -> None:
        """Write the adapter in PEFT format; complete or not there at all (temporary name, then rename).

        Of a sharded policy every rank must call it, and rank 0 writes.
        """
        options: dict[str, Any] = {}
        if is_sharded(self.model):
            state = {name: full(p) for name, p in self.model.named_parameters() if p.requires_grad}
            options["state_dict"] = state
            if rank():
                return
        temporary = folder.with_name(folder.name + ".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        self.model.save_pretrained(
            str(temporary), safe_serialization=True, selected_adapters=[_TRAINED], save_embedding_layers=False,
            **options,
        )  # fmt: skip
        (temporary / "README.md").unlink(missing_ok=True)  # PEFT's empty model card
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)

    def load_adapter(self, folder: Path) -> None:
        """Load weights from a PEFT folder into the trainable adapter.

        Raises:
            AdapterError: files are missing, or keys or shapes differ from this base model's adapter.
        """
        if missing := [name for name in _ADAPTER_FILES if not (folder / name).is_file()]:
            raise AdapterError(f"{folder} is not a PEFT adapter: {', '.join(missing)} not found")
        try:
            saved = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
            state = load_file(folder / "adapter_model.safetensors")
        except (ValueError, SafetensorError) as error:
            raise AdapterError(f"the adapter in {folder} cannot be read: {error}") from None
        rank, own = saved.get("r"), self.adapter_state()
        wrong = {k for k in state.keys() & own.keys() if state[k].shape != own[k].shape}
        if state.keys() != own.keys() or wrong:
            odd = sorted(state.keys() ^ own.keys() | wrong)
            example = odd[0]
            shapes = f"{_shape(state.get(example))} in the file, {_shape(own.get(example))} here"
            raise AdapterError(
                f"the adapter in {folder} (rank {rank}) does not fit {self.path}: {len(odd)} tensors differ, e.g. "
                f"{example} is {shapes}; use the base model, rank and target modules that it was trained with"
            )
        mine = self.model.peft_config[_TRAINED]
        for name in ("lora_alpha", "use_rslora", "use_dora"):  # shapes do not show these, results do
            if name in saved and saved[name] != getattr(mine, name):
                option = " (policy.alpha)" if name == "lora_alpha" else ""
                raise AdapterError(
                    f"the adapter in {folder} has {name}={saved[name]}, this policy {getattr(mine, name)}{option}: its "
                    "weights would mean something else; set it to what it was trained with"
                )
        base = str(saved.get("base_model_name_or_path") or "")
        if base and Path(base).name != Path(str(mine.base_model_name_or_path)).name:
            log.warning(
                "the adapter in %s was trained on %s, and policy.path is %s: are they the same model?",
                folder, base, self.path,
            )  # fmt: skip
        if is_sharded(self.model):
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    with torch.no_grad():
                        parameter.copy_(like(state[name.replace(f".{_TRAINED}.", ".")], parameter))
            return
        set_peft_model_state_dict(self.model, state)


def _linear_names(model: nn.Module) -> list[str]:
    """Last parts of the names of all linear layers: what LoRA targets are called."""
    return sorted({name.rsplit(".", 1)[-1] for name, layer in model.named_modules() if isinstance(layer, nn.Linear)})


def _shape(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else str(tuple(tensor.shape))


def _without_weights(folder: str, dtype: str, options: dict[str, Any]) -> Any:
    """The model's structure, with buffers and without the memory of its parameters."""
    config = AutoConfig.from_pretrained(folder, **options)
    config = config.get_text_config()
    with on_meta():
        return AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=getattr(torch, dtype), trust_remote_code=options["trust_remote_code"]
        )


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """No progress bars and no generic advice while weights load; errors still raise."""
    from transformers.utils import logging as hf_logging

    level = hf_logging.get_verbosity()
    hf_logging.set_verbosity(logging.ERROR)
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        hf_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
