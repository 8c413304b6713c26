"""The processes of a run: how many, where, with which strategy; and their download of the weights."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from draco.config.compose import class_of
from draco.config.rules import check
from draco.core.distributed import barrier, launched, local_rank, main_only, world_size
from draco.core.errors import ConfigError
from draco.policy.sharding import ShardedStrategy

__all__ = ["fetch_weights", "launch_processes", "nearest", "on_gpu", "place", "processes", "sharded", "warn_uneven"]

log = logging.getLogger("draco")


def sharded(config: DictConfig) -> bool:
    """Whether the trainer shards the policy (FSDP2)."""
    strategy = config.trainer.get("strategy")
    return isinstance(strategy, DictConfig) and issubclass(class_of(strategy), ShardedStrategy)


def on_gpu(config: DictConfig) -> bool:
    """Whether the trainer uses GPUs."""
    if config.trainer.get("accelerator") in ("gpu", "cuda"):
        return True
    if config.trainer.get("accelerator") != "auto":
        return False
    import torch

    return torch.cuda.is_available()


def processes(config: DictConfig) -> tuple[int, int]:
    """Number of processes on a node, and number of nodes, that the trainer asks for."""
    devices = _devices(config)
    if devices is None:
        import torch

        local = torch.cuda.device_count() if on_gpu(config) else 1
    else:
        local = len(devices)
    return local, int(config.trainer.get("num_nodes", 1))


def _devices(config: DictConfig) -> Sequence[int] | None:
    """Indices of the devices that the trainer asks for; None: all that there are."""
    devices: Any = config.trainer.get("devices", 1)
    if isinstance(devices, ListConfig):
        return [int(d) for d in devices]
    return None if devices in ("auto", -1, "-1") else range(int(devices))


def launch_processes(config: DictConfig, overrides: list[str], *, sweeping: bool) -> None:
    """Replace this process by torchrun, if the trainer wants several processes on this machine.

    Raises:
        ConfigError: the trainer wants several machines or GPUs that this machine does not have, the job is one of a
            sweep, or the configuration cannot work. It is raised here, once, and not by each of the processes.
    """
    local, nodes = processes(config)
    if launched() > 1 or "TORCHELASTIC_RUN_ID" in os.environ:
        return
    if local * nodes == 1:
        _check_gpus(config)
        return
    script = "train.py" if Path(sys.argv[0]).name == "train.py" else "$(command -v draco) train"
    if nodes > 1:
        raise ConfigError(
            f"trainer.num_nodes is {nodes}: start the job on every node with torchrun --nnodes {nodes} "
            f"--nproc-per-node {local} --rdzv-backend c10d --rdzv-endpoint FIRST_HOST:29500 --rdzv-id NAME {script} … "
            "(scripts/slurm/ of the repository has complete files)"
        )
    if sweeping:
        raise ConfigError(f"a sweep runs in one process and this trainer wants {local}; start one job at a time")
    check(config)
    _check_gpus(config)
    _check_strategy(config)
    named = any(o.split("=", 1)[0] in {"run", "resume"} for o in overrides)
    arguments = [*sys.argv, *([] if named else [f"run={config.run}"])]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(local)]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *launcher, *arguments])


def place(config: DictConfig) -> None:
    """Set the trainer's devices and nodes to the processes that the launcher started.

    Raises:
        ConfigError: the strategy is for one process, this machine lacks the GPUs, or the engine cannot sample from a
            sharded policy.
    """
    if launched() > 1:
        _check_strategy(config)
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        for key, value in {"devices": local, "num_nodes": launched() // local}.items():
            OmegaConf.update(config, f"trainer.{key}", value, force_add=True)
    _check_gpus(config)
    if sharded(config) and class_of(config.engine).in_process and not config.distributed.gather_for_rollouts:
        raise ConfigError(
            "engine=transformers cannot sample from a sharded policy: use engine=vllm (servers), or, if one device can "
            "hold the whole model, distributed.gather_for_rollouts=true, or trainer=ddp"
        )


def _check_strategy(config: DictConfig) -> None:
    if sharded(config) or str(config.trainer.get("strategy", "")).startswith("ddp"):
        return
    raise ConfigError(
        f"several processes and trainer.strategy={config.trainer.get('strategy')}: use trainer=ddp or trainer=fsdp "
        "(ddp_multinode, fsdp_multinode on several machines)"
    )


def _check_gpus(config: DictConfig) -> None:
    """torch's own error, in every process, would only say that some function is missing."""
    if not on_gpu(config):
        return
    import torch

    devices, have = _devices(config), torch.cuda.device_count()
    needed = 1 if devices is None else max(devices, default=-1) + 1
    if needed > have:
        asked = config.trainer.get("devices", 1)
        expected = f"trainer.devices up to {have}" if have else "a machine with GPUs"
        split = "; leave out placement=split, which sets trainer.devices" if isinstance(asked, ListConfig) else ""
        raise ConfigError(
            f"trainer.devices={asked} but this machine has {have} GPUs; expected {expected}; choose trainer=cpu to "
            f"train without GPUs{split}"
        )


def nearest(tasks: int, ranks: int) -> tuple[int, ...]:
    """The numbers of tasks nearest to `tasks` that can be divided evenly among the ranks.

    >>> nearest(16, 3)
    (15, 18)
    """
    below = tasks // ranks * ranks
    return tuple(n for n in (below, below + ranks) if n)


def warn_uneven(tasks: int, ranks: int) -> None:
    """Warn if ranks get unequal numbers of tasks: the result is right, but some ranks wait for others."""
    if tasks % ranks:
        log.warning(
            "tasks_per_step=%d on %d ranks: shares of %d and %d tasks, so some ranks wait%s; nearest even: %s",
            tasks, ranks, tasks // ranks, tasks // ranks + 1, " without any work" if tasks < ranks else "",
            " or ".join(map(str, nearest(tasks, ranks))),
        )  # fmt: skip


def fetch_weights(config: DictConfig) -> None:
    """Download a hub model once on every node, at the commit that rank 0 sees, before the processes read it."""
    path = str(config.policy.get("path", ""))
    if world_size() == 1 or path.startswith("pkg://") or Path(path).expanduser().is_dir():
        return
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        return
    from huggingface_hub import HfApi, snapshot_download

    revision = config.policy.get("revision")
    commit = main_only(lambda: HfApi().model_info(path, revision=revision).sha)
    OmegaConf.update(config, "policy.revision", commit, force_add=True)
    if local_rank() == 0:
        snapshot_download(path, revision=commit)
    barrier()
