"""A sized, resumable loader of task batches: a pure function of (seed, batch number), so its state is one integer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from draco.core.errors import ConfigError
from draco.core.types import Task, TaskBatch

__all__ = ["EvalLoader", "TaskLoader"]


class TaskLoader:
    """Training batches: every epoch is a new permutation of the tasks, cut into whole batches, remainder dropped.

    Args:
        tasks: the training split.
        steps: number of batches of the run.
        tasks_per_step: tasks of a batch.
        group_size: G.
        seed: of the permutations.
        temperature: sampling temperature.

    Raises:
        ConfigError: no tasks, or fewer than a batch needs, or a size below its minimum.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        steps: int,
        tasks_per_step: int,
        group_size: int,
        seed: int,
        temperature: float = 1.0,
    ) -> None:
        if steps < 0 or tasks_per_step < 1:
            raise ConfigError(f"expected steps ≥ 0 and tasks_per_step ≥ 1, got {steps} and {tasks_per_step}")
        if group_size < 2:
            raise ConfigError(f"group_size is {group_size}; GRPO compares rollouts of a group: use 2 or more")
        if len(tasks) < tasks_per_step:
            raise ConfigError(
                f"tasks_per_step is {tasks_per_step}, but the training split has {len(tasks)} usable tasks; "
                f"set tasks_per_step to {max(len(tasks), 1)} or less"
            )
        self.tasks, self.steps = tuple(tasks), steps
        self.tasks_per_step, self.group_size = tasks_per_step, group_size
        self.seed, self.temperature = seed, temperature
        self.position = 0  #: batches consumed

    @property
    def steps_per_epoch(self) -> int:
        """Batches of one pass over the tasks."""
        return len(self.tasks) // self.tasks_per_step

    def batch(self, number: int) -> TaskBatch:
        """Batch `number`, 0-based."""
        epoch, offset = divmod(number, self.steps_per_epoch)
        order = np.random.Generator(np.random.Philox(key=[self.seed, epoch])).permutation(len(self.tasks))
        chosen = order[offset * self.tasks_per_step : (offset + 1) * self.tasks_per_step]
        tasks = tuple(self.tasks[i] for i in chosen)
        return TaskBatch(number, tasks, self.group_size, "train", self.temperature)

    def __len__(self) -> int:
        return self.steps - self.position

    def __iter__(self) -> Iterator[TaskBatch]:
        for number in range(self.position, self.steps):
            yield self.batch(number)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class EvalLoader:
    """All evaluation tasks as one batch, n runs a task."""

    def __init__(self, tasks: Sequence[Task], *, n: int, temperature: float, purpose: str = "eval") -> None:
        if n < 1:
            raise ConfigError(f"eval.n is {n}; expected 1 or more")
        self._batch = TaskBatch(-1, tuple(tasks), n, purpose, temperature)

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[TaskBatch]:
        yield self._batch
