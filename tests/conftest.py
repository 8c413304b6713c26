"""Settings for the whole suite."""

from __future__ import annotations

from hypothesis import settings

# Deadlines measure the machine, not the code: a busy 2-core CI would fail at random.
settings.register_profile("draco", deadline=None)
settings.load_profile("draco")
