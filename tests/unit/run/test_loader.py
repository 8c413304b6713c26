"""The loader is a pure function of the batch number."""

from __future__ import annotations

import pytest
from support.factory import tasks

from draco.core.errors import ConfigError
from draco.run.loader import EvalLoader, TaskLoader

TASKS = tasks(10)


def loader(**changes: int) -> TaskLoader:
    options = {"steps": 7, "tasks_per_step": 3, "group_size": 2, "seed": 0} | changes
    return TaskLoader(TASKS, **options)  # type: ignore[arg-type]


def test_epochs_are_permutations_with_the_remainder_dropped() -> None:
    batches = list(loader())
    assert len(batches) == len(loader()) == 7
    for epoch in (batches[:3], batches[3:6]):
        ids = [t.id for b in epoch for t in b.tasks]
        assert len(ids) == len(set(ids)) == 9
    assert [t.id for b in batches[:3] for t in b.tasks] != [t.id for b in batches[3:6] for t in b.tasks]


def test_resume_continues_the_same_sequence() -> None:
    whole, resumed = list(loader()), loader()
    resumed.load_state_dict({"position": 4})
    assert list(resumed) == whole[4:]
    assert len(resumed) == 3
    assert resumed.state_dict() == {"position": 4}


def test_seed_changes_the_order() -> None:
    assert next(iter(loader())).tasks != next(iter(loader(seed=1))).tasks


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 1}, "group_size is 1"),
        ({"tasks_per_step": 11}, "set tasks_per_step to 10 or less"),
        ({"tasks_per_step": 0}, "tasks_per_step ≥ 1"),
        ({"steps": -1}, "steps ≥ 0"),
    ],
)
def test_bad_sizes(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loader(**changes)


def test_eval_loader_is_one_batch() -> None:
    (batch,) = EvalLoader(TASKS, n=3, temperature=0.5)
    assert (batch.step, batch.group_size, batch.temperature, batch.purpose) == (-1, 3, 0.5, "eval")
    with pytest.raises(ConfigError, match=r"eval\.n"):
        EvalLoader(TASKS, n=0, temperature=1.0)
