"""AppWorld without AppWorld: made-up data, and an environment whose fork server only pretends."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import fake_appworld

from draco.env.appworld import AppWorldEnvironment
from draco.env.appworld.inside import data_roots


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two data roots with one task."""
    source = tmp_path / "source"
    for folder in ("tasks/s1_1/ground_truth", "datasets", "base_dbs", "api_docs"):
        (source / "data" / folder).mkdir(parents=True)
    who = {"first_name": "Nora", "last_name": "Quill", "email": "n@example.com", "phone_number": "555"}
    specs = {"instruction": "Count my notes.", "supervisor": who, "datetime": "2023-05-18T12:00:00"}
    (source / "data/tasks/s1_1/specs.json").write_text(json.dumps(specs))
    (source / "data/tasks/s1_1/ground_truth/answer.json").write_text('"canary-answer"')
    (source / "data/tasks/s1_1/ground_truth/metadata.json").write_text('{"difficulty": 3}')
    (source / "data/datasets/train.txt").write_text("s1_1\n")
    assert data_roots.build(source, tmp_path / "aw") == {"train": 1}
    return tmp_path / "aw"


@pytest.fixture
def environment(data: Path) -> Iterator[AppWorldEnvironment]:
    """AppWorld on these roots."""
    environment = AppWorldEnvironment(sys.executable, str(data), server=fake_appworld.__file__, places=2, queue_s=0.1)
    yield environment
    environment.close()
