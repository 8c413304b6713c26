"""Shared by several test modules."""

from __future__ import annotations

from hydra import compose, initialize_config_module
from omegaconf import DictConfig


def configuration(*overrides: str) -> DictConfig:
    with initialize_config_module("conf", version_base="1.3"):
        return compose("train", list(overrides))
