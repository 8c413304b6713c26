"""Loads the frozen base model and its tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from draco.core.errors import ConfigError
from draco.core.files import resolve
from draco.policy.kernels import require_kernels
from draco.policy.sharding import on_meta

__all__ = ["load_base", "quiet_loading", "weights_folder"]


def load_base(path: str, dtype: str, *, sharded: bool, gguf_file: str | None, **options: Any) -> tuple[Any, Any]:
    """Tokenizer and model of transformers; the model's parameters are frozen.

    Args:
        path: as `policy.path`.
        dtype: name of a torch dtype.
        sharded: give the parameters no memory.
        gguf_file: file inside `path` when the weights are GGUF.
        options: further arguments of `from_pretrained`; those that are None are left out.

    Raises:
        ConfigError: they cannot be loaded.
    """
    if sharded and gguf_file:
        raise ConfigError(f"policy.gguf_file={gguf_file} cannot be read in shards; use trainer=ddp")
    folder, kind = resolve(path), getattr(torch, dtype)
    options = {name: value for name, value in (options | {"gguf_file": gguf_file}).items() if value is not None}
    try:
        with quiet_loading():
            if torch.cuda.is_available() and not gguf_file:
                require_kernels(AutoConfig.from_pretrained(folder, **options).model_type)
            tokenizer = AutoTokenizer.from_pretrained(folder, **options)
            if sharded:
                config = AutoConfig.from_pretrained(folder, **options).get_text_config()
                trust = options["trust_remote_code"]
                with on_meta():
                    model = AutoModelForCausalLM.from_config(config, dtype=kind, trust_remote_code=trust)  # type: ignore[no-untyped-call]
            else:
                model = AutoModelForCausalLM.from_pretrained(folder, dtype=kind, **options)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f"policy.path={path!r} could not be loaded: {str(error).splitlines()[0]}; expected a folder with a "
            "transformers model, a hub name that is in the local cache, or pkg://PACKAGE"
        ) from error
    model.requires_grad_(False)
    return tokenizer, model


def weights_folder(path: str, revision: str | None) -> Path:
    """Folder of the base model's files; of a hub name, the one in the local cache.

    Raises:
        ConfigError: it is not there.
    """
    folder = Path(resolve(path))
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, revision=revision, local_files_only=True))
    except OSError as error:
        raise ConfigError(f"policy.path={path!r} is not in the local cache: {error}") from error


@contextmanager
def quiet_loading() -> Iterator[None]:
    """No progress bars and no generic advice while weights are read or written; errors still raise."""
    from transformers.utils import logging as hf_logging

    level = hf_logging.get_verbosity()
    hf_logging.set_verbosity(logging.ERROR)
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        hf_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
