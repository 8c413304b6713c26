"""What the rubric callbacks share: `BaseRubric` hands over records and metrics, `JudgedRubric` asks a judge.

No parameter here can carry an evaluator: a judged rubric cannot read outcomes.
"""

from __future__ import annotations

import secrets
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict, replace
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer

from draco.config.options import Count, Share, checked
from draco.core.background import BackgroundLoop
from draco.core.distributed import barrier, gather, rank, world_size
from draco.core.errors import JudgeError, TrainingStopped
from draco.core.types import Criterion, Failure, Group, Judgement
from draco.judge.client import JudgeClient
from draco.judge.ping import ping
from draco.judge.pipeline import JudgePipeline, Overrides, ProposeCache
from draco.judge.prompts import CALLS
from draco.judge.records import CallRecord, add_metrics, length_metrics, with_rates
from draco.judge.transcript import Caps, read_secret
from draco.judge.votes import Panel
from draco.policy.policy import Policy
from draco.stages import RubricStage, RunContext, Taken

__all__ = ["BaseRubric", "Busy", "JudgedRubric", "judged_without_criteria", "read_secret"]


class BaseRubric(RubricStage):
    """A rubric stage that keeps records of calls and metrics of judgements until they are taken."""

    def __init__(self) -> None:
        super().__init__()
        self._records: deque[CallRecord] = deque()
        self._metrics: list[dict[str, float]] = []

    def take(self) -> Taken:
        """Records of all calls in a fixed order, and counters and rates over all judgements."""
        metrics, self._metrics = self._metrics, []
        taken = []
        while self._records:
            taken.append(self._records.popleft())
        # Attempts before models: a fallback is another model within one call.
        taken.sort(
            key=lambda r: (
                r.step, r.task_id, CALLS.index(r.phase), r.sample, r.repeat, r.attempt, r.model, r.prompt_hash,
            )
        )  # fmt: skip
        return Taken(with_rates(add_metrics(metrics)), calls=taken)


@checked("rubric", max_failed_share="judge.max_failed_share")
class JudgedRubric(BaseRubric):
    """Judges groups by LLM calls on the background loop.

    `judge` takes all groups on the caller's thread and submits each as it arrives, so that the judge works while the
    in-process engine generates. It yields after the last group has arrived: the policy is never updated while it still
    samples.

    A restart keeps the proposals that `propose_cache="run"` reuses, nothing else. Calls in flight are made again, and
    cost nothing where the judge's cache has their replies.
    """

    def __init__(
        self,
        judge: JudgeClient,
        caveats: Sequence[str] = (),
        attribution_overrides: Overrides = "ignore",
        propose_cache: ProposeCache = "group",
        order: Literal["batch", "arrival"] = "batch",
        max_failed_share: Share | None = None,
        max_action_chars: Count = 24_000,
        max_observation_chars: Count = 12_000,
        panel: Panel | None = None,
    ) -> None:
        """Set up the stage.

        Args:
            caveats: added to every prompt, before those of the environment.
            attribution_overrides, propose_cache, panel: see `JudgePipeline`.
            order: `batch` yields judgements by the groups' position in the batch, `arrival` as they are complete.
            max_failed_share: more failed judgements than this share of a batch's trajectories stop the run; None takes
                the judge's own.
            max_action_chars, max_observation_chars: of one step; a longer text is shown without its middle.

        Raises:
            ConfigError: an option is out of range.
        """
        super().__init__()
        if max_failed_share is None:
            max_failed_share = judge.options.max_failed_share
        self.needs_citations = True  #: False skips the attribution calls
        self.client = judge
        self.caveats = tuple(caveats)
        self.order = order
        self.max_failed_share = max_failed_share
        self.pipeline = JudgePipeline(
            judge,
            self.caveats,
            secrets.token_bytes(32),  # until `open` gives that of the run
            attribution_overrides,
            propose_cache,
            sink=self._records.append,
            caps=Caps(max_action_chars, max_observation_chars),
            panel=panel,
        )
        self.busy = Busy()  #: while groups are judged
        self._loop: BackgroundLoop | None = None
        self._model_changes = 0

    @abstractmethod
    def criteria(self, group: Group) -> Sequence[Criterion] | None:
        """The set to judge a group by; None has one proposed for it."""

    def open(self, context: RunContext) -> None:
        """Add the environment's caveats to every prompt, set the secret of the delimiters, place cache and spending in
        the run folder. All ranks together keep the judge's limits."""
        self.needs_citations = context.needs_citations
        self.pipeline.rebind((*self.caveats, *context.caveats), context.secret)
        if context.folder is not None:
            self.client.bind(context.folder, context.seed, rank(), world_size())

    def check(self) -> None:
        """One cheap call to the judge, before anything large is loaded.

        Raises:
            JudgeConfigError: key, model or format is wrong.
            TrainingStopped: a cap on spending is reached.
        """
        try:
            self.ping()
        finally:
            self.close()

    def ready(self, policy: Policy) -> None:
        """Read what earlier processes have spent: every rank does so before any spends more."""
        if world_size() > 1:
            _ = self.client.store
            barrier()

    def ping(self) -> CallRecord | None:
        """Ask the judge, and each other member of an ensemble, one cheap question: is the key right, is the model
        there, does it answer in JSON?

        Returns:
            the record of the call; None: there is nothing to ask yet.

        Raises:
            JudgeConfigError: no.
            TrainingStopped: a cap on spending is reached.
        """
        self.client.load()  # a model of no known provider ends here
        loop = self._background()
        record = loop.submit(ping(self.client, self.pipeline.endpoint)).result()
        for member in self.client.members:
            if member.model != self.client.model:
                loop.submit(ping(self.client, member)).result()
        return record

    def _background(self) -> BackgroundLoop:
        if self._loop is None or self._loop.closed:
            self._loop = BackgroundLoop.shared()
        return self._loop

    def judge(self, groups: Iterable[Group]) -> Iterator[Judgement]:
        """Yield one judgement a group.

        Raises:
            TrainingStopped: more trajectories than `max_failed_share` of the batch, all ranks together, lost their
                judgement, or the judge is gone: nothing of this batch is trained on then.
            JudgeConfigError: the provider refused for good.
        """
        loop = self._background()
        unreachable = self.client.router.unreachable
        pending: dict[Future[Judgement], Group] = {}
        try:
            for group in groups:
                self.before_group(group)
                pending[loop.submit(self._judge_group(group, self.criteria(group)))] = group
            members = sum(len(group.live().trajectories) for group in pending.values())
            lost: list[Failure] = []
            alone = self.client.spend.world == 1  # also in a preflight, where only rank 0 makes calls
            self.attend(pending)
            for future in self._ordered(pending):
                judgement = future.result()
                lost += [f for f in judgement.failures if f.phase != "rollout"]
                self._metrics.append({**judgement.metrics, **length_metrics(pending[future], judgement)})
                if alone:
                    self._stop_if_lost(lost, members)
                yield judgement
            if not alone:
                self._stop_if_lost(*self._of_all_ranks(lost, members))
            if self.client.router.unreachable > unreachable:
                self._stop_if_gone()
        finally:
            for future in pending:
                future.cancel()

    async def _judge_group(self, group: Group, criteria: Sequence[Criterion] | None) -> Judgement:
        with self.busy:
            return await self.pipeline.judge_group(group, criteria, self.needs_citations)

    def take(self) -> Taken:
        before, self._model_changes = self._model_changes, self.client.router.model_changes
        if self._model_changes > before and self._metrics:
            self._metrics[-1]["judge/model_changes"] = float(self._model_changes - before)
        taken, seconds = super().take(), self.busy.take()
        if taken.metrics.get("judge/calls"):
            taken.metrics["time/judge_s"] = seconds
        return taken

    def before_group(self, group: Group) -> None:
        """Called on the caller's thread before a group's calls are submitted."""

    def attend(self, pending: Iterable[Future[Judgement]]) -> None:
        """Called on the caller's thread after all groups were submitted, before the first judgement is waited for."""

    def _ordered(self, pending: dict[Future[Judgement], Group]) -> Iterator[Future[Judgement]]:
        if self.order == "batch":
            yield from sorted(pending, key=lambda future: pending[future].index)
            return
        left = set(pending)
        while left:
            done, left = wait(left, return_when=FIRST_COMPLETED)
            yield from sorted(done, key=lambda future: pending[future].index)

    def _of_all_ranks(self, lost: list[Failure], members: int) -> tuple[list[Failure], int]:
        """Exchange spending, lost judgements and members of the batch with the other ranks; all then decide alike."""
        spend = self.client.spend
        before = spend.agreed
        usd, tokens, losses, sizes = zip(*gather((*spend.own(), lost, members)), strict=True)
        spend.agree(before[0] + sum(usd), before[1] + sum(tokens))
        return [failure for part in losses for failure in part], sum(sizes)

    def _stop_if_lost(self, lost: Sequence[Failure], members: int) -> None:
        if lost and len(lost) > self.max_failed_share * members:
            last = lost[-1]
            raise TrainingStopped(
                f"{len(lost)} of {members} trajectories of this batch lost their judgement, more than "
                f"judge.max_failed_share={self.max_failed_share}; last reason, in {last.phase}: "
                f"{last.reason.removeprefix(f'{last.phase}: ')}"
            )

    def _stop_if_gone(self) -> None:
        """Ask again after calls were given up. A passing fault costs its judgements only; a judge that is gone, the
        batch: an undisturbed run would make another one of it."""
        try:
            self.ping()
        except JudgeError as error:
            raise TrainingStopped(f"the judge no longer answers: {error}") from None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Calls in flight end at once: what they would cost buys nothing any more."""
        self.close()

    def close(self) -> None:
        """End the background loop. The next `judge` starts a new one."""
        if self._loop is not None and not self._loop.closed:
            self._loop.submit(self.client.aclose()).result()
            self._loop.close()  # cancelled calls write their last records
        self.client.close()
        self._loop = None

    def state_dict(self) -> dict[str, Any]:
        """Plain data only, so that checkpoints load with `weights_only`."""
        return {"proposals": {t: [asdict(c) for c in found] for t, found in self.pipeline.proposals.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.pipeline.proposals = {
            task: tuple(Criterion(**(c | {"grounding_references": tuple(c["grounding_references"])})) for c in found)
            for task, found in state_dict.get("proposals", {}).items()
        }


def judged_without_criteria(group: Group, rewards: dict[int, float], failures: Sequence[Failure]) -> Judgement:
    """A judgement with K = 0 whose rewards come from elsewhere.

    Args:
        group: as it was rolled out.
        rewards: R_i by sample, for the members that have one.
        failures: why the others have none; quarantined rollouts are added here.
    """
    lost = [t for t in group.trajectories if t.termination.quarantined]
    quarantined = [Failure(t.sample, "rollout", t.termination.value) for t in lost]
    live = group.live().trajectories
    members = tuple(t for t in live if t.sample in rewards)
    failures = [*quarantined, *failures]
    metrics = {"judge/members": float(len(live)), "judge/failed": float(len(failures) - len(quarantined))}
    if len(members) < 2:
        reason = f"{len(members)} member(s) left, a group needs 2"
        failures += [Failure(t.sample, "group", reason) for t in members]
        members, metrics["judge/skipped_groups"] = (), 1.0
    failures.sort(key=lambda f: f.sample)
    left = replace(group, trajectories=members)
    return Judgement(left, (), (), (), tuple(rewards[t.sample] for t in members), tuple(failures), with_rates(metrics))


class Busy:
    """Seconds in which at least one of several jobs is under way. A job is a `with` block. Thread-safe.

    Args:
        clock: seconds; replaced in tests.

    >>> hands = iter([0.0, 4.0, 10.0, 11.0, 12.0])
    >>> busy = Busy(lambda: next(hands))
    >>> with busy:  # 0 to 4; the inner job adds nothing
    ...     with busy:
    ...         pass
    >>> with busy:  # 10 to 11
    ...     pass
    >>> busy.take()
    5.0
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._jobs, self._since, self._seconds = 0, 0.0, 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._jobs:
                self._since = self._clock()
            self._jobs += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._jobs -= 1
            if not self._jobs:
                self._seconds += self._clock() - self._since

    def restart(self) -> None:
        """Forget the time so far: until now the jobs under way only waited."""
        with self._lock:
            self._since, self._seconds = self._clock(), 0.0

    def take(self) -> float:
        """Seconds since the last `take`; those of jobs still under way come with a later one."""
        with self._lock:
            seconds, self._seconds = self._seconds, 0.0
            return seconds
