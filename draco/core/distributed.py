"""A run of several processes: how they find each other, exchange values, and sum gradients.

`torchrun` starts the processes; `joined` makes them a group before anything else happens. There are two groups:

- *data*: sums of gradients, over the default group (NCCL on GPUs, gloo on CPUs), with an ordinary time-out;
- *control*: decisions, records and waiting, over a gloo group that never times out. A message on the control group
  precedes every message on the data group. Ranks with slow judges are waited for there, so the time-out of the data
  group is never reached. If a rank dies, `draco.core.watch` ends the waiting.

The tasks of a batch are divided among ranks (`TaskBatch.shard`). Every random stream is keyed by task and sample, so
the groups of a batch are the same on any number of ranks, and so is the sum of gradients up to float rounding.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from draco.core.errors import ConfigError, DracoError
from draco.core.watch import Watch, host_name

__all__ = [
    "all_reduce_sum", "alone", "barrier", "broadcast", "check_shared", "gather", "joined", "launched",
    "local_rank", "main_only", "rank", "saving", "world_size",
]  # fmt: skip

T = TypeVar("T")

log = logging.getLogger("draco")

#: time-out of the control group: longer than any run
_FOREVER = timedelta(days=365)
_control: dist.ProcessGroup | None = None
_alone = False
_watch: Watch | None = None


def world_size() -> int:
    """Number of processes of the run; 1 without a process group, and within `alone`."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() and not _alone else 1


def rank() -> int:
    """Number of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def local_rank() -> int:
    """Number of this process on its machine; 0 without a process group."""
    return int(os.environ["LOCAL_RANK"]) if world_size() > 1 else 0


def launched() -> int:
    """Number of processes that torchrun started; 1 without torchrun."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 1


@contextmanager
def joined(timeout_s: float = 1800.0, *, gpu: bool = False) -> Iterator[None]:
    """The processes that torchrun started are one group within; without torchrun this does nothing.

    An error of any rank ends all of them with its message, see `draco.core.watch`.

    Args:
        timeout_s: of a collective of the data group.
        gpu: the data group uses NCCL.
    """
    global _control, _watch
    if launched() == 1:
        yield
        return
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", timeout=timedelta(seconds=timeout_s))
    _control = dist.new_group(backend="gloo", timeout=_FOREVER)
    watch = Watch.start(rank(), world_size(), broadcast)
    _watch = watch
    level = log.level
    if rank():
        log.setLevel(logging.WARNING)  # rank 0 alone logs
    try:
        yield
        barrier()
    except BaseException as error:
        watch.failed(error)  # does not return if another rank failed first
        raise  # and do not destroy the group: that would wait for ranks that are gone
    finally:
        log.setLevel(level)
        _control = _watch = None
    watch.close()
    dist.destroy_process_group()


def saving() -> AbstractContextManager[Any]:
    """A fault of another rank ends this process not within, but after it. The body must not wait for other ranks."""
    return nullcontext() if _watch is None else _watch.saving


@contextmanager
def alone() -> Iterator[None]:
    """Rank 0 works within as if it were the only process; the other ranks do not take part."""
    global _alone
    _alone = True
    try:
        yield
    finally:
        _alone = False


def barrier() -> None:
    """Wait for all ranks, however long it takes."""
    if world_size() > 1:
        dist.barrier(group=_control)


def broadcast(value: T | None = None) -> T:
    """Rank 0's value on every rank."""
    if world_size() == 1:
        return value  # type: ignore[return-value]
    values = [value]
    dist.broadcast_object_list(values, src=0, group=_control)
    return values[0]  # type: ignore[return-value]


def main_only(work: Callable[[], T]) -> T:
    """Call `work` on rank 0, and return its result on every rank; the others wait.

    Raises:
        DracoError: raised by `work`; it is raised on every rank.
    """
    if world_size() == 1:
        return work()
    outcome: tuple[Any, DracoError | None] = (None, None)
    if rank() == 0:
        try:
            outcome = (work(), None)
        except DracoError as error:
            outcome = (None, error)
    value, failure = broadcast(outcome)
    if failure is not None:
        raise failure
    return value  # type: ignore[no-any-return]


def gather(value: Any) -> list[Any]:
    """The value of every rank, in rank order, on every rank."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value, group=_control)
    return values


def check_shared(run: Path, patience_s: float = 10.0) -> None:
    """Check that every rank sees the run folder that rank 0 writes.

    Args:
        run: run folder; rank 0 has created it.
        patience_s: seconds to wait, because network file systems may show a new file late.

    Raises:
        ConfigError: a machine does not see it.
    """
    if world_size() == 1:
        return
    name = broadcast(f"shared-{secrets.token_hex(8)}.tmp")
    file = run / name
    if rank() == 0:
        file.write_text(name, encoding="utf-8")
    barrier()
    until = time.monotonic() + patience_s
    while not (seen := file.is_file()) and time.monotonic() < until:
        time.sleep(0.2)
    blind = sorted({host for host, saw in gather((host_name(), seen)) if not saw})
    if rank() == 0:
        file.unlink(missing_ok=True)
    if blind:
        raise ConfigError(
            f"the run folder {run.resolve()} is not shared: {', '.join(blind)} cannot see what rank 0 on "
            f"{gather(host_name())[0]} wrote there; set run= to a folder on a file system that all nodes mount"
        )


@torch.no_grad()
def all_reduce_sum(parameters: Sequence[nn.Parameter], counts: Sequence[float]) -> list[float]:
    """Sum gradients and counts over all ranks in one flat message; a rank without gradients sends zeros.

    Args:
        parameters: trainable parameters in a fixed order; `.grad` is replaced by the sum. Empty if the backward pass
            has summed the gradients already (sharded runs).
        counts: numbers that are summed in the same message.

    Returns:
        The summed counts.
    """
    if world_size() == 1:
        return list(counts)
    barrier()  # wait for slow ranks here: the message below has a time-out
    device = parameters[0].device if parameters else torch.device("cpu")
    parts: list[Tensor] = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([*(part.flatten().float() for part in parts), torch.tensor(counts, device=device)])
    dist.all_reduce(flat, group=None if parameters else _control)
    sizes = [p.numel() for p in parameters]
    *sums, total = torch.split(flat, [*sizes, len(counts)])
    for parameter, value in zip(parameters, sums, strict=True):
        parameter.grad = value.view_as(parameter).to(parameter.dtype)
    return [float(x) for x in total]
