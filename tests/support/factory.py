"""Here tests make their tasks, trajectories, groups, criteria, judgements, credit and records of judge calls.

There are two kinds of trajectory. `trajectory` takes texts as they are, as a judge reads them. `typed` lets a real
rollout parse the turns and count their tokens, as an update needs them. The other functions take both kinds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from support.echo import EchoEpisode, type_out

from draco.core.types import (
    Credit,
    Criterion,
    Failure,
    Group,
    Judgement,
    Message,
    Step,
    Task,
    Termination,
    Trajectory,
    Verdict,
)  # fmt: skip
from draco.env.base import Episode
from draco.judge.records import CallRecord
from draco.judge.verdicts import dropout, rewards
from draco.policy.chat import ChatFormat
from draco.policy.policy import Policy
from draco.rollout.loop import Limits
from draco.rollout.rollout import Rollout

TASK = Task("t1", "pay ana 31", "train", "s1")
OPENING = (Message("system", "be good"), Message("user", "pay ana 31"))
CRITERIA = (Criterion("Pays ana", "d", "i"), Criterion("Pays exactly 31", "d", "i"))
DONE = "<code>done</code>"  #: the turn that ends an echo episode


def tasks(count: int, split: str = "train") -> list[Task]:
    """Tasks t0, t1, … of one scenario."""
    return [Task(f"t{i}", "", split, "s") for i in range(count)]


# --- trajectories -----------------------------------------------------------------------------------------------------


def trajectory(
    sample: int = 0,
    steps: int | Sequence[tuple[str, str]] = 3,
    termination: Termination = Termination.SUBMITTED,
    observation: str = "ok",
    *,
    task: Task = TASK,
    opening: Sequence[Message] = (*OPENING, Message("assistant", "later")),
    tokens: Sequence[int] = (),
    **more: Any,
) -> Trajectory:
    """A rollout whose actions name its sample.

    Args:
        steps: action and observation of every step, or only how many.
        tokens: how many each step has; two prompt tokens come before. Empty: the trajectory has no tokens.
        more: other fields of `Trajectory`.
    """
    if isinstance(steps, int):
        steps = [(f"act {j} of sample {sample}", observation) for j in range(1, steps + 1)]
    prompt = 2 if tokens else 0
    made, at = [], prompt
    for j, ((action, answer), length) in enumerate(zip(steps, tokens or [0] * len(steps), strict=True), start=1):
        made.append(Step(j, (at, at + length) if tokens else (0, 0), action, answer, j))
        at += length
    step_of = [-1] * prompt + [j for j, length in enumerate(tokens) for _ in range(length)]
    fields: dict[str, Any] = {
        "task": task, "sample": sample, "messages": tuple(opening), "steps": tuple(made), "termination": termination,
        "token_ids": tuple(0 if j < 0 else 5 + j for j in step_of), "step_of": tuple(step_of),
        "logprobs": (-0.5,) * len(step_of), "prompt_tokens": prompt, "policy_version": 0, "seed": 0,
    }  # fmt: skip
    return Trajectory(**(fields | more))


def rollout_of(
    chat: ChatFormat,
    turns: Sequence[str],
    *,
    limits: Limits | None = None,
    step_kind: str = "turn",
    episode: Episode | None = None,
    sample: int = 0,
) -> Rollout:
    """A rollout into which a model types the turns, token by token."""
    task = Task("train_0", "say 0", "train", "s0")
    rollout = Rollout(
        episode or EchoEpisode(task), chat, limits or Limits(), task=task, sample=sample, seed=7, policy_version=0,
        step_kind=step_kind,
    )  # fmt: skip
    type_out(rollout, turns)
    return rollout


def typed(chat: ChatFormat, members: Iterable[Sequence[str]]) -> tuple[Trajectory, ...]:
    """One trajectory for every list of turns."""
    return tuple(rollout_of(chat, turns, sample=i).trajectory() for i, turns in enumerate(members))


# --- groups and criteria ----------------------------------------------------------------------------------------------


def group(members: int | Iterable[Trajectory] = 6, index: int = 0, step: int = 7, **more: Any) -> Group:
    """Rollouts of one task; `more` goes to `trajectory` where `members` is only how many."""
    if isinstance(members, int):
        members = [trajectory(i, **more) for i in range(members)]
    found = tuple(members)
    return Group(found[0].task if found else more.get("task", TASK), found, index, step)


def criterion(title: str, **more: Any) -> dict[str, Any]:
    """A criterion as the judge writes it in JSON."""
    return {"title": title, "description": "d", "evaluator_instruction": "i", "grounding_references": []} | more


# --- judgements and credit --------------------------------------------------------------------------------------------


def rewarded(group: Group, rewards: Iterable[float]) -> Judgement:
    """A group whose rewards are given without any criterion."""
    return Judgement(group, (), (), (), tuple(rewards))


def verdicts(
    scores: Sequence[Sequence[int]], cited: Sequence[Sequence[tuple[int, ...]]] | None = None, why: str = ""
) -> tuple[tuple[Verdict, ...], ...]:
    """[K][G] verdicts out of scores and cited steps of that shape."""
    cited = cited or [[()] * len(row) for row in scores]
    return tuple(
        tuple(Verdict(score, steps, why) for score, steps in zip(*row, strict=True))
        for row in zip(scores, cited, strict=True)
    )


def judged(
    group: Group,
    criteria: Sequence[Criterion],
    table: tuple[tuple[Verdict, ...], ...],
    failures: Sequence[Failure] = (),
) -> Judgement:
    """A group with dropout and rewards as they follow from [K][G] verdicts."""
    scores = torch.tensor([[verdict.score for verdict in row] for row in table])
    kept = dropout(scores)
    given = tuple(rewards(scores, kept).tolist())
    return Judgement(group, tuple(criteria), table, tuple((~kept).tolist()), given, tuple(failures))


def credit_of(group: Group, advantages: Sequence[float], slope: float, offset: float) -> Credit:
    """Credit whose step j (from 0) has the advantage A · (offset + slope · j): it differs over steps."""
    steps = tuple(
        tuple(a * (offset + slope * j) for j in range(len(t.steps)))
        for a, t in zip(advantages, group.trajectories, strict=True)
    )
    members = len(advantages)
    return Credit(rewarded(group, advantages), tuple(advantages), steps, ((),) * members, ("uniform",) * members)


def credits_of(policy: Policy, groups: int = 3, members: int = 3) -> list[Credit]:
    """Credit of typed groups that differ in turns and in tokens."""
    made = []
    for index, task in enumerate(tasks(groups)):
        turns = [["<code>" + "xyz"[: 1 + (index + s) % 3] + "</code>"] * (1 + s) + [DONE] for s in range(members)]
        group = Group(task, typed(policy.chat, turns), index)
        made.append(credit_of(group, [float(s - 1) for s in range(members)], 0.5, 0.5))
    return made


def with_step_advantages(credit: Credit, value: float) -> Credit:
    """The same credit with one value for every step."""
    return replace(credit, step_advantages=tuple(tuple(value for _ in row) for row in credit.step_advantages))


# --- judge calls ------------------------------------------------------------------------------------------------------


def call(step: int, phase: str, sample: int, reply: str, usd: float | None = 0.25) -> CallRecord:
    """The record of one judge call that went well."""
    return CallRecord(
        phase=phase, task_id=f"task{step}", sample=sample, step=step, model="judge/one", served_model="",
        fingerprint="", prompt_version="v", prompt_hash=f"{phase}{sample}", temperature=0.1, attempt=1, outcome="ok",
        error="", tokens_in=100, tokens_out=10, tokens_cached=0, cost_usd=usd, latency_s=0.5,
        messages=(("system", "you judge"), ("user", "[step 1] action:\nx\n")), reply=reply,
    )  # fmt: skip
