"""Kernels without which a model is impractical on a GPU."""

from __future__ import annotations

from importlib.util import find_spec

from draco.core.errors import ConfigError

__all__ = ["require_kernels"]

#: model types with Gated DeltaNet layers: transformers falls back to a loop over the sequence
_LINEAR_ATTENTION = ("qwen3_next", "qwen3_5")
_NEEDED = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d"}


def require_kernels(model_type: str) -> None:
    """Refuse a hybrid model on a GPU when its kernels are missing. A CPU always takes the slow path.

    Args:
        model_type: of the model's configuration.

    Raises:
        ConfigError: kernels are missing; the message holds the command that installs them.
    """
    if not model_type.startswith(_LINEAR_ATTENTION):
        return
    missing = [package for module, package in _NEEDED.items() if find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"{model_type} has linear-attention layers, and {' and '.join(missing)} are not installed: without their "
            "kernels a step of 28k-token trajectories is impractical on a GPU; run: "
            "pip install --no-build-isolation 'draco[gpu]'"
        )
