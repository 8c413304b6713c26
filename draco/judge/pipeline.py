"""The calls of one group: propose, merge, score, attribute, and what leaves the group on the way (DRACO, Section 3).

    propose_task (1) → propose_rollout (G) → merge (1) → score (G) → dropout → attribute (G)

About 20 calls for G = 6; 14 where the credit stage needs no citations; 12 or 6 with a static set. What each call shows,
and whether score and attribution are one, is the plan's choice (`draco.judge.views`); who scores is the panel's
(`draco.judge.votes`).

Who leaves, and when: quarantined rollouts before anything; a rollout whose own call failed, before statistics.
Dropout and rewards are computed over the members that are left at the end. Dropout is needed before `attribute`, so
it is computed once over the scored members to know what to attribute, and again if attribution removed somebody. A
criterion survives only if a member failed it, so that with fewer members no criterion can come back: whatever
survives the second time was attributed. An override never changes which criteria survive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch

from draco.config.checks import one_of
from draco.core.errors import ConfigError, JudgeConfigError, JudgeError
from draco.core.types import Criterion, Failure, Group, Judgement, Trajectory, Verdict
from draco.judge.prompts import criteria_block, messages, prompt_version
from draco.judge.records import CallRecord, call_metrics, with_rates
from draco.judge.replies import (
    Assessed,
    Attributed,
    Scored,
    check_assessments,
    check_attributions,
    check_criteria,
    check_scores,
)
from draco.judge.requests import JudgeRequest
from draco.judge.rewards import dropout
from draco.judge.rewards import rewards as reward_of
from draco.judge.transcript import Blocks, Caps
from draco.judge.views import plan_named
from draco.judge.votes import Ballot, Judge, Panel, Voter, panel_of

__all__ = ["JudgePipeline"]

T = TypeVar("T")
Overrides = Literal["ignore", "apply"]
ProposeCache = Literal["group", "run"]


def _check_secret(secret: bytes) -> None:
    if len(secret) < 16:
        raise ConfigError("the transcript secret must have at least 16 bytes; take secrets.token_bytes(32)")


@dataclass(slots=True)
class _Run:
    """One group on its way through the calls."""

    group: Group
    blocks: Blocks
    records: list[CallRecord] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)
    deadline: float | None = None  #: time.monotonic() after which calls fail; None = none

    def count(self, name: str, by: float = 1.0) -> None:
        self.counters[name] = self.counters.get(name, 0.0) + by


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


class JudgePipeline:
    """Judges groups with one client. Holds no state but the proposals that `propose_cache="run"` reuses."""

    def __init__(
        self,
        client: Judge,
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
            client: carries the calls, and names the plan.
            caveats: what a judge should know about the environment; added to every prompt.
            secret: keys the transcript delimiters; at least 16 bytes.
            attribution_overrides: `ignore`: the scored verdict stands in R, and the credit stage leaves an overridden
                verdict out of every Q (`Verdict.override` marks it). `apply`: the overriding verdict replaces it in
                both.
            propose_cache: `group`: propose_task once a group; `run`: its criteria are reused for the same task.
            sink: gets a record of every attempt of every call, on the thread of the event loop.
            caps: longest action and observation that a prompt shows whole.
            panel: who scores; None: the client's members, or the client alone.
        """
        _check_secret(secret)
        one_of("rubric.attribution_overrides", attribution_overrides, ("ignore", "apply"))
        one_of("rubric.propose_cache", propose_cache, ("group", "run"))
        self.client = client
        self.plan = plan_named(client.plan)
        self.panel = panel or panel_of(client)
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

    # -- the five calls ------------------------------------------------------------------------------------------

    async def propose_task(self, run: _Run) -> tuple[Criterion, ...]:
        """≤ 15 criteria from the agent's instructions and the request alone."""
        task = run.group.task
        if task.id in self.proposals:
            return self.proposals[task.id]
        material = self.plan.propose_task(run.blocks, run.group.trajectories[0])
        found = await self._call(run, "propose_task", material, partial(check_criteria, "propose_task"))
        # First come, first kept: two groups of one task in a batch must not disagree afterwards.
        return self.proposals.setdefault(task.id, found) if self.propose_cache == "run" else found

    async def propose_rollout(
        self, run: _Run, trajectory: Trajectory, known: Sequence[Criterion]
    ) -> tuple[Criterion, ...]:
        """≤ 10 criteria that only this execution reveals."""
        material = self.plan.propose_rollout(run.blocks, trajectory, known)
        check = partial(check_criteria, "propose_rollout")
        return await self._call(run, "propose_rollout", material, check, trajectory.sample)

    async def merge(
        self,
        run: _Run,
        members: Sequence[Trajectory],
        revealed: Mapping[int, Sequence[Criterion]],
        candidates: Sequence[Criterion],
    ) -> tuple[Criterion, ...]:
        """≤ 24 criteria out of all candidates."""
        material = self.plan.merge(run.blocks, members, revealed, candidates)
        return await self._call(run, "merge", material, partial(check_criteria, "merge"))

    async def score(
        self, run: _Run, trajectory: Trajectory, criteria: Sequence[Criterion], voter: Voter
    ) -> tuple[Scored, ...]:
        """[K] scores of one trajectory."""
        material = self.plan.score(run.blocks, trajectory, criteria)
        return await self._call(run, "score", material, partial(check_scores, criteria), trajectory.sample, voter)

    async def assess(self, run: _Run, trajectory: Trajectory, criteria: Sequence[Criterion], voter: Voter) -> Assessed:
        """[K] scores and [K] attributions of one trajectory in one call, where the plan joins them."""
        material = self.plan.score(run.blocks, trajectory, criteria)
        check = partial(check_assessments, criteria, len(trajectory.steps))
        return await self._call(run, "assess", material, check, trajectory.sample, voter)

    async def attribute(
        self, run: _Run, trajectory: Trajectory, criteria: Sequence[Criterion], scored: Sequence[Scored]
    ) -> tuple[Attributed, ...]:
        """[K] attributions of one trajectory, for surviving criteria."""
        material = self.plan.attribute(run.blocks, trajectory, criteria, scored)
        check = partial(check_attributions, criteria, len(trajectory.steps))
        return await self._call(run, "attribute", material, check, trajectory.sample)

    async def _call(
        self,
        run: _Run,
        phase: str,
        material: Sequence[str],
        check: Callable[[Any], tuple[T, str | None]],
        sample: int = -1,
        voter: Voter | None = None,
    ) -> T:
        client = voter.client if voter else self.client
        reply: T = await client.call(
            JudgeRequest(
                phase=phase,
                messages=self.plan.messages(phase, material, self.caveats),
                check=check,
                sink=partial(self._record, run),
                task_id=run.group.task.id,
                sample=sample,
                step=run.group.step,
                deadline=run.deadline,
                version=self.plan.version(phase),
                repeat=voter.repeat if voter else 0,
                salt=self.salt,
            )
        )
        return reply

    def _record(self, run: _Run, record: CallRecord) -> None:
        run.records.append(record)
        if self._sink is not None:
            self._sink(record)

    # -- a group -------------------------------------------------------------------------------------------------

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
        run.count("judge/members", len(run.group.trajectories))
        try:
            judgement = await self._judge(run, criteria, citations)
        except _Skipped:
            run.count("judge/skipped_groups")
            run.group = replace(run.group, trajectories=())
            judgement = Judgement(run.group, (), (), (), ())
        run.count("judge/failed", sum(f.phase != "rollout" for f in run.failures))
        metrics = with_rates(run.counters | call_metrics(run.records))
        failures = tuple(sorted(run.failures, key=lambda f: f.sample))
        return replace(judgement, failures=failures, metrics=metrics)

    async def propose_group(self, group: Group) -> tuple[Criterion, ...]:
        """The set that `judge_group` would judge by; empty where the group was skipped."""
        run = _Run(group.live(), Blocks(self._secret, self.caps))
        try:
            self._need_two(run)
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
        found: tuple[Criterion, ...] = await self.client.call(request)
        return found

    async def _judge(self, run: _Run, criteria: Sequence[Criterion] | None, citations: bool) -> Judgement:
        self._need_two(run)
        if criteria is None:
            criteria = await self._propose(run)
        criteria = tuple(criteria)
        run.count("rubric/criteria", len(criteria))
        run.count("rubric/groups")
        scored, attributed = await self._scored(run, criteria, citations)
        self._count_scores(run, scored)
        kept = self._kept(run, scored)
        if citations and any(kept) and not self.plan.joint:
            surviving = [k for k, keep in enumerate(kept) if keep]
            subset = [criteria[k] for k in surviving]

            async def one(t: Trajectory) -> dict[int, Attributed]:
                found = await self.attribute(run, t, subset, [scored[t.sample][k] for k in surviving])
                return dict(zip(surviving, found, strict=True))

            attributed = await self._each(run, "attribute", one)
            kept = self._kept(run, scored)
        return self._judgement(run, criteria, scored, attributed, kept)

    async def _scored(
        self, run: _Run, criteria: tuple[Criterion, ...], citations: bool
    ) -> tuple[dict[int, tuple[Scored, ...]], dict[int, dict[int, Attributed]]]:
        """Scores by sample, and attributions by sample and criterion where the plan makes them in the same call."""
        if not criteria:
            return {t.sample: () for t in run.group.trajectories}, {}
        joint = self.plan.joint and citations

        async def ballot(t: Trajectory, voter: Voter) -> Ballot:
            return (
                await self.assess(run, t, criteria, voter)
                if joint
                else (await self.score(run, t, criteria, voter), None)
            )

        voters = self.panel.voters
        decided = self.panel.decide(
            await self._each(run, "score", lambda t: _together([ballot(t, voter) for voter in voters]))
        )
        for name, value in decided.counters.items():
            run.count(name, value)
        return decided.scored, decided.attributed

    async def _propose(self, run: _Run) -> tuple[Criterion, ...]:
        first = await self._or_skip(run, "propose_task", self.propose_task(run))
        revealed = await self._each(run, "propose_rollout", lambda t: self.propose_rollout(run, t, first))
        proposed = [*first, *(c for t in run.group.trajectories for c in revealed[t.sample])]
        candidates = self.plan.candidates(proposed, run.group.trajectories)
        run.count("rubric/proposed", len(proposed))
        run.count("rubric/candidates", len(candidates))
        return await self._or_skip(run, "merge", self.merge(run, run.group.trajectories, revealed, candidates))

    async def _or_skip(self, run: _Run, phase: str, call: Awaitable[T]) -> T:
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
        self._need_two(run)
        return good

    def _need_two(self, run: _Run) -> None:
        if len(run.group.trajectories) < 2:
            reason = f"{len(run.group.trajectories)} member(s) left, a group needs 2"
            run.failures.extend(Failure(t.sample, "group", reason) for t in run.group.trajectories)
            raise _Skipped

    # -- statistics ----------------------------------------------------------------------------------------------

    def _kept(self, run: _Run, scored: dict[int, tuple[Scored, ...]]) -> list[bool]:
        rows = [[s.score for s in scored[t.sample]] for t in run.group.trajectories]
        return [bool(k) for k in dropout(torch.tensor(rows, dtype=torch.int64).T)]

    def _count_scores(self, run: _Run, scored: dict[int, tuple[Scored, ...]]) -> None:
        columns = list(zip(*(scored[t.sample] for t in run.group.trajectories), strict=True))
        for column in columns:
            values = [s.score for s in column]
            run.count("rubric/passes", values.count(1))
            run.count("rubric/fails", values.count(-1))
            run.count("rubric/na", values.count(0))
            run.count("rubric/all_fail_criteria", -1 in values and 1 not in values and 0 not in values)

    def _judgement(
        self,
        run: _Run,
        criteria: tuple[Criterion, ...],
        scored: dict[int, tuple[Scored, ...]],
        attributed: dict[int, dict[int, Attributed]],
        kept: list[bool],
    ) -> Judgement:
        members = run.group.trajectories
        rows = []
        for k in range(len(criteria)):
            row = []
            for t in members:
                given = scored[t.sample][k]
                found = attributed.get(t.sample, {}).get(k) if kept[k] else None
                row.append(self._verdict(run, given, found))
            rows.append(tuple(row))
        run.count("rubric/dropped_criteria", kept.count(False))
        scores = torch.tensor([[v.score for v in row] for row in rows], dtype=torch.int64).reshape(
            len(rows), len(members)
        )
        rewards = reward_of(scores, torch.tensor(kept, dtype=torch.bool))
        return Judgement(
            group=run.group,
            criteria=criteria,
            verdicts=tuple(rows),
            dropped=tuple(not keep for keep in kept),
            rewards=tuple(rewards.tolist()),
        )

    def _verdict(self, run: _Run, given: Scored, found: Attributed | None) -> Verdict:
        if found is None:
            return Verdict(given.score, (), given.justification, given.evidence)
        run.count("judge/attributed")
        run.count("judge/attributed_pass_fail", found.verdict != 0)
        run.count("judge/uncited", found.verdict != 0 and not found.steps)
        run.count("judge/citations", len(found.steps))
        run.count("judge/dropped_citations", found.dropped)
        override = found.verdict if found.verdict != given.score else None
        run.count("judge/overrides", override is not None)
        apply = self.attribution_overrides == "apply"
        return Verdict(
            score=found.verdict if apply else given.score,
            steps=found.steps,
            justification=given.justification,
            evidence=given.evidence,
            explanation=found.explanation,
            override=None if apply else override,
        )
