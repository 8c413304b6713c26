"""Several processes, one run: who takes part, what they tell one another, and what is summed.

`torchrun` starts the processes; `joined` makes them a group before anything else happens. Two planes:

- *data*: the sum of gradients, over the default group (NCCL on GPUs, gloo on CPUs), with an ordinary time-out;
- *control*: decisions, records and waiting, over a gloo group that never times out. Every data message follows a
  control message, so ranks that judge slowly are waited for on the control plane and no collective time-out can trip.
  What ends the waiting when a rank dies is `draco.core.watch`.

Tasks are dealt out by rank (`TaskBatch.shard`); every random stream is keyed by task and sample, so the groups of a
batch are the same on any number of ranks, and so is the sum of their gradients up to float rounding.
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
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from draco.core.errors import ConfigError, DracoError
from draco.core.watch import host_name

if TYPE_CHECKING:
    from draco.core.watch import Watch

__all__ = [
    "all_reduce_sum", "alone", "barrier", "broadcast", "check_shared", "gather", "joined", "launched",
    "local_rank", "main_only", "rank", "saving", "world_size",
]  # fmt: skip

T = TypeVar("T")

log = logging.getLogger("draco")

#: of the control group: longer than any run
_FOREVER = timedelta(days=365)
_control: dist.ProcessGroup | None = None
_alone = False
_watch: Watch | None = None


def world_size() -> int:
    """Processes of the run; 1 without a process group, and in `alone`."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() and not _alone else 1


def rank() -> int:
    """This process; 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def local_rank() -> int:
    """This process on its machine; 0 without a process group."""
    return int(os.environ["LOCAL_RANK"]) if world_size() > 1 else 0


def launched() -> int:
    """Processes that the launcher started (torchrun), 1 without one."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 1


@contextmanager
def joined(timeout_s: float = 1800.0, *, gpu: bool = False) -> Iterator[None]:
    """Form the group of the processes that torchrun started; without torchrun nothing happens.

    A fault of any rank ends all of them with its message, see `draco.core.watch`.

    Args:
        timeout_s: of a collective on the data plane.
        gpu: the data plane is NCCL.
    """
    global _control, _watch
    if launched() == 1:
        yield
        return
    from draco.core.watch import Watch

    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", timeout=timedelta(seconds=timeout_s))
    _control = dist.new_group(backend="gloo", timeout=_FOREVER)
    watch = Watch.start(rank(), world_size(), broadcast)
    _watch = watch
    level = log.level
    if rank():
        log.setLevel(logging.WARNING)  # rank 0 speaks
    try:
        yield
        barrier()
    except BaseException as error:
        watch.failed(error)  # does not return where another rank failed first
        raise  # without leaving the group: a broken one would wait for its peers
    finally:
        log.setLevel(level)
        _control = _watch = None
    watch.close()
    dist.destroy_process_group()


def saving() -> AbstractContextManager[Any]:
    """A fault of another rank ends this process after the body, not in it. The body waits for no other rank."""
    return nullcontext() if _watch is None else _watch.saving


@contextmanager
def alone() -> Iterator[None]:
    """What rank 0 does in the body it does by itself: the others take part in nothing, and are waited for nowhere."""
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
    """What rank 0 got out of `work`, on every rank; the others wait.

    Raises:
        DracoError: what `work` raised, the same on every rank.
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
    """Make sure that every rank sees the run folder that rank 0 writes.

    Args:
        run: run folder; rank 0 has made it.
        patience_s: network file systems may show a new file late.

    Raises:
        ConfigError: a host does not.
    """
    if world_size() == 1:
        return
    name = broadcast(f"shared-{secrets.token_hex(8)}.tmp")
    probe = run / name
    if rank() == 0:
        probe.write_text(name, encoding="utf-8")
    barrier()
    until = time.monotonic() + patience_s
    while not (seen := probe.is_file()) and time.monotonic() < until:
        time.sleep(0.2)
    blind = sorted({host for host, saw in gather((host_name(), seen)) if not saw})
    if rank() == 0:
        probe.unlink(missing_ok=True)
    if blind:
        raise ConfigError(
            f"the run folder {run.resolve()} is not shared: {', '.join(blind)} cannot see what rank 0 on "
            f"{gather(host_name())[0]} wrote there; set run= to a folder on a file system that all nodes mount"
        )


@torch.no_grad()
def all_reduce_sum(parameters: Sequence[nn.Parameter], counts: Sequence[float]) -> list[float]:
    """Sum gradients and counts over all ranks in one flat message; a rank without gradients sends zeros.

    Args:
        parameters: trainable parameters in a fixed order; `.grad` is replaced by the sum. Empty where the
            backward pass has summed them (sharded runs).
        counts: numbers to sum along.

    Returns:
        The summed counts.
    """
    if world_size() == 1:
        return list(counts)
    barrier()  # slow judges are waited for here and not inside the message below, which has a time-out
    device = parameters[0].device if parameters else torch.device("cpu")
    parts: list[Tensor] = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([*(part.flatten().float() for part in parts), torch.tensor(counts, device=device)])
    dist.all_reduce(flat, group=None if parameters else _control)
    sizes = [p.numel() for p in parameters]
    *sums, total = torch.split(flat, [*sizes, len(counts)])
    for parameter, value in zip(parameters, sums, strict=True):
        parameter.grad = value.view_as(parameter).to(parameter.dtype)
    return [float(x) for x in total]
