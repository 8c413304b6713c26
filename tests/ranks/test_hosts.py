"""Two "hosts" (network namespaces with addresses of their own): torchrun joins them, one is lost, one goes on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ROOT

from draco.run.archive import step_folders
from draco.run.checkpoint import checkpoints, read_state

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and `ip`"),
]

ADDRESSES = ("10.77.0.1", "10.77.0.2")
JOB = [
    "steps=200", "tasks_per_step=2", "group_size=2", "policy.rank=4", "eval.before=false", "eval.tasks=1",
    "limits.max_response_tokens=120", "trainer=ddp_multinode", "trainer.accelerator=cpu", "rubric=random",
    "credit=uniform",
]  # fmt: skip


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[str, str]]:
    """Two namespaces with one cable between them."""
    names = (f"draco{os.getpid()}a", f"draco{os.getpid()}b")

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    try:
        for name in names:
            ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    try:
        ip("link", "add", "cable0", "netns", names[0], "type", "veth", "peer", "name", "cable0", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable0")
            ip("-n", name, "link", "set", "cable0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def start(host: str, address: str, log: Path, *overrides: str) -> subprocess.Popen[bytes]:
    """One torchrun on a host, as scripts/slurm/ddp.sbatch starts it; a session of its own, to be killed as a whole."""
    launcher = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "test"]
    launcher += ["--rdzv-endpoint", f"{ADDRESSES[0]}:29511", "--local-addr", address]
    # The name of this machine is not that of a namespace, by which torchrun would know who holds the rendezvous.
    launcher += ["--rdzv-conf", f"is_host={int(address == ADDRESSES[0])}"]
    command = [sys.executable, "-m", "torch.distributed.run", *launcher, str(ROOT / "train.py"), *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "cable0", "HF_HUB_OFFLINE": "1"}
    with open(log, "wb") as file:
        return subprocess.Popen(
            ["ip", "netns", "exec", host, *command],
            cwd=ROOT, env=environment, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a host's processes: torchrun gives its workers sessions of their own, so by their parent."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    found = [int(p) for p in children.read_text().split()] if children.exists() else []
    for pid in (process.pid, *found):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def test_two_hosts_train_one_is_lost_and_the_other_goes_on(hosts: tuple[str, str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    logs = [tmp_path / "a.log", tmp_path / "b.log"]
    jobs = [
        start(host, address, log, *JOB, f"run={run}") for host, address, log in zip(hosts, ADDRESSES, logs, strict=True)
    ]
    try:
        until = time.monotonic() + 600
        while not (run.is_dir() and checkpoints(run)):
            assert time.monotonic() < until, logs[0].read_text()[-2000:]
            assert all(j.poll() is None for j in jobs), "".join(log.read_text()[-2000:] for log in logs)
            time.sleep(0.1)
        end(jobs[1])  # in the middle of a step: few of the 200 are done
        # A worker ends within 60 s and torchrun takes its time to say so; what waits for a lost host waits a year.
        assert jobs[0].wait(timeout=300) != 0
    finally:
        for job in jobs:
            if job.poll() is None:
                end(job)
    said = logs[0].read_text()
    assert "stopped, because rank" in said
    assert "no sign of life" in said or "gone" in said
    (newest,) = checkpoints(run)[-1:]
    state = read_state(newest)
    assert state["world_size"] == 2
    steps = state["step"] + 2
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), f"resume={run}", f"steps={steps}", "trainer=cpu"],
        cwd=ROOT, capture_output=True, text=True, timeout=900, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(step_folders(run)) == steps
    assert (run / "summary.json").is_file()
