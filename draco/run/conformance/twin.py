"""A policy around a small copy of the model (`draco.policy.copies`): same class, same adapter, random weights."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import cast

import torch
from peft import LoraConfig
from torch import nn

from draco.core.errors import ConfigError
from draco.policy.adapter import add_lora
from draco.policy.copies import small_copy
from draco.policy.mode import still
from draco.policy.policy import Policy
from draco.policy.structure import base_model
from draco.run.conformance.rows import Numbers

__all__ = ["Twin"]


class Twin(Policy):
    """A small copy of a policy in float32 on the CPU.

    Args:
        original: the policy; a sharded one may be without weights.
        longest: tokens that no row exceeds; None: no limit.

    Raises:
        ConfigError: no copy could be made.
    """

    def __init__(self, original: Policy, longest: int | None = None) -> None:
        nn.Module.__init__(self)
        self.path, self.revision, self.version, self.folder = original.path, original.revision, 0, original.folder
        self._reference_adapter = False
        base = base_model(original.model)
        lora = cast(LoraConfig, copy.deepcopy(original.model.peft_config["default"]))
        lora.r, lora.inference_mode = min(lora.r, 8), False
        with torch.random.fork_rng():
            torch.manual_seed(0)
            for targets in (lora.target_modules, "all-linear"):  # names of layers that the copy may not have
                lora.target_modules = targets
                own = small_copy(base.config, longest)
                still(own)
                with suppress(ConfigError):
                    self.model = add_lora(own, lora, original.path, sharded=False)
                    break
            else:
                raise ConfigError(f"the adapter of {original.path} fits no layer of its small copy")
        if base.is_gradient_checkpointing:
            own.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.numbers = Numbers(own.config.vocab_size)
        self.chat = self.numbers
        self.train()
