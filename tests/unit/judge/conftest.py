"""The fake judge, anew for every test."""

from __future__ import annotations

import pytest
from support.fake_judge import FakeJudge


@pytest.fixture
def fake() -> FakeJudge:
    return FakeJudge()
