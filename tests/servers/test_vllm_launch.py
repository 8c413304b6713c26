"""Servers that belong to a run: command line, environment, ports, and that none outlives the trainer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.processes import alive, children, gone, wait_for

from draco.core.distributed import alone
from draco.core.errors import ConfigError
from draco.policy.policy import Policy
from draco.rollout.engines.vllm import Launch, VllmEngine, watchdog
from draco.rollout.engines.vllm import launch as launching
from draco.rollout.engines.vllm.launch import Launched, ServedModel

WATCHDOG = Path(watchdog.__file__)
#: a command that leaves a child of its own behind, as a server with worker processes does
FAMILY = (
    "import subprocess, sys, time; p = subprocess.Popen(['sleep', '600']); print('grandchild', p.pid, flush=True); "
    "time.sleep(600)"
)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
@pytest.mark.parametrize("victim", ["trainer", "watchdog"])
def test_kill_9_leaves_no_orphan(victim: str) -> None:
    """The trainer dies: its watchdog ends the whole family. The watchdog dies: the kernel ends the server itself."""
    start = (
        "import os, subprocess, sys; g = subprocess.Popen([sys.executable, '-I', '-S', sys.argv[1], str(os.getpid()), "
        "sys.executable, '-c', sys.argv[2]], start_new_session=True); print('watchdog', g.pid, flush=True); g.wait()"
    )
    trainer = subprocess.Popen([sys.executable, "-c", start, str(WATCHDOG), FAMILY], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    said = dict(trainer.stdout.readline().split() for _ in range(2))  # in either order
    watchdog_pid, grandchild = int(said["watchdog"]), int(said["grandchild"])
    (server,) = wait_for(lambda: children(watchdog_pid))
    try:
        if victim == "trainer":
            trainer.kill()
            assert gone([watchdog_pid, server, grandchild])
        else:
            os.kill(watchdog_pid, signal.SIGKILL)
            assert gone([server])
    finally:
        for pid in (grandchild, server, watchdog_pid):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        trainer.kill()
        trainer.wait()
        trainer.stdout.close()


def test_the_watchdog_passes_the_exit_status_on() -> None:
    command = [sys.executable, str(WATCHDOG), str(os.getpid()), sys.executable, "-c", "raise SystemExit(7)"]
    assert subprocess.run(command, check=False).returncode == 7


@pytest.fixture
def fake_python(tmp_path: Path) -> Path:
    """An "interpreter" that says what it was asked to run, and fails."""
    script = tmp_path / "python"
    script.write_text('#!/bin/sh\necho "$@"\nenv\necho no module named vllm >&2\nexit 3\n')
    script.chmod(0o755)
    return script


def test_a_server_that_does_not_start_is_a_configuration_error_with_its_own_words(
    policy: Policy, fake_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "")  # the engine makes one up; the variable is put back after the test
    monkeypatch.setenv("OPENAI_API_KEY", "sk-judge")
    monkeypatch.setenv("WORLD_SIZE", "1")
    engine = VllmEngine(launch=Launch(), python=str(fake_python), max_prompt_tokens=1000, max_response_tokens=200)
    with pytest.raises(ConfigError, match=r"exit status 3\); the end of .*servers/0\.log:(.|\n)*no module named vllm"):
        engine.open(policy, tmp_path / "run", temperature=1.0)
    printed = (tmp_path / "run/servers/0.log").read_text()
    arguments = printed.splitlines()[0]
    key = os.environ["VLLM_API_KEY"]
    assert len(key) > 20
    assert key not in arguments
    assert "sk-judge" not in printed
    assert "WORLD_SIZE" not in printed
    for words in (
        f"--model {policy.folder}", "--host 127.0.0.1", "--max-model-len 1200", "--max-loras 2", "--max-lora-rank 16",
        "--logprobs-mode processed_logprobs", "--generation-config vllm", "--enable-lora", "--enable-prefix-caching",
    ):  # fmt: skip
        assert words in arguments


def test_missing_environment_names_the_script(policy: Policy, tmp_path: Path) -> None:
    engine = VllmEngine(launch=Launch(), python=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"scripts/setup_vllm\.sh"):
        engine.open(policy, tmp_path / "run", temperature=1.0)


def test_ranks_of_a_machine_agree_on_ports_and_key_and_the_first_starts_servers(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines of two ranks each: what their first ranks choose comes to the second ones."""
    started: list[tuple[int, Path]] = []
    monkeypatch.setattr(Launched, "_start", lambda self, index, *_: started.append((index, self._log(index))))
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 4)
    monkeypatch.setenv("VLLM_API_KEY", "")  # put back afterwards
    told: list[tuple[str, Any]] = []

    def gather(value: tuple[str, Any]) -> list[tuple[str, Any]]:
        told.append(value)
        return [("9", ([1], "of another machine")), *told]

    monkeypatch.setattr(launching, "gather", gather)

    def launched(launch: Launch) -> tuple[list[str], str]:
        made = Launched(launch, sys.executable, ServedModel.of(policy, 100), logs=tmp_path, key_variable="VLLM_API_KEY")
        return made.urls, os.environ["VLLM_API_KEY"]

    found = []
    for machine, rank in (("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")):
        monkeypatch.setenv("GROUP_RANK", machine)
        monkeypatch.setenv("LOCAL_RANK", rank)
        monkeypatch.delenv("VLLM_API_KEY", raising=False)
        found.append(launched(Launch(count=2)))
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert found[0][1] != found[2][1]
    assert len(set(found[0][0])) == 2
    # One folder for all machines, a file for each server.
    assert started == [(i, tmp_path / name) for i, name in [(0, "0.log"), (1, "1.log"), (0, "1-0.log"), (1, "1-1.log")]]
    told.clear()
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert launched(Launch(count=2, port=8100))[0] == ["http://127.0.0.1:8100", "http://127.0.0.1:8101"]


def test_a_rank_that_works_alone_starts_servers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preflight: the other ranks are no part of it, and what tells them would wait for them for ever."""
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("torch.distributed.all_gather_object", lambda *_, **__: pytest.fail("waits for the others"))
    monkeypatch.setenv("VLLM_API_KEY", "k")
    with alone():
        assert len(launching._agreed(Launch(count=2), "VLLM_API_KEY")) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_loras": 1}, "max_loras is 1"),
        ({"count": 0}, "count is 0; expected an integer ≥ 1"),
        ({"memory_share": 1.5}, "memory_share is 1.5"),
        ({"tensor_parallel": 2, "gpus": ["0,1", "2"]}, "'2' does not name tensor_parallel=2 GPUs"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Launch(**options)  # type: ignore[arg-type]


def test_one_server_a_set_of_gpus(policy: Policy) -> None:
    launch = Launch(tensor_parallel=2, gpus=["0,1", "2,3"])
    assert launch.servers == 2
    assert [launch.environment(i, "k", None)["CUDA_VISIBLE_DEVICES"] for i in range(2)] == ["0,1", "2,3"]
    assert "--tensor-parallel-size 2" in " ".join(launch.command("python", ServedModel.of(policy, 100), 8000))
