"""Runs jobs of several processes, forked from one warm process, and injects faults; tests/ranks/ reads the rest.

    echo '[{"name": …, "ranks": 2, "overrides": […], "fault": {…}}]' | python -m support.ranks_driver FOLDER

Each child gets the variables that torchrun would set and does what `python train.py` does. Its output goes to
FOLDER/NAME.RANK.log; a JSON list of [exit statuses, seconds from the first rank's end to the last one's] a job is
printed. A fault:

    {"rank": 1, "step": 2, "kind": "raise" | "kill" | "slow" | "elsewhere"}
    {"step": 2, "kind": "guard"}        on every rank, and rank 0 saves slowly
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from support.factory import rewarded

from callbacks.rollout import AgentRollout
from draco.core.errors import TrainingStopped
from draco.core.types import Group, Judgement, TaskBatch
from draco.run import checkpoint
from draco.run.archive import read_table, read_trajectories
from draco.stages import RubricStage


class Replay(AgentRollout):
    """Training groups out of an archive, held-out ones from the engine. `DRACO_FAULT` strikes here."""

    def __init__(self, archive: str, **options: Any) -> None:
        super().__init__(**options)
        rows = read_table(Path(archive), "trajectories")
        self.by_place: dict[tuple[int, int], list[Any]] = {}
        places = zip(rows["step"].to_pylist(), rows["group"].to_pylist(), strict=True)
        for place, trajectory in zip(places, read_trajectories(rows), strict=True):
            self.by_place.setdefault(place, []).append(trajectory)

    def generate(self, policy: Any, batch: TaskBatch) -> Iterator[Group]:
        if batch.purpose != "train":
            yield from super().generate(policy, batch)
            return
        self._groups, self._seconds = [], 0.0
        strike(batch.step)
        for i, task in enumerate(batch.tasks):
            index = batch.position(i)
            group = Group(task, tuple(self.by_place[batch.step, index]), index, batch.step)
            assert group.trajectories[0].task.id == task.id
            self._groups.append(group)
            yield group


class Rewards(RubricStage):
    """A number that a judge could have given."""

    gives_citations = False

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed

    def judge(self, groups: Iterable[Group]) -> Iterator[Judgement]:
        for group in groups:
            numbers = (7 * t.sample + 3 * group.index + group.step for t in group.trajectories)
            yield rewarded(group, (float(n % 5) for n in numbers))

    def state_dict(self) -> dict[str, Any]:
        return {"proposals": {f"rank {os.environ.get('RANK', 0)}": []}}


def strike(step: int) -> None:
    fault = json.loads(os.environ.get("DRACO_FAULT", "{}"))
    if fault.get("step") == step and fault["kind"] == "guard":
        save = checkpoint.save
        checkpoint.save = lambda *a: (time.sleep(3), save(*a))[1]  # type: ignore[assignment,return-value]
        raise TrainingStopped("three steps in a row")
    if fault.get("step") != step or str(fault.get("rank")) != os.environ.get("RANK"):
        return
    if fault["kind"] == "raise":
        raise RuntimeError("the judge is lost")
    if fault["kind"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault["kind"] == "slow":
        time.sleep(fault["seconds"])


def work(overrides: list[str], fault: dict[str, Any]) -> None:
    """What `python train.py` does, without its process."""
    from hydra import compose, initialize_config_module

    from draco.core.errors import DracoError
    from draco.run.folder import resume_config
    from draco.run.train import train

    if fault.get("kind") == "elsewhere" and str(fault["rank"]) == os.environ.get("RANK"):
        os.makedirs("elsewhere", exist_ok=True)
        os.chdir("elsewhere")
    with initialize_config_module("conf", version_base="1.3"):
        config = compose("train", overrides)
    if config.resume:
        config = resume_config(Path(config.resume), config, overrides)
    try:
        train(config)
    except DracoError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(2)


def child(folder: Path, job: dict[str, Any], number: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    ranks = job["ranks"]
    os.chdir(folder)
    with open(folder / f"{job['name']}.{number}.log", "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()  # a rank that dies in C++ says where
    try:
        os.environ["DRACO_FAULT"] = json.dumps(job.get("fault", {}))
        if ranks > 1:
            os.environ |= {
                "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                "LOCAL_WORLD_SIZE": str(ranks), "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test",
                "GROUP_RANK": "0",
            }  # fmt: skip
        work(job["overrides"], job.get("fault", {}))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def main(folder: Path) -> None:
    jobs = json.load(sys.stdin)
    import logging

    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import torch
    from transformers.models.llama import modeling_llama  # noqa: F401

    import draco.run.train  # noqa: F401

    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("draco").setLevel(logging.INFO)
    torch.set_num_threads(1)
    results = []
    for job in jobs:
        codes: dict[int, int] = {}
        ends: list[float] = []
        with socket.socket() as held:  # to the end: rank 0 says SO_REUSEADDR too and may listen there, nobody else
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("127.0.0.1", 0))
            pids = [child(folder, job, number, held.getsockname()[1]) for number in range(job["ranks"])]
            while len(codes) < len(pids):
                pid, status = os.wait()
                if pid in pids:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                    ends.append(time.monotonic())
        results.append([[codes[p] for p in pids], ends[-1] - ends[0]])
        print(job["name"], results[-1], file=sys.stderr, flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
