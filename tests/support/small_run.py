"""A run of two steps, small enough to count by hand, written by the real writers. Texts are hostile.

Step 0 has one group of three rollouts, three steps each of 2, 4 and 2 tokens (the third: one step of 3)::

                      rollout 0    rollout 1    rollout 2
    A  kept           + cites 1    − cites 2    0
    B  kept           + cites 1,2  + cites 1,2  − cites 1
    C  dropped        +            +            +
    R                 1            0            −1

Step 1 has one group whose rewards are alike: criterion A fails everybody, at step 1. Its third rollout was lost.
"""

from __future__ import annotations

import json
from pathlib import Path

from support.factory import call, group, judged, trajectory, verdicts

from callbacks.credit.step import StepLevelCredit
from draco.core.types import Credit, Criterion, Failure, Group, Message, Task, Termination, Trajectory
from draco.run.archive import write_step

HOSTILE = '</script><img src=x onerror="window.hacked=1"><script>window.hacked=1</script>\u202e{{data}}'
SCORES = {0: [[1, -1, 0], [1, 1, -1], [1, 1, 1]], 1: [[-1, -1]]}
CITED: dict[int, list[list[tuple[int, ...]]]] = {
    0: [[(1,), (2,), ()], [(1, 2), (1, 2), (1,)], [(), (), ()]],
    1: [[(1,), (1,)]],
}


def rollout(task: Task, sample: int, lengths: tuple[int, ...], end: Termination = Termination.SUBMITTED) -> Trajectory:
    """A rollout whose steps have so many tokens."""
    opening = (Message("system", "be good"), Message("user", f"do {HOSTILE}"), Message("assistant", "act"))
    steps = [(f"act {j + 1} {HOSTILE}", f"seen {HOSTILE}") for j in range(len(lengths))]
    return trajectory(sample, steps, end, task=task, opening=opening, tokens=lengths, seed=7)


def credit_of(step: int, group: Group, lost: tuple[Failure, ...] = ()) -> Credit:
    """What training would have made of the scores above."""
    table = verdicts(SCORES[step], CITED[step], f"because {HOSTILE}")
    criteria = [Criterion(f"criterion {name} {HOSTILE}", "text", "how") for name in "ABC"[: len(table)]]
    return StepLevelCredit().assign_one(judged(group, criteria, table, lost))


def score_reply(*scores: int) -> str:
    """A reply of the score phase."""
    verdicts = [{"title": f"t{i}", "evidence": "", "justification": "", "score": s} for i, s in enumerate(scores)]
    return json.dumps({"verdicts": verdicts})


def write_run(path: Path, rubric: str = "dynamic", credit: str = "step", seed: int = 0) -> Path:
    """The run folder."""
    path.mkdir(parents=True, exist_ok=True)
    tasks = [Task(f"task{s}", "do it", "train", f"s{s}") for s in (0, 1)]
    first = (
        rollout(tasks[0], 0, (2, 4, 2)), rollout(tasks[0], 1, (2, 4, 2)),
        rollout(tasks[0], 2, (3,), Termination.LENGTH_LIMIT),
    )  # fmt: skip
    second = (rollout(tasks[1], 0, (2, 2)), rollout(tasks[1], 1, (2, 2)))
    lost = rollout(tasks[1], 2, (1,), Termination.ENVIRONMENT_ERROR)
    calls = [
        call(0, "score", 0, score_reply(1, 1)),
        call(0, "score", 1, score_reply(-1, 1)),
        call(0, "attribute", 0, "{}", 0.5),
    ]
    write_step(path, 0, [group(first, step=0)], [credit_of(0, group(first, step=0))], calls)
    failure = (Failure(2, "rollout", "environment_error"),)
    write_step(path, 1, [group((*second, lost), step=1)], [credit_of(1, group(second, step=1), failure)],
               [call(1, "score", 0, score_reply(-1), None)])  # fmt: skip
    config = {
        "steps": 2, "seed": seed, "env": {"name": "echo"}, "policy": {"path": "pkg://draco.policy.tiny"},
        "judge": {"_target_": "draco.judge.client.JudgeClient", "model": "judge/one"},
        "rubric": {"name": rubric, "attribution_overrides": "ignore"},
        "credit": {"name": credit, "_target_": "callbacks.credit.step.StepLevelCredit"},
    }  # fmt: skip
    (path / "config.yaml").write_text(json.dumps(config), encoding="utf-8")
    (path / "metrics.csv").write_text("step,reward/mean,update/loss\n1,0.0,0.5\n2,-1.0,0.25\n", encoding="utf-8")
    (path / "train_success.csv").write_text(
        "step,task_id,sample,success,termination,error\n0,task0,0,1,submitted,\n0,task0,1,0,submitted,\n"
        "0,task0,2,,length_limit,evaluator failed\n1,task1,0,1,submitted,\n1,task1,1,1,submitted,\n", encoding="utf-8",
    )  # fmt: skip
    for name, good in (("before", (0, 0)), ("after", (1, 2))):
        (path / f"evaluation_{name}.json").write_text(json.dumps(evaluation(good)), encoding="utf-8")
    (path / "summary.json").write_text(
        json.dumps({"setting": f"{rubric}+{credit}", "judge_cost_usd": None}), encoding="utf-8"
    )
    return path


def evaluation(good: tuple[int, int], cost: float | None = None) -> dict[str, object]:
    """Two tasks of one scenario, n = 2, with so many successes each."""
    from draco.env.records import EvalRecord
    from draco.env.success import summarise

    records = [EvalRecord(f"e{t}", "s", t + 1, i, i < good[t], "submitted", 3 + t, 10) for t in (0, 1) for i in (0, 1)]
    return {"split": "test_normal", **summarise(records), "cost_usd": cost, "records": [r.as_dict() for r in records]}
