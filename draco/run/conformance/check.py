"""Runs the check once for each kind of model; equal ones take its result from a cache."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from contextlib import suppress
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from draco.core.distributed import alone, main_only
from draco.core.errors import ConfigError
from draco.core.files import read_json, write_json
from draco.core.types import Message
from draco.module import GRPOModule
from draco.policy.copies import small_config
from draco.policy.policy import Policy
from draco.policy.structure import base_model
from draco.rollout.engines.ragged import advance_one_by_one
from draco.run.conformance.examine import examine
from draco.run.conformance.verdict import Verdict

__all__ = ["cache_folder", "conform", "settle"]

log = logging.getLogger("draco")

_ROOMS = ("config", "policy", "rollout", "update", "run/conformance")  #: whose code decides the result

_ASKED = (Message("system", "s"), Message("user", "u"))  #: tells template arguments apart


def settle(module: GRPOModule, *, engine: bool, longest: int | None = None, device: torch.device | None = None) -> None:
    """Check a loaded policy before it trains, and keep to the verdict: rows unpacked, rollouts one position at a time.

    Args:
        module: its policy is loaded. Every rank must call this.
        engine: rollouts are sampled in this process.
        longest: tokens that no trajectory exceeds.
        device: where the weights are moved first; None: they stay.

    Raises:
        ConfigError: the model would train otherwise than it is served.
    """
    policy = module.policy
    if device is not None:
        policy.to(device)
    whole = not next(policy.model.parameters()).is_meta
    packed = module.packed or (not whole and module.update_options.packing == "auto")

    def check() -> Verdict:
        with alone():
            return conform(
                policy, packed=packed, engine=engine and whole, temperature=module.temperature, longest=longest
            )

    verdict = main_only(check)
    if verdict.kind == "refused":
        raise ConfigError(
            f"policy.path={policy.path} would not train as it is served: {verdict.reason}; draco check with the same "
            "policy options shows what was tried"
        )
    if packed and verdict.kind == "unpacked":
        log.warning("trajectories are not packed: %s", verdict.reason)
        module.unpack()
    if engine and whole and not verdict.ragged:
        advance_one_by_one(policy.model)


def conform(
    policy: Policy,
    *,
    packed: bool,
    engine: bool,
    temperature: float = 1.0,
    longest: int | None = None,
    fresh: bool = False,
) -> Verdict:
    """The verdict on a policy.

    Args:
        policy, packed, engine, temperature, longest: see `examine`.
        fresh: do not read the cache.
    """
    file = cache_folder() / f"{_key(policy, packed, engine, temperature, longest)}.json"
    verdict: Verdict | None = None
    if not fresh:
        with suppress(OSError, ValueError, TypeError, KeyError):
            verdict = Verdict.from_json(read_json(file))
    if verdict is None:
        verdict = examine(policy, packed=packed, engine=engine, temperature=temperature, longest=longest)
        if verdict.kind != "refused":  # a refusal is looked at again
            with suppress(OSError):  # a folder that cannot be written: the check runs every time
                file.parent.mkdir(parents=True, exist_ok=True)
                write_json(file, verdict.to_json())
    return verdict


def cache_folder() -> Path:
    """Where results are kept: $DRACO_CACHE, or `draco` in the user's folder of caches."""
    given = os.environ.get("DRACO_CACHE")
    base = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draco"
    return base / "conformance"


def _key(policy: Policy, packed: bool, engine: bool, temperature: float, longest: int | None) -> str:
    """Everything that the result may depend on but the values of the weights."""
    model = base_model(policy.model)
    lora = policy.model.peft_config["default"].to_dict() | {"base_model_name_or_path": ""}
    first = next(model.parameters())
    backend = getattr(policy.tokenizer, "backend_tokenizer", None)
    parts = {
        "config": [model.config.to_json_string(), _copy_of(model.config, longest)],
        "lora": {
            k: sorted(v) if isinstance(v, set) else str(v) for k, v in lora.items() if k != "base_model_name_or_path"
        },
        "tokenizer": backend.to_str() if backend is not None else repr(policy.tokenizer),
        "chat": [policy.tokenizer.chat_template, policy.chat.end_ids, policy.chat.prompt_ids(_ASKED)],
        "weights": [str(first.dtype), first.device.type, model.is_gradient_checkpointing],
        "how": [packed, engine, temperature],
        "versions": [version(p) for p in ("torch", "transformers", "peft")] + [_code()],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=sorted).encode()).hexdigest()[:32]


def _copy_of(config: PreTrainedConfig, longest: int | None) -> str:
    """Limits between the same two switches of a model give the same copy, and so the same result."""
    try:
        return str(small_config(config, longest).to_json_string())
    except Exception:  # of a model that has no copy
        return ""


def _code() -> str:
    """Digest of our own code."""
    digest = hashlib.sha256()
    root = Path(str(files("draco")))
    for room in _ROOMS:
        for file in sorted((root / room).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()
