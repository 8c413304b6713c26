"""The policy: a frozen causal LM with a trainable LoRA adapter.

The reference policy of the KL term is the same model with the adapter switched off, which needs no memory. A run that
starts from an existing adapter may measure KL against that adapter instead, at the price of a frozen copy of it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

import torch
from annotated_types import Ge, Lt
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn

from draco.config.options import Count, Positive, checked
from draco.core.distributed import rank
from draco.core.errors import ConfigError
from draco.core.files import resolve
from draco.core.types import Message
from draco.policy.adapter import add_lora, quiet_peft, read_adapter
from draco.policy.chat import ChatFormat
from draco.policy.loading import load_base, weights_folder
from draco.policy.mode import freeze_mode, still
from draco.policy.sharding import full, is_sharded, like
from draco.policy.structure import evaluating

__all__ = ["Policy"]

_TRAINED, _REFERENCE = "default", "reference"  #: PEFT's names of the adapters


@checked("policy")
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
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        rank: Count = 16,
        alpha: Positive = 32,
        dropout: Annotated[float, Ge(0), Lt(1)] = 0.0,
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
        if reference == "adapter" and not adapter:
            raise ConfigError("policy.reference=adapter needs policy.adapter, the folder of the adapter to start from")
        if reference == "adapter" and sharded:
            raise ConfigError("policy.reference=adapter has no sharded form yet; use policy.reference=base")
        self.path, self.revision = path, revision
        self.version = 0  #: optimizer updates behind the current weights
        self.folder = resolve(path)  #: where the base model's files are, or its hub name
        self.tokenizer, base = load_base(
            path, dtype, sharded=sharded, gguf_file=gguf_file, trust_remote_code=trust_remote_code, revision=revision
        )
        still(base)
        if chat_template:
            try:
                self.tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
            except OSError as error:
                raise ConfigError(
                    f"policy.chat_template={chat_template!r} cannot be read: {error.strerror}; expected a Jinja file"
                ) from None
        self.chat = ChatFormat(self.tokenizer, **(template_kwargs or {}))
        if gradient_checkpointing:
            base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        lora = LoraConfig(
            r=rank,
            lora_alpha=cast(int, alpha),
            lora_dropout=dropout,
            target_modules=targets if isinstance(targets, str) else list(targets),
            task_type="CAUSAL_LM",
        )
        self.model = add_lora(base, lora, path, sharded=sharded)
        if adapter:
            self.load_adapter(Path(adapter))
        self._reference_adapter = reference == "adapter"
        if self._reference_adapter:
            with quiet_peft():
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
        return weights_folder(self.path, self.revision)

    def adapter_state(self) -> dict[str, Tensor]:
        """LoRA weights under PEFT's file names."""
        return cast("dict[str, Tensor]", get_peft_model_state_dict(self.model, save_embedding_layers=False))

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Eval mode while an engine generates in process."""
        with evaluating(self.model):
            yield

    def train(self, mode: bool = True) -> Self:
        """Training mode for the adapter, its dropout and checkpointing; the frozen base model evaluates."""
        super().train(mode)
        if mode:
            freeze_mode(self.model)
        return self

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
            AdapterError: files are missing, or keys, shapes or options differ from this policy's adapter.
        """
        state = read_adapter(folder, self.adapter_state(), self.model.peft_config[_TRAINED], self.path)
        if is_sharded(self.model):
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    with torch.no_grad():
                        parameter.copy_(like(state[name.replace(f".{_TRAINED}.", ".")], parameter))
            return
        set_peft_model_state_dict(self.model, state)
