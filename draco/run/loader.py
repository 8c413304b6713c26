"""Batches of tasks for training and evaluation. A batch depends only on the seed and its number."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import numpy as np

from draco.core.errors import ConfigError
from draco.core.types import Task, TaskBatch
from draco.env.base import Environment
from draco.policy.policy import Policy

__all__ = ["SHOWN_IDS", "EvalLoader", "TaskLoader", "select_tasks"]

log = logging.getLogger("draco")


class TaskLoader:
    """Training batches: every epoch is a new permutation of the tasks, cut into full batches; the remainder is dropped.

    Args:
        tasks: the training split.
        steps: number of batches of the run.
        tasks_per_step: tasks in a batch.
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
        self.position = 0  #: number of batches done

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches in one pass over the tasks."""
        return len(self.tasks) // self.tasks_per_step

    def batch(self, number: int) -> TaskBatch:
        """The batch with this 0-based number."""
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
    """All evaluation tasks as one batch, with n rollouts of each."""

    def __init__(self, tasks: Sequence[Task], *, n: int, temperature: float, purpose: str = "eval") -> None:
        if n < 1:
            raise ConfigError(f"eval.n is {n}; expected 1 or more")
        self._batch = TaskBatch(-1, tuple(tasks), n, purpose, temperature)

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[TaskBatch]:
        yield self._batch


SHOWN_IDS = 5  #: number of task ids in a message


def select_tasks(
    environment: Environment,
    policy: Policy,
    split: str,
    limit: int | None,
    max_prompt: int,
    max_response: int,
    *,
    may_outgrow: bool = False,
) -> list[Task]:
    """Tasks of a split whose prompt fits; a warning counts the others and names the first ones.

    Args:
        environment, policy: of the run.
        split: of the environment.
        limit: number of tasks to take from the start of the split; None = all.
        max_prompt, max_response: `limits`, in tokens.
        may_outgrow: rollouts may exceed the policy's context (a resumed run cannot change its limits).

    Raises:
        ConfigError: no such split, it is empty, no prompt fits, or a rollout may exceed the policy's context.
    """
    tasks = environment.tasks(split)[:limit]
    if not tasks:
        raise ConfigError(
            f"split {split!r} of env={environment.name} has no tasks; splits: {', '.join(environment.splits)}"
        )
    lengths = {t.id: policy.prompt_tokens(environment.opening(t)) for t in tasks}
    fitting = [t for t in tasks if lengths[t.id] <= max_prompt]
    overlong = [t.id for t in tasks if lengths[t.id] > max_prompt]
    if overlong:
        log.warning(
            "%d of %d tasks of %s have prompts over limits.max_prompt_tokens=%d and are left out: %s%s",
            len(overlong), len(tasks), split, max_prompt, ", ".join(overlong[:SHOWN_IDS]),
            f" and {len(overlong) - SHOWN_IDS} more" if len(overlong) > SHOWN_IDS else "",
        )  # fmt: skip
    if not fitting:
        raise ConfigError(
            f"every prompt of split {split!r} is longer than limits.max_prompt_tokens={max_prompt} "
            f"(shortest: {min(lengths.values())} tokens); raise the limit"
        )
    longest, context = max(lengths[t.id] for t in fitting), policy.context
    if context is not None and longest + max_response > context and not may_outgrow:
        room = context - longest
        shorter = f"limits.max_response_tokens={room} or less" if room > 0 else "a smaller limits.max_prompt_tokens"
        raise ConfigError(
            f"a rollout of split {split!r} may take {longest + max_response} tokens (its longest prompt {longest}, "
            f"limits.max_response_tokens={max_response}), and policy.path={policy.path} was made for {context}; set "
            f"{shorter}, or choose a policy with a longer context"
        )
    return fitting
