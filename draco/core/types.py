"""Frozen data objects that travel between the stages: rollout → rubric → credit → update.

Nothing here holds the environment's success. It is in `draco.env.base.Outcome`, which only an evaluator returns, so no
rubric can read it (outcome blindness).

Worked example, one group of G = 2 rollouts, K = 1 criterion::

    task = Task(id="t1", instruction="pay ana 31", split="train", scenario_id="s1", difficulty=1)
    trajectory.token_ids   [ 5, 6, 7 | 8, 9, 10 | 11 ]     prompt | sampled by the policy | observation
    trajectory.step_of     [-1,-1,-1 | 0, 0,  0 | -1 ]     0-based step of every token; −1 = prompt or gap
    trajectory.steps[0]    Step(index=1, span=(3, 6), ...)  the 1-based index is what the judge cites
    judgement.verdicts     ((Verdict(1, (1,)), Verdict(-1, (1,))),)   K rows of G
    judgement.rewards      (1.0, -1.0)
    credit.advantages      (0.707, -0.707)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

__all__ = [
    "Credit", "Criterion", "Failure", "Group", "Judgement", "Message", "Step", "Task", "TaskBatch", "Termination",
    "Trajectory", "Verdict",
]  # fmt: skip


class Termination(StrEnum):
    """Why an episode ended. `quarantined` kinds leave the group before any statistic."""

    SUBMITTED = "submitted"  #: the agent called the completion API and ended
    GAVE_UP = "gave_up"  #: it ended without calling the completion API, or reported failure
    NO_ACTION = "no_action"  #: no parsable action in a turn, after one reminder
    TURN_LIMIT = "turn_limit"  #: the turn budget ran out
    LENGTH_LIMIT = "length_limit"  #: the response budget ran out (observation tokens count)
    DEADLINE = "deadline"  #: the trajectory's wall-clock deadline passed
    ENVIRONMENT_ERROR = "environment_error"  #: the environment failed
    ENGINE_ERROR = "engine_error"  #: generation failed
    UNKNOWN = "unknown"  #: an imported log does not say; our own rollouts never end so

    @property
    def quarantined(self) -> bool:
        """True for faults that are not the agent's; such a trajectory is not trained on."""
        return self in _QUARANTINED


_QUARANTINED = frozenset({Termination.DEADLINE, Termination.ENVIRONMENT_ERROR, Termination.ENGINE_ERROR})


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message: `role` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Task:
    """What an agent is asked to do. Holds no gold answer."""

    id: str
    instruction: str
    split: str
    scenario_id: str  #: tasks that share it are variants of one scenario (SGC)
    difficulty: int = 1  #: a level from 1; 0 = unknown
    metadata: Mapping[str, Any] = field(default_factory=dict)  #: JSON values; nothing about success


@dataclass(frozen=True, slots=True)
class TaskBatch:
    """The tasks of one training batch or one evaluation."""

    step: int  #: our batch counter, 0-based; −1 outside training
    tasks: tuple[Task, ...]
    group_size: int  #: G rollouts a task
    purpose: str = "train"  #: part of the sampling key, so that evaluation never shares a stream with training
    temperature: float = 1.0
    first: int = 0  #: position of `tasks[0]` in the batch of all ranks
    stride: int = 1  #: distance of neighbours in the batch of all ranks

    def position(self, index: int) -> int:
        """Position of `tasks[index]` in the batch of all ranks; it becomes `Group.index`."""
        return self.first + index * self.stride

    def shard(self, rank: int, world: int) -> TaskBatch:
        """The tasks of one of `world` ranks: every `world`-th task; possibly none."""
        if world == 1:
            return self
        return replace(self, tasks=self.tasks[rank::world], first=self.position(rank), stride=self.stride * world)


@dataclass(frozen=True, slots=True)
class Step:
    """One agent step: by default one turn, its reasoning included (Section 3.3)."""

    index: int  #: 1-based; the number that transcripts show and judges cite
    span: tuple[int, int]  #: half-open token range in `Trajectory.token_ids`; never empty
    action: str  #: the text that the policy emitted in this step
    observation: str  #: what the environment answered; empty when the episode ended here
    turn: int  #: 1-based turn that this step belongs to


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished rollout, with the exact tokens that the policy sampled."""

    task: Task
    sample: int  #: 0-based index within the group
    messages: tuple[Message, ...]  #: the whole conversation, opening messages included
    token_ids: tuple[int, ...]  #: [T]
    step_of: tuple[int, ...]  #: [T] 0-based step of each token; −1 = prompt or gap
    logprobs: tuple[float, ...]  #: [T] engine log-prob of a step token at the sampling temperature; 0 elsewhere
    steps: tuple[Step, ...]  #: M steps
    termination: Termination
    prompt_tokens: int  #: length of the opening prompt, the first `prompt_tokens` of `token_ids`
    policy_version: int  #: number of optimizer updates of the weights that sampled it
    seed: int  #: key of its private random generator
    end_state: str = ""  #: opaque reference that only the environment's evaluator can read
    error: str = ""  #: the fault behind a quarantined termination
    timings: Mapping[str, float] = field(default_factory=dict)  #: seconds by phase

    @property
    def step_tokens(self) -> tuple[int, ...]:
        """n_j, the number of tokens of each step, [M]."""
        return tuple(stop - start for start, stop in (step.span for step in self.steps))


@dataclass(frozen=True, slots=True)
class Group:
    """G rollouts of one task."""

    task: Task
    trajectories: tuple[Trajectory, ...]
    index: int = 0  #: position of the task in its batch
    step: int = 0  #: batch counter

    def live(self) -> Group:
        """The same group without quarantined trajectories."""
        kept = tuple(t for t in self.trajectories if not t.termination.quarantined)
        return Group(self.task, kept, self.index, self.step)


@dataclass(frozen=True, slots=True)
class Criterion:
    """One rubric criterion (Section 3.2)."""

    title: str  #: 3–8 words, unique within its set
    description: str
    evaluator_instruction: str
    source: str = "static"  #: static | task | rollout | merge
    grounding_references: tuple[str, ...] = ()
    evidence: str = ""  #: what the proposing rollout fell short on


@dataclass(frozen=True, slots=True)
class Verdict:
    """One criterion on one trajectory."""

    score: int  #: +1 pass, −1 fail, 0 not applicable: the scoring call's verdict
    steps: tuple[int, ...] = ()  #: 1-based steps cited by the attribution call
    justification: str = ""
    evidence: str = ""
    explanation: str = ""  #: by the attribution call
    override: int | None = None  #: the attribution call's verdict where it differs from `score`


@dataclass(frozen=True, slots=True)
class Failure:
    """A trajectory that left its group, and why. It gets no score."""

    sample: int
    phase: str  #: rollout | propose_task | propose_rollout | merge | score | attribute | evaluate | group
    reason: str


@dataclass(frozen=True, slots=True)
class Judgement:
    """A judged group: `group` holds only trajectories with usable verdicts."""

    group: Group  #: the members that statistics are taken over; empty if the group was skipped
    criteria: tuple[Criterion, ...]  #: K
    verdicts: tuple[tuple[Verdict, ...], ...]  #: [K][G]
    dropped: tuple[bool, ...]  #: [K] removed by discriminative dropout
    rewards: tuple[float, ...]  #: [G] R_i
    failures: tuple[Failure, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)  #: counters of the judge pipeline for this group


@dataclass(frozen=True, slots=True)
class Credit:
    """Advantages of a judged group, redistributed over steps (Eq. 4–7)."""

    judgement: Judgement
    advantages: tuple[float, ...]  #: [G] A_i
    step_advantages: tuple[tuple[float, ...], ...]  #: [G][M] a_j, for every token of step j
    qualities: tuple[tuple[float, ...], ...]  #: [G][M] Q_j; a row is empty if there is no Q
    reasons: tuple[str, ...]  #: [G] draco.credit.redistribution.Reason value: whether the formula or a fallback applied
    zero_std: bool = False  #: the rewards are all equal (std below 1e-8): no signal
