"""Groups of the untrained policy, for scripts that judge without training."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

from omegaconf import DictConfig

from draco.core.errors import ConfigError
from draco.core.types import Group, TaskBatch
from draco.run import archive
from draco.study.judgements import read_groups

__all__ = ["archived_groups", "sample_groups"]


def sample_groups(config: DictConfig, tasks: int | None, samples: int) -> list[Group]:
    """Rollouts of the base policy on the first training tasks, at the training temperature.

    Args:
        config: as composed; a fresh adapter changes nothing, `policy.adapter` would.
        tasks: how many; None = all.
        samples: rollouts a task.
    """
    from draco.run.build import build  # torch and lightning load here
    from draco.run.loader import select_tasks

    config.rubric = {"name": "random", "_target_": "callbacks.rubric.random.RandomRubric", "seed": 0}
    parts = build(config)
    with TemporaryDirectory(prefix="draco-") as scratch, closing(parts):  # logs and adapters of servers
        parts.open(Path(scratch))
        parts.module.configure_model()
        policy = parts.module.policy
        limits = config.limits.max_prompt_tokens, config.limits.max_response_tokens
        chosen = select_tasks(parts.environment, policy, config.env.train_split, tasks, *limits)
        batch = TaskBatch(0, tuple(chosen), samples, "author", config.temperature)
        parts.ready()
        return sorted(parts.stages.rollout.generate(policy, batch), key=lambda g: g.index)


def archived_groups(run: Path, steps: int | None = None) -> list[Group]:
    """Groups of a run's archive, quarantined trajectories included, in the order of training.

    Args:
        run: run folder.
        steps: only the last so many steps.

    Raises:
        ConfigError: nothing is archived there.
    """
    archived = archive.archived_steps(run)
    if not archived:
        raise ConfigError(f"{run} has no archive of trajectories; name the folder of a run")
    return [group for step in (archived[-steps:] if steps else archived) for group in read_groups(run, step)]
