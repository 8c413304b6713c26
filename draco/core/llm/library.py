"""litellm, imported at first use: the import takes three seconds."""

from __future__ import annotations

import os
import warnings
from functools import cache
from typing import Any

__all__ = ["load_litellm"]


@cache
def load_litellm() -> Any:
    """Import litellm and set it up, once a process."""
    # Without this litellm fetches a price table from the network on import.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    # litellm imports more of itself during its first call, and pydantic then warns about types that are not ours.
    warnings.filterwarnings("ignore", message=".*using the `ReadOnly` qualifier", category=UserWarning)
    # litellm makes the request's coroutine on a worker thread; a cancellation just then leaves it unstarted.
    warnings.filterwarnings("ignore", message=".*completion' was never awaited", category=RuntimeWarning)
    import litellm

    litellm.suppress_debug_info = True  # no help text on stdout for every error
    litellm.disable_token_counter = True  # we take the provider's count; litellm's own costs time
    return litellm
