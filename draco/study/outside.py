"""Finished agent trajectories from elsewhere, as groups: OpenAI chat messages, τ-bench results, labelled rows.

A step is an assistant turn: its text, then its tool calls; the observation is all that comes before the next one.
Without a policy there are no token ids (they are −1); n_j is the completion tokens that the log states, or else the
number of words and signs of the turn. A log that does not say how a trajectory ended leaves its end `unknown`.

A `reward` (τ-bench) counts as a label of the whole: 1 or more passes, anything less fails, fractions too.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draco.core.errors import ConfigError
from draco.core.types import Criterion, Failure, Group, Judgement, Message, Step, Task, Termination, Trajectory, Verdict
from draco.judge.rewards import dropout, rewards
from draco.study.tau import ENDS

__all__ = ["Outside", "judge_by_labels", "read_groups_of", "too_few"]

_WORDS = re.compile(r"\w+|[^\w\s]")
_SHOWN = 20  #: faults listed in one error


@dataclass(frozen=True, slots=True)
class Outside:
    """A file's trajectories."""

    form: str  #: chat | tau_bench | tau2 | agent_process_bench
    groups: tuple[Group, ...]
    #: (task id, sample) → labels by 1-based step, and of the whole; None: the file has none
    step_labels: Mapping[tuple[str, int], Mapping[int, int]]
    final_labels: Mapping[tuple[str, int], int]


class _Fault(ValueError):
    """One malformed row; the message names the field."""


def read_groups_of(path: Path) -> Outside:
    """Read a file; groups are by task id, in order of first appearance.

    Raises:
        ConfigError: no such file, or malformed rows: all are listed with line (or entry) and field, none is left out
            quietly.
    """
    if not path.is_file():
        raise ConfigError(f"input={path}: no such file")
    form, rows, faults = _rows(path)
    members: dict[str, list[Trajectory]] = defaultdict(list)
    steps: dict[tuple[str, int], Mapping[int, int]] = {}
    finals: dict[tuple[str, int], int] = {}
    for where, row in rows:
        try:
            trajectory, step_labels, final = _trajectory(form, row, len(members[_task_id(form, row)]))
        except _Fault as fault:
            faults.append(f"{where}: {fault}")
            continue
        task = trajectory.task.id
        if any(t.sample == trajectory.sample for t in members[task]):
            faults.append(
                f"{where}: field {_FIELDS[form][1]!r}: task {task!r} has a trajectory {trajectory.sample} already"
            )
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
        whole: Any = json.loads(text)
    except ValueError:
        whole = None
    if isinstance(whole, dict) and "simulations" in whole:
        if not isinstance(whole["simulations"], list):
            kind = type(whole["simulations"]).__name__
            raise ConfigError(f"{path}: field 'simulations': expected a list, got {kind}")
        return "tau2", [(f"simulation {i}", r) for i, r in enumerate(whole["simulations"])], faults
    if isinstance(whole, list):
        rows = [(f"entry {i}", r) for i, r in enumerate(whole)]
    elif isinstance(whole, dict):
        rows = [("line 1", whole)]
    else:
        rows = []
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
    if isinstance(row.get(name), bool) or not isinstance(row.get(name), str | int):
        raise _Fault(f"field {name!r}: expected the task's id, got {row.get(name)!r}")
    return str(row[name])


def _trajectory(form: str, row: Any, default: int) -> tuple[Trajectory, Mapping[int, int] | None, int | None]:
    task_id = _task_id(form, row)
    _, sample_field, messages_field = _FIELDS[form]
    sample = row.get(sample_field, default)
    if not isinstance(sample, int) or isinstance(sample, bool) or sample < 0:
        raise _Fault(f"field {sample_field!r}: expected a number from 0, got {sample!r}")
    given = row.get(messages_field)
    if not isinstance(given, list):
        raise _Fault(f"field {messages_field!r}: expected a list of messages, got {type(given).__name__}")
    if not given:
        raise _Fault(f"field {messages_field!r}: is empty")
    messages = [_message(m, f"{messages_field}[{i}]") for i, m in enumerate(given)]
    if not any(m.role == "assistant" for m in messages):
        raise _Fault(f"field {messages_field!r}: no assistant turn in {len(messages)} messages")
    steps, positions, ids, step_of = _steps(messages, given)
    instruction = str(row.get("question") or row.get("instruction") or _first_user(messages))
    end = ENDS.get(str(row.get("termination_reason", "")).removeprefix("TerminationReason.").lower())
    trajectory = Trajectory(
        task=Task(task_id, instruction, "outside", task_id),
        sample=sample,
        messages=tuple(messages),
        token_ids=tuple(ids),
        step_of=tuple(step_of),
        logprobs=(0.0,) * len(ids),
        steps=tuple(steps),
        termination=end or Termination.UNKNOWN,
        prompt_tokens=0,
        policy_version=0,
        seed=0,
    )
    return trajectory, _step_labels(row, positions), _final_label(row)


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise _Fault(f"field {where}: expected an object, got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _Fault(f"field {where}.role: expected a text, got {role!r}")
    content = message.get("content")
    if isinstance(content, list):
        for k, part in enumerate(content):
            if not isinstance(part, dict):
                raise _Fault(f"field {where}.content[{k}]: expected an object, got {type(part).__name__}")
        content = "\n".join(str(p.get("text", f"({p.get('type', 'part')})")) for p in content)
    if content is not None and not isinstance(content, str):
        raise _Fault(f"field {where}.content: expected a text, got {type(content).__name__}")
    parts = [content] if content else []
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise _Fault(f"field {where}.tool_calls: expected a list, got {type(calls).__name__}")
    for call in [*(calls or ()), *([message["function_call"]] if message.get("function_call") else ())]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _Fault(f"field {where}.tool_calls: expected calls with a function name, got {call!r:.80}")
        arguments = function.get("arguments", "")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        parts.append(f"{function['name']}({text})")
    return Message(role, "\n".join(parts))


def _steps(
    messages: Sequence[Message], given: Sequence[Mapping[str, Any]]
) -> tuple[list[Step], list[int], list[int], list[int]]:
    """Steps, the position of each among the messages, and token ids (−1) with their steps."""
    steps: list[Step] = []
    positions = [i for i, m in enumerate(messages) if m.role == "assistant"]
    ids: list[int] = []
    step_of: list[int] = []
    for j, (at, stop) in enumerate(zip(positions, [*positions[1:], len(messages)], strict=True)):
        usage = given[at].get("usage") or {}
        stated = usage.get("completion_tokens") if isinstance(usage, dict) else None
        count = stated if isinstance(stated, int) and stated > 0 else max(len(_WORDS.findall(messages[at].content)), 1)
        after = [
            m.content if m.role in {"tool", "function"} else f"({m.role}) {m.content}" for m in messages[at + 1 : stop]
        ]
        steps.append(Step(j + 1, (len(ids), len(ids) + count), messages[at].content, "\n".join(after), j + 1))
        ids += [-1] * count
        step_of += [j] * count
    return steps, positions, ids, step_of


def _first_user(messages: Sequence[Message]) -> str:
    return next((m.content for m in messages if m.role == "user"), "")


def _step_labels(row: Mapping[str, Any], positions: Sequence[int]) -> Mapping[int, int] | None:
    labels = row.get("step_labels")
    if labels is None:
        return None
    if not isinstance(labels, dict):
        raise _Fault(f"field 'step_labels': expected message index → −1, 0 or 1, got {type(labels).__name__}")
    found = {}
    for index, label in labels.items():
        if label not in (-1, 0, 1) or isinstance(label, bool):
            raise _Fault(f"field 'step_labels'[{index}]: expected −1, 0 or 1, got {label!r}")
        if not str(index).isdigit() or int(index) not in positions:
            raise _Fault(f"field 'step_labels'[{index}]: message {index} is no assistant turn")
        found[positions.index(int(index)) + 1] = int(label)
    return found


def _final_label(row: Mapping[str, Any]) -> int | None:
    if (label := row.get("final_label")) is not None:
        if label not in (-1, 0, 1) or isinstance(label, bool):
            raise _Fault(f"field 'final_label': expected −1, 0 or 1, got {label!r}")
        return int(label)
    info = row.get("reward_info") or {}
    if not isinstance(info, dict):
        raise _Fault(f"field 'reward_info': expected an object, got {type(info).__name__}")
    reward = row.get("reward", info.get("reward"))
    if reward is None:
        return None
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        raise _Fault(f"field 'reward': expected a finite number, got {reward!r}")
    return 1 if reward >= 1 else -1


def too_few(group: Group) -> Judgement | None:
    """What becomes of a group with fewer than two usable trajectories: failures, and nobody is asked; None: it has two.

    A log has tasks that ran once. They are no fault of the judge and must not look like one.
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
    """The published labels as verdicts: one criterion a step position (cites that step), one for the result.

    A label of 0 is not applicable. The result cites no step: it counts in R and in no Q. Dropout and rewards as always.

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
