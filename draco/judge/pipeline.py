"""The calls of one group: propose, merge, score, attribute, and who leaves the group (Section 3.2, Appendix F).

    propose_task (1) → propose_rollout (G) → merge (1) → score (G) → dropout → attribute (G)

20 calls for G = 6; 14 where the credit stage needs no citations; 12 or 6 with a static set. What each prompt shows, and
whether score and attribution are one call, is the view's choice (`draco.judge.views`); who scores is the panel's
(`draco.judge.votes`).

Quarantined rollouts leave before the first call. A rollout whose own call failed leaves before statistics, so dropout
and rewards are those of the members that are left at the end. `attribute` needs dropout before that: it is computed
over the scored members, and again after the attributions. A criterion survives only if a member failed it, so with
fewer members none comes back, and whatever survives at the end was attributed. An override never changes which
criteria survive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar

from draco.config.options import checked
from draco.core.errors import ConfigError, JudgeConfigError, JudgeError
from draco.core.types import Criterion, Failure, Group, Judgement, Trajectory
from draco.judge.client import JudgeClient
from draco.judge.endpoints import JudgeEndpoint
from draco.judge.prompts import criteria_block, messages, prompt_version
from draco.judge.records import CallRecord, Counters, call_metrics, with_rates
from draco.judge.replies import Attributed, Scored, check_assessments, check_attributions, check_criteria, check_scores
from draco.judge.requests import JudgeRequest
from draco.judge.transcript import LEAST_SECRET, Blocks, Caps
from draco.judge.verdicts import count_scores, judgement_of, surviving
from draco.judge.views import VIEWS
from draco.judge.votes import Ballot, Panel, Voter, panel_of

__all__ = ["JudgePipeline"]

T = TypeVar("T")
Overrides = Literal["ignore", "apply"]
ProposeCache = Literal["group", "run"]


def _check_secret(secret: bytes) -> None:
    if len(secret) < LEAST_SECRET:
        raise ConfigError(
            f"the transcript secret must have at least {LEAST_SECRET} bytes; take secrets.token_bytes(32)"
        )


@dataclass(slots=True)
class _Run:
    """One group on its way through the calls."""

    group: Group
    blocks: Blocks
    records: list[CallRecord] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)
    deadline: float | None = None  #: time.monotonic() after which calls fail; None = none

    def need_two(self) -> None:
        """See that the group has members left to compare."""
        members = self.group.trajectories
        if len(members) < 2:
            reason = f"{len(members)} member(s) left, a group needs 2"
            self.failures.extend(Failure(t.sample, "group", reason) for t in members)
            raise _Skipped


class _Skipped(Exception):
    """The group cannot go on; its failures are recorded."""


async def _settled(calls: Sequence[Awaitable[T]]) -> list[T | BaseException]:
    """Results and errors of all calls, made at once."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        for task in tasks:  # cancelled from outside: leave nothing behind
            task.cancel()


async def _together(calls: Sequence[Awaitable[T]]) -> list[T]:
    """Results of all calls, made at once; the first error in their order if any failed."""
    if len(calls) == 1:
        return [await calls[0]]
    results = await _settled(calls)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


@checked("rubric")
class JudgePipeline:
    """Judges groups with one client. Holds no state but the proposals that `propose_cache="run"` reuses."""

    def __init__(
        self,
        client: JudgeClient,
        caveats: Sequence[str] = (),
        secret: bytes = b"",
        attribution_overrides: Overrides = "ignore",
        propose_cache: ProposeCache = "group",
        sink: Callable[[CallRecord], None] | None = None,
        caps: Caps | None = None,
        panel: Panel | None = None,
    ) -> None:
        """Set up a pipeline.

        Args:
            client: carries the calls; its options name the view and the members of an ensemble.
            caveats: what a judge should know about the environment; added to every prompt.
            secret: keys the transcript delimiters; at least 16 bytes.
            attribution_overrides: `ignore`: the scored verdict stands in R, and the credit stage leaves an overridden
                verdict out of every Q (`Verdict.override` marks it). `apply`: the overriding verdict replaces it in
                both.
            propose_cache: `group`: propose_task once a group; `run`: its criteria are reused for the same task.
            sink: gets a record of every attempt of every call, on the thread of the event loop.
            caps: longest action and observation that a prompt shows in full.
            panel: who scores; None: the client's members, or its model alone.

        Raises:
            ConfigError: an option or the secret cannot work.
        """
        _check_secret(secret)
        self.client = client
        self.view = VIEWS[client.options.plan]
        self.panel = panel or panel_of(client.members, client.options.ensemble)
        self.endpoint: JudgeEndpoint | None = None  #: whom to ask; None: the client's model and its fallbacks
        self.salt = ""  #: part of every cache key: the adapter's hash where the policy judges
        self.caps = caps or Caps()
        self.caveats = tuple(caveats)
        self.attribution_overrides = attribution_overrides
        self.propose_cache = propose_cache
        self.proposals: dict[str, tuple[Criterion, ...]] = {}  #: by task id; filled with propose_cache="run" only
        self._secret = secret
        self._sink = sink

    def rebind(self, caveats: Sequence[str], secret: bytes = b"") -> None:
        """Set the caveats, and the secret if one is given."""
        self.caveats = tuple(caveats)
        if secret:
            _check_secret(secret)
            self._secret = secret

    async def judge_group(
        self, group: Group, criteria: Sequence[Criterion] | None = None, citations: bool = True
    ) -> Judgement:
        """Judge one group.

        Args:
            group: as it was rolled out, quarantined members included.
            criteria: a fixed set; None proposes one for this group.
            citations: False skips the attribution calls.

        Returns:
            the judgement over the members that are left; an empty group when it was skipped.

        Raises:
            JudgeConfigError: the provider refused for good.
        """
        run = _Run(group.live(), Blocks(self._secret, self.caps), deadline=self.client.group_deadline())
        for t in group.trajectories:
            if t.termination.quarantined:
                run.failures.append(Failure(t.sample, "rollout", t.termination.value))
        run.counters.count("judge/members", len(run.group.trajectories))
        try:
            judgement = await self._judge(run, criteria, citations)
        except _Skipped:
            run.counters.count("judge/skipped_groups")
            judgement = Judgement(replace(run.group, trajectories=()), (), (), (), ())
        run.counters.count("judge/failed", sum(f.phase != "rollout" for f in run.failures))
        metrics = with_rates(run.counters | call_metrics(run.records))
        failures = tuple(sorted(run.failures, key=lambda f: f.sample))
        return replace(judgement, failures=failures, metrics=metrics)

    async def propose_group(self, group: Group) -> tuple[Criterion, ...]:
        """The set that `judge_group` would judge by; empty where the group was skipped."""
        run = _Run(group.live(), Blocks(self._secret, self.caps))
        try:
            run.need_two()
            return await self._propose(run)
        except _Skipped:
            return ()

    async def reduce(self, criteria: Sequence[Criterion]) -> tuple[Criterion, ...]:
        """One general set, ≤ 24, out of criteria of single tasks."""
        request = JudgeRequest(
            phase="reduce",
            messages=messages("reduce", [criteria_block(criteria, "Criteria of single tasks")], self.caveats),
            check=partial(check_criteria, "merge"),
            sink=self._sink or (lambda record: None),
            version=prompt_version("reduce"),
        )
        return await self.client.call(request)

    # -- a group, step by step -----------------------------------------------------------------------------------

    async def _judge(self, run: _Run, criteria: Sequence[Criterion] | None, citations: bool) -> Judgement:
        run.need_two()
        criteria = tuple(await self._propose(run) if criteria is None else criteria)
        run.counters.count("rubric/criteria", len(criteria))
        run.counters.count("rubric/groups")
        scored, attributed = await self._score(run, criteria, citations)
        count_scores(run.group, scored, run.counters)
        if citations and not self.view.lean:
            attributed = await self._attribute(run, criteria, scored)
        apply = self.attribution_overrides == "apply"
        return judgement_of(run.group, criteria, scored, attributed, run.counters, apply=apply)

    async def _propose(self, run: _Run) -> tuple[Criterion, ...]:
        """≤ 15 criteria from the request, ≤ 10 from each attempt, and ≤ 24 of them after the merge."""
        first = await self._or_skip(run, "propose_task", self._propose_task(run))

        async def reveal(t: Trajectory) -> tuple[Criterion, ...]:
            material = self.view.propose_rollout(run.blocks, t, first)
            check = partial(check_criteria, "propose_rollout")
            return await self._call(run, "propose_rollout", material, check, t.sample)

        revealed = await self._each(run, "propose_rollout", reveal)
        members = run.group.trajectories
        proposed = [*first, *(c for t in members for c in revealed[t.sample])]
        candidates = self.view.candidates(proposed, members)
        run.counters.count("rubric/proposed", len(proposed))
        run.counters.count("rubric/candidates", len(candidates))
        material = self.view.merge(run.blocks, members, revealed, candidates)
        merge = self._call(run, "merge", material, partial(check_criteria, "merge"))
        return await self._or_skip(run, "merge", merge)

    async def _propose_task(self, run: _Run) -> tuple[Criterion, ...]:
        task = run.group.task
        if task.id in self.proposals:
            return self.proposals[task.id]
        material = self.view.propose_task(run.blocks, run.group.trajectories[0])
        found = await self._call(run, "propose_task", material, partial(check_criteria, "propose_task"))
        # First come, first kept: two groups of one task in a batch must not disagree afterwards.
        return self.proposals.setdefault(task.id, found) if self.propose_cache == "run" else found

    async def _score(
        self, run: _Run, criteria: tuple[Criterion, ...], citations: bool
    ) -> tuple[dict[int, tuple[Scored, ...]], dict[int, dict[int, Attributed]]]:
        """[K] scores by sample, and attributions by sample and criterion where the view makes them in the same call."""
        if not criteria:
            return {t.sample: () for t in run.group.trajectories}, {}

        async def ballot(t: Trajectory, voter: Voter) -> Ballot:
            material = self.view.score(run.blocks, t, criteria)
            if self.view.lean and citations:
                assess = partial(check_assessments, criteria, len(t.steps))
                return await self._call(run, "assess", material, assess, t.sample, voter)
            return await self._call(run, "score", material, partial(check_scores, criteria), t.sample, voter), None

        voters = self.panel.voters
        ballots = await self._each(run, "score", lambda t: _together([ballot(t, voter) for voter in voters]))
        decided = self.panel.decide(ballots)
        for name, value in decided.counters.items():
            run.counters.count(name, value)
        return decided.scored, decided.attributed

    async def _attribute(
        self, run: _Run, criteria: Sequence[Criterion], scored: dict[int, tuple[Scored, ...]]
    ) -> dict[int, dict[int, Attributed]]:
        """Attributions by sample and criterion, of the criteria that survive dropout."""
        kept = [k for k, keep in enumerate(surviving(run.group, scored)) if keep]
        if not kept:
            return {}
        subset = [criteria[k] for k in kept]

        async def one(t: Trajectory) -> dict[int, Attributed]:
            material = self.view.attribute(run.blocks, t, subset, [scored[t.sample][k] for k in kept])
            check = partial(check_attributions, subset, len(t.steps))
            return dict(zip(kept, await self._call(run, "attribute", material, check, t.sample), strict=True))

        return await self._each(run, "attribute", one)

    # -- calls ---------------------------------------------------------------------------------------------------

    async def _call(
        self,
        run: _Run,
        phase: str,
        material: Sequence[str],
        check: Callable[[Any], tuple[T, str | None]],
        sample: int = -1,
        voter: Voter | None = None,
    ) -> T:
        def keep(record: CallRecord) -> None:
            run.records.append(record)
            if self._sink is not None:
                self._sink(record)

        return await self.client.call(
            JudgeRequest(
                phase=phase,
                messages=messages(phase, material, self.caveats, lean=self.view.lean),
                check=check,
                sink=keep,
                task_id=run.group.task.id,
                sample=sample,
                step=run.group.step,
                deadline=run.deadline,
                version=prompt_version(phase, lean=self.view.lean),
                repeat=voter.repeat if voter else 0,
                salt=self.salt,
                endpoint=(voter and voter.endpoint) or self.endpoint,
            )
        )

    async def _or_skip(self, run: _Run, phase: str, call: Awaitable[T]) -> T:
        """The result of a call on the whole group, which is skipped if the call fails."""
        try:
            return await call
        except JudgeConfigError:
            raise
        except JudgeError as error:
            run.failures.extend(Failure(t.sample, phase, str(error)) for t in run.group.trajectories)
            raise _Skipped from error

    async def _each(self, run: _Run, phase: str, call: Callable[[Trajectory], Awaitable[T]]) -> dict[int, T]:
        """One call a member, all at once; members whose call failed leave the group. Results by sample."""
        members = run.group.trajectories
        results = await _settled([call(t) for t in members])
        good: dict[int, T] = {}
        for t, result in zip(members, results, strict=True):
            if not isinstance(result, BaseException):
                good[t.sample] = result
            elif isinstance(result, JudgeError) and not isinstance(result, JudgeConfigError):
                run.failures.append(Failure(t.sample, phase, str(result)))
            else:
                raise result
        run.group = replace(run.group, trajectories=tuple(t for t in members if t.sample in good))
        run.need_two()
        return good
