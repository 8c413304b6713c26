"""The custom provider `draco-scripted` of litellm. Importing this module does not load litellm."""

from __future__ import annotations

from draco.env.desk.judge.general import GENERAL

__all__ = ["TITLES", "register"]

PROVIDER = "draco-scripted"
#: titles of the general criteria that this judge has rules for; any other general criterion is not applicable to it
TITLES = frozenset(GENERAL)


def register() -> None:
    """Make `draco-scripted/…` known to litellm. Safe to call twice."""
    import litellm

    from draco.env.desk.judge.handler import DeskJudge

    others = [entry for entry in litellm.custom_provider_map if entry["provider"] != PROVIDER]
    litellm.custom_provider_map = [*others, {"provider": PROVIDER, "custom_handler": DeskJudge()}]
