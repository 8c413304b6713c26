"""The engine protocol: what drives rollouts, wherever the sampling happens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Generic

from typing_extensions import TypeVar

from draco.rollout.loop import AgentLoop
from draco.rollout.rollout import Rollout

__all__ = ["Engine", "at_a_time"]

if TYPE_CHECKING:
    from draco.policy.policy import Policy

R = TypeVar("R", bound=AgentLoop, default=Rollout)  #: what it drives


def at_a_time(rollouts: Sequence[AgentLoop], most: int) -> int:
    """How many of the rollouts may be on their way at once: `most`, or fewer where their environment has fewer places.

    One beyond that would hold a worker thread while it waits for a place that another gives back only by a thread.
    """
    return min([most, *(r.episode.places for r in rollouts if r.episode.places is not None)])


class Engine(ABC, Generic[R]):
    """Samples from the policy's current weights.

    `run` is all that an engine must do. One that needs more than the process (servers) gets it in `open` and gives it
    back in `close`; both may be called again after `close`.
    """

    #: mean |Δ log-prob| between engine and trainer, in nats a token, above which a batch makes no update and the run
    #: stops; None never stops it
    max_mismatch: float | None = None
    #: it samples in this process with the trainer's own weights: of a sharded policy it needs the whole model
    in_process: bool = False
    #: before an update, the batch must be judged completely, and `free_memory` be called
    frees_memory: bool = False
    #: 1: a batch rolls out in the background (`begin`) while the batch before is judged and trained; 0: never
    staleness: int = 0

    def check(self) -> None:
        """Find in seconds, before any weights are loaded, what cannot work; starts nothing.

        Raises:
            ConfigError: a component or a server is not there.
        """

    def open(self, policy: Policy, run: Path, *, temperature: float) -> None:
        """Prepare before the first rollout; what cannot work is found here.

        Args:
            run: run folder.
            temperature: of training rollouts.

        Raises:
            ConfigError: the engine cannot be used as configured.
        """

    def free_memory(self) -> None:
        """The batch is judged: free memory for the update. Called on every rank at the same point."""

    def close(self) -> None:
        """Release what `open` took. Safe to call twice."""

    @abstractmethod
    def run(self, policy: Policy, rollouts: Sequence[R], *, temperature: float) -> Iterator[R]:
        """Drive every rollout to its end and yield each as soon as it has ended, in the order of ending."""

    def begin(self, policy: Policy, rollouts: Sequence[R], *, temperature: float) -> Iterator[R]:
        """Start what `run` does, with the current weights, and return at once: the iterator yields what has ended.

        Only where `staleness` is 1. Of several ranks all must call it at the same place, with rollouts or without.
        A fault on the way is raised by the iterator.
        """
        raise NotImplementedError(f"{type(self).__name__} does not roll out in the background")

    @property
    def context(self) -> int | None:
        """Tokens of prompt and reply that are served to one conversation, once open; None: what the model can."""
        return None

    def judge_endpoint(self) -> tuple[str, str, str] | None:
        """Where `rubric=self_judge` can ask the policy with its current adapter over an OpenAI-compatible API.

        Asked anew for every batch, after its rollouts have begun: the name may change with the policy's version.

        Returns:
            (address that ends in /v1, name of the model there, API key or an empty text); None: no such server, the
            engine itself answers through `run`.
        """
        return None

    def take_metrics(self) -> dict[str, float]:
        """`engine/*` metrics since the last call."""
        return {}
