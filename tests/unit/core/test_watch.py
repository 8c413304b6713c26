"""Who says first what ended a run of several processes, and how long the others can read it; by a clock of our own."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from draco.core import watch
from draco.core.errors import ConfigError, TrainingStopped
from draco.core.watch import Watch


class Ended(Exception):
    """The process would have ended itself."""


class Store:
    """A store in which things happen at their time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, later: dict[float, tuple[str, str]]) -> None:
        self.now, self.kept, self.later = 0.0, dict[str, str](), later
        monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for at in [a for a in self.later if a <= self.now]:
            self.kept.setdefault(*self.later.pop(at))

    def set(self, key: str, value: str) -> None:
        self.kept[key] = value

    def get(self, key: str) -> str:
        return self.kept[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.kept for key in keys)

    def compare_set(self, key: str, _: str, value: str) -> str:
        return self.kept.setdefault(key, value)


def fault(rank: int, message: str) -> tuple[str, str]:
    return "fault", json.dumps({"rank": rank, "message": message, "status": 2, "host": "there"})


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Watch, Store]]:
    def ended(status: int) -> None:
        raise Ended(status)

    def build(rank: int, later: dict[float, tuple[str, str]], world: int = 3) -> tuple[Watch, Store]:
        store = Store(monkeypatch, later)
        made = Watch(rank, world, store, "there")
        made._peers = [{"pid": 1, "host": "there"}] * world
        monkeypatch.setattr(watch.os, "_exit", ended)
        return made, store

    return build


def test_rank_0_says_what_all_ranks_refuse(watching: Any, capsys: pytest.CaptureFixture[str]) -> None:
    made, store = watching(1, {2.0: fault(0, "no such model")})
    with pytest.raises(Ended, match="2"):
        made.failed(ConfigError("no such model"))
    assert "because rank 0 on there ended: no such model" in capsys.readouterr().err
    made, store = watching(1, {})
    made.failed(ConfigError("no such folder on this machine"))  # rank 0 finds nothing wrong
    assert json.loads(store.kept["fault"])["message"] == "no such folder on this machine"
    made, store = watching(1, {9.0: fault(0, "3 steps in a row")})  # after it has written the step's archive
    with pytest.raises(Ended):
        made.failed(TrainingStopped("3 steps in a row"))
    made, store = watching(1, {2.0: fault(0, "too late")})
    made.failed(RuntimeError("of this rank alone"))
    assert json.loads(store.kept["fault"])["message"] == "RuntimeError: of this rank alone"


def test_a_save_is_not_cut_off_by_the_end_of_another_rank(watching: Any) -> None:
    made, _ = watching(0, {0.0: ("gone/1", "1")}, world=2)
    ended: list[int] = []
    watch.os._exit = ended.append
    with made.saving:
        ending = threading.Thread(target=made._end, args=({"rank": 1, "host": "h", "message": "m", "status": 3},))
        ending.start()
        ending.join(0.3)
        assert not ended
    ending.join(30)
    assert ended == [3]


def test_rank_0_holds_the_store_for_a_rank_that_is_slow_to_look(watching: Any) -> None:
    """A rank that finds the store gone knows no more than that rank 0 is."""
    made, store = watching(0, {1.0: ("gone/1", "1"), 9.0: ("gone/2", "1")})
    made.failed(OSError("disk full"))
    assert store.now == pytest.approx(9.0, abs=0.2)


def test_a_dead_rank_is_not_waited_for(watching: Any) -> None:
    made, store = watching(0, {1.0: ("gone/1", "1")})
    with pytest.raises(Ended):
        made._end({"rank": 2, "host": "there", "message": "killed", "status": 1})
    assert store.now == pytest.approx(1.0, abs=0.2)
