"""Finished trajectories of other agents, as groups: OpenAI chat messages, τ-bench results, labelled rows.

A step is an assistant turn: its text, then its tool calls. The observation is everything before the next turn. There
are no token ids without a policy (all are −1); n_j is the number of completion tokens that the log gives, or else of
words and signs in the turn. Where the log does not say how a trajectory ended, its termination is `unknown`.

A `reward` (τ-bench) is a label of the whole trajectory: 1 or more passes, anything less fails, fractions too.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch

from draco.core.errors import ConfigError
from draco.core.types import Criterion, Failure, Group, Judgement, Message, Step, Task, Termination, Trajectory, Verdict
from draco.judge.verdicts import dropout, rewards
from draco.study.tau import ENDS

T = TypeVar("T")
__all__ = ["Outside", "judge_by_labels", "read_groups_of", "too_few"]

_WORDS = re.compile(r"\w+|[^\w\s]")
_SHOWN = 20  #: faults listed in one error


@dataclass(frozen=True, slots=True)
class Outside:
    """The trajectories of a file, and the labels in it."""

    form: str  #: chat | tau_bench | tau2 | agent_process_bench
    groups: tuple[Group, ...]
    #: (task id, sample) → label of each labelled 1-based step, and label of the whole trajectory
    step_labels: Mapping[tuple[str, int], Mapping[int, int]]
    final_labels: Mapping[tuple[str, int], int]


class _Fault(ValueError):
    """One malformed row; the message names the field."""


def _typed(value: Any, kind: type[T], where: str, expected: str) -> T:
    if not isinstance(value, kind):
        raise _Fault(f"{where}: expected {expected}, got {type(value).__name__}")
    return value


def _label(value: Any, where: str) -> int:
    if value not in (-1, 0, 1) or isinstance(value, bool):
        raise _Fault(f"field {where}: expected −1, 0 or 1, got {value!r}")
    return int(value)


def read_groups_of(path: Path) -> Outside:
    """Read a file; groups are by task id, in order of first appearance.

    Raises:
        ConfigError: no such file, or malformed rows: each is listed with its line (or entry) and field.
    """
    if not path.is_file():
        raise ConfigError(f"input={path}: no such file")
    form, rows, faults = _rows(path)
    members: dict[str, list[Trajectory]] = defaultdict(list)
    steps: dict[tuple[str, int], Mapping[int, int]] = {}
    finals: dict[tuple[str, int], int] = {}
    for where, row in rows:
        try:
            task = _task_id(form, row)
            trajectory, step_labels, final = _trajectory(form, row, len(members[task]))
            if any(t.sample == trajectory.sample for t in members[task]):
                field = _FIELDS[form][1]
                raise _Fault(f"field {field!r}: task {task!r} has a trajectory {trajectory.sample} already")
        except _Fault as fault:
            faults.append(f"{where}: {fault}")
            continue
        members[task].append(trajectory)
        if step_labels is not None:
            steps[task, trajectory.sample] = step_labels
        if final is not None:
            finals[task, trajectory.sample] = final
    if faults:
        faults.sort(key=lambda fault: int(fault.partition(":")[0].split()[1]))  # "line 3: …": in the file's order
        more = f"\n… and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise ConfigError(
            f"{path}: {len(faults)} malformed row{'s' * (len(faults) > 1)}:\n" + "\n".join(faults[:_SHOWN]) + more
        )
    if not members:
        raise ConfigError(f"{path}: no trajectory in it")
    groups = tuple(
        Group(t[0].task, tuple(sorted(t, key=lambda x: x.sample)), i) for i, t in enumerate(members.values())
    )
    return Outside(form, groups, steps, finals)


#: format → names of (task id, number within the task, messages)
_FIELDS = {
    "chat": ("task_id", "sample", "messages"),
    "tau_bench": ("task_id", "trial", "traj"),
    "tau2": ("task_id", "trial", "messages"),
    "agent_process_bench": ("query_index", "sample_index", "messages"),
}


def _rows(path: Path) -> tuple[str, list[tuple[str, Any]], list[str]]:
    """The format, rows with where they stand, and faults: lines that are no JSON."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: no UTF-8 text (byte {error.start}); save it as UTF-8") from None
    faults: list[str] = []
    try:
        content: Any = json.loads(text)
    except ValueError:
        content = None  # several lines
    if isinstance(content, dict) and "simulations" in content:
        try:
            simulations = _typed(content["simulations"], list, "field 'simulations'", "a list")
        except _Fault as fault:
            raise ConfigError(f"{path}: {fault}") from None
        return "tau2", [(f"simulation {i}", r) for i, r in enumerate(simulations)], faults
    rows: list[tuple[str, Any]] = []
    if isinstance(content, list):
        rows = [(f"entry {i}", r) for i, r in enumerate(content)]
    elif isinstance(content, dict):
        rows = [("line 1", content)]
    else:
        for number, line in enumerate(text.split("\n"), start=1):  # splitlines also cuts at U+2028 within a string
            if line.strip():
                try:
                    rows.append((f"line {number}", json.loads(line)))
                except ValueError as error:
                    faults.append(f"line {number}: no JSON: {error}")
    keys = {k for _, row in rows if isinstance(row, dict) for k in row}
    if rows and not keys & {"task_id", "messages", "traj", "query_index"}:
        raise ConfigError(
            f"{path}: no row has a known shape. Expected task_id and messages (chat), task_id, trial and traj "
            "(τ-bench), simulations (tau2), or query_index, sample_index and messages (AgentProcessBench); "
            f"{rows[0][0]} has {', '.join(sorted(map(str, keys))[:12]) or 'no fields'}"
        )
    return "tau_bench" if "traj" in keys else "agent_process_bench" if "query_index" in keys else "chat", rows, faults


def _task_id(form: str, row: Any) -> str:
    if not isinstance(row, dict):
        raise _Fault(f"expected an object, got {type(row).__name__}")
    name = _FIELDS[form][0]
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise _Fault(f"field {name!r}: expected the task's id, got {value!r}")
    return str(value)


def _trajectory(form: str, row: Any, default: int) -> tuple[Trajectory, Mapping[int, int] | None, int | None]:
    """A row's trajectory, the labels of its steps, and that of the whole; `default` is its number within the task."""
    task_id = _task_id(form, row)
    _, sample_field, field = _FIELDS[form]
    sample = row.get(sample_field, default)
    if not isinstance(sample, int) or isinstance(sample, bool) or sample < 0:
        raise _Fault(f"field {sample_field!r}: expected a number from 0, got {sample!r}")
    given = _typed(row.get(field), list, f"field {field!r}", "a list of messages")
    if not given:
        raise _Fault(f"field {field!r}: is empty")
    messages = [_message(m, f"field {field}[{i}]") for i, m in enumerate(given)]
    turns = [i for i, m in enumerate(messages) if m.role == "assistant"]
    if not turns:
        raise _Fault(f"field {field!r}: no assistant turn in {len(messages)} messages")
    steps = _steps(messages, turns, given)
    first = next((m.content for m in messages if m.role == "user"), "")
    instruction = str(row.get("question") or row.get("instruction") or first)
    end = ENDS.get(str(row.get("termination_reason", "")).removeprefix("TerminationReason.").lower())
    step_of = tuple(j for j, s in enumerate(steps) for _ in range(*s.span))
    trajectory = Trajectory(
        task=Task(task_id, instruction, "outside", task_id),
        sample=sample,
        messages=tuple(messages),
        token_ids=(-1,) * len(step_of),
        step_of=step_of,
        logprobs=(0.0,) * len(step_of),
        steps=steps,
        termination=end or Termination.UNKNOWN,
        prompt_tokens=0,
        policy_version=0,
        seed=0,
    )
    return trajectory, _step_labels(row, turns), _final_label(row)


def _message(given: Any, where: str) -> Message:
    """A message, its tool calls as text."""
    message = _typed(given, dict, where, "an object")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _Fault(f"{where}.role: expected a text, got {role!r}")
    content = message.get("content")
    if isinstance(content, list):
        parts = [_typed(p, dict, f"{where}.content[{k}]", "an object") for k, p in enumerate(content)]
        content = "\n".join(str(p.get("text", f"({p.get('type', 'part')})")) for p in parts)
    texts = [_typed(content, str, f"{where}.content", "a text")] if content is not None else []
    calls = message.get("tool_calls")
    calls = [] if calls is None else _typed(calls, list, f"{where}.tool_calls", "a list")
    for call in [*calls, *([message["function_call"]] if message.get("function_call") else ())]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _Fault(f"{where}.tool_calls: expected calls with a function name, got {call!r:.80}")
        arguments = function.get("arguments", "")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        texts.append(f"{function['name']}({text})")
    return Message(role, "\n".join(t for t in texts if t))


def _steps(messages: Sequence[Message], turns: Sequence[int], given: Sequence[Mapping[str, Any]]) -> tuple[Step, ...]:
    """Steps, one an assistant turn (at `turns`); `given` has the numbers of tokens that the file states."""
    steps: list[Step] = []
    start = 0
    for j, (at, stop) in enumerate(pairwise([*turns, len(messages)]), start=1):
        usage = given[at].get("usage") or {}
        stated = usage.get("completion_tokens") if isinstance(usage, dict) else None
        count = stated if isinstance(stated, int) and stated > 0 else max(len(_WORDS.findall(messages[at].content)), 1)
        after = [
            m.content if m.role in {"tool", "function"} else f"({m.role}) {m.content}" for m in messages[at + 1 : stop]
        ]
        steps.append(Step(j, (start, start + count), messages[at].content, "\n".join(after), j))
        start += count
    return tuple(steps)


def _step_labels(row: Mapping[str, Any], turns: Sequence[int]) -> Mapping[int, int] | None:
    """Labels by 1-based step; the file has them by position of the message."""
    if row.get("step_labels") is None:
        return None
    found = {}
    for index, value in _typed(row["step_labels"], dict, "field 'step_labels'", "message index → −1, 0 or 1").items():
        label = _label(value, f"'step_labels'[{index}]")
        if not str(index).isdigit() or int(index) not in turns:
            raise _Fault(f"field 'step_labels'[{index}]: message {index} is no assistant turn")
        found[turns.index(int(index)) + 1] = label
    return found


def _final_label(row: Mapping[str, Any]) -> int | None:
    """Label of the whole trajectory: as given, or from its reward."""
    if (label := row.get("final_label")) is not None:
        return _label(label, "'final_label'")
    info = _typed(row.get("reward_info") or {}, dict, "field 'reward_info'", "an object")
    reward = row.get("reward", info.get("reward"))
    if reward is None:
        return None
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        raise _Fault(f"field 'reward': expected a finite number, got {reward!r}")
    return 1 if reward >= 1 else -1


def too_few(group: Group) -> Judgement | None:
    """The judgement, made without a call, of a group with fewer than two usable trajectories; None: it has two.

    Logs hold tasks that ran once. That is no fault of the judge and must not look like one.
    """
    live = group.live().trajectories
    if len(live) >= 2:
        return None
    left = {t.sample for t in live}
    failures = tuple(
        Failure(t.sample, "group", f"{len(left)} member(s) left, a group needs 2")
        if t.sample in left
        else Failure(t.sample, "rollout", str(t.termination))
        for t in group.trajectories
    )
    return Judgement(Group(group.task, (), group.index, group.step), (), (), (), (), failures)


def judge_by_labels(outside: Outside) -> Iterator[Judgement]:
    """The labels of a file as verdicts: one criterion for each step position (it cites that step), one for the result.

    A label of 0 is "not applicable". The result cites no step: it counts in R and in no Q. Dropout and rewards are
    those of training.

    Raises:
        ConfigError: a trajectory has neither kind of label.
    """
    for group in outside.groups:
        live = group.live()
        keys = [(group.task.id, t.sample) for t in live.trajectories]
        bare = [k for k in keys if k not in outside.final_labels and k not in outside.step_labels]
        if bare:
            raise ConfigError(
                f"judge=labels: task {bare[0][0]!r}, trajectory {bare[0][1]} has no step_labels, final_label or reward "
                f"({len(bare)} of {len(keys)} in its group)"
            )
        if (none := too_few(group)) is not None:
            yield none
            continue
        failures = [
            Failure(t.sample, "rollout", str(t.termination)) for t in group.trajectories if t.termination.quarantined
        ]
        rows: list[tuple[str, list[Verdict]]] = []
        if any(k in outside.final_labels for k in keys):
            rows.append(("Reaches the right result", [Verdict(outside.final_labels.get(k, 0)) for k in keys]))
        labels = [outside.step_labels.get(k, {}) for k in keys]
        for j in sorted(set().union(*labels)):
            row = [Verdict(own.get(j, 0), (j,) if own.get(j) else ()) for own in labels]
            rows.append((f"Step {j} is sound", row))
        scores = torch.tensor([[v.score for v in row] for _, row in rows], dtype=torch.int64)
        kept = dropout(scores)
        yield Judgement(
            group=live,
            criteria=tuple(
                Criterion(title, "As labelled in the file.", "As labelled in the file.") for title, _ in rows
            ),
            verdicts=tuple(tuple(row) for _, row in rows),
            dropped=tuple((~kept).tolist()),
            rewards=tuple(rewards(scores, kept).tolist()),
            failures=tuple(failures),
        )
