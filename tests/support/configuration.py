"""The configuration of a training run, composed as `train.py` composes it."""

from __future__ import annotations

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig


def configuration(*overrides: str) -> DictConfig:
    """The composed configuration, with overrides as on the command line."""
    GlobalHydra.instance().clear()  # a program that composed before may have left it initialised
    with initialize_config_module("conf", version_base="1.3"):
        return compose("train", list(overrides))
