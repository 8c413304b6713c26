"""Where runs take place: processes, strategies, kernels, container health; decided before anything is loaded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from draco.core.errors import ConfigError, JudgeConfigError, TrainingStopped
from draco.core.signals import Interrupted
from draco.core.watch import status_of
from draco.policy import kernels
from draco.run import healthcheck, preflight
from draco.run.launch import launch_processes, nearest, place, processes, sharded, warn_uneven


def composed(*overrides: str) -> DictConfig:
    GlobalHydra.instance().clear()
    with initialize_config_module("conf", version_base="1.3"):
        return compose("train", [*overrides, "run=x"])


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        ("cpu", (1, 1, False)),
        ("gpu", (1, 1, False)),
        ("ddp", (4, 1, False)),
        ("fsdp", (4, 1, True)),
        ("fsdp_8gpu", (8, 1, True)),
        ("ddp_multinode", (4, 2, False)),
        ("fsdp_multinode", (4, 2, True)),
    ],
)
def test_trainers_say_what_they_want(
    trainer: str, expected: tuple[int, int, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    config = composed(f"trainer={trainer}")
    assert (*processes(config), sharded(config)) == expected
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    if trainer in ("ddp", "fsdp"):  # as many as there are, and without GPUs one
        assert processes(config) == (1, 1)


def test_several_machines_need_torchrun() -> None:
    with pytest.raises(ConfigError, match=r"torchrun --nnodes 2 .*scripts/slurm"):
        launch_processes(composed("trainer=ddp_multinode", "trainer.devices=8"), [], sweeping=False)
    with pytest.raises(ConfigError, match="a sweep runs in one process"):
        launch_processes(composed("trainer=ddp", "trainer.devices=2"), [], sweeping=True)
    with pytest.raises(ConfigError, match="use trainer=ddp or trainer=fsdp"):
        launch_processes(composed("trainer=cpu", "trainer.devices=2"), [], sweeping=False)


@pytest.mark.parametrize("words", [["train.py"], ["/opt/draco/bin/draco", "train"]])
def test_several_processes_are_started_by_torchrun(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, command: ran.append(command))
    monkeypatch.setattr("sys.argv", [*words, "trainer=ddp", "trainer.devices=2"])
    config = composed("trainer=ddp", "trainer.devices=2", "trainer.accelerator=cpu")
    launch_processes(config, ["trainer=ddp"], sweeping=False)
    launch_processes(composed("trainer=cpu"), [], sweeping=False)
    (command,) = ran
    expected = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words, "trainer=ddp"]
    assert command[1:] == [*expected, "trainer.devices=2", "run=x"]  # one folder for all processes


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["placement=remote"], r"engine\.servers is not set"),
        (["placement=remote", "trainer=cpu", "trainer.devices=2"], r"engine\.servers is not set"),
        (["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "policy=hf"], r"policy\.path is not set"),
        (["placement=colocated"], r"trainer\.devices=8 but this machine has 0 GPUs; .* trainer=cpu"),
        (["placement=split"], r"trainer\.devices=\[0, 1, 2, 3\] but .* leave out placement=split"),
        (["trainer=gpu"], r"trainer\.devices=1 but this machine has 0 GPUs"),
        (["trainer=fsdp_8gpu", "trainer.devices=auto"], r"trainer\.devices=auto but this machine has 0 GPUs"),
    ],
)
def test_what_cannot_work_is_said_before_any_process_starts(
    overrides: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("torchrun was started"))
    with pytest.raises(ConfigError, match=message):
        launch_processes(composed(*overrides), [], sweeping=False)


def test_a_machine_may_have_too_few_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    started: list[object] = []
    monkeypatch.setattr(os, "execv", lambda *command: started.append(command))
    for placement in ("colocated", "split"):
        config = composed(f"placement={placement}")
        if placement == "colocated":
            with pytest.raises(ConfigError, match=r"has 4 GPUs; expected trainer\.devices up to 4"):
                launch_processes(config, [], sweeping=False)
        else:
            launch_processes(config, [], sweeping=False)
    assert len(started) == 1


def test_a_cpu_trainer_goes_with_servers_elsewhere() -> None:
    config = composed("placement=remote", "trainer=cpu")
    assert (config.trainer.accelerator, processes(config)) == ("cpu", (1, 1))


def test_the_launcher_decides_how_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    config = composed("trainer=ddp")
    place(config)
    assert (config.trainer.devices, config.trainer.num_nodes) == (3, 2)
    with pytest.raises(ConfigError, match=r"several processes and trainer\.strategy=auto"):
        place(composed("trainer=cpu"))


def test_sampling_from_shards_is_refused_unless_asked_for() -> None:
    with pytest.raises(ConfigError, match="engine=transformers cannot sample from a sharded policy"):
        place(composed("trainer=fsdp"))
    place(composed("trainer=fsdp", "distributed.gather_for_rollouts=true"))


def test_uneven_shares_are_said_with_the_nearest_even_ones(caplog: pytest.LogCaptureFixture) -> None:
    assert [nearest(16, n) for n in (3, 5, 32)] == [(15, 18), (15, 20), (32,)]
    warn_uneven(16, 8)
    assert not caplog.records
    warn_uneven(16, 3)
    warn_uneven(2, 3)
    assert "shares of 5 and 6 tasks, so some ranks wait; nearest even: 15 or 18" in caplog.text
    assert "without any work; nearest even: 3" in caplog.text


def test_a_hybrid_model_needs_its_kernels_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"flash-linear-attention and causal-conv1d .*pip install .*draco\[gpu\]"):
        kernels.require_kernels("qwen3_5_text")
    kernels.require_kernels("qwen2")
    monkeypatch.setattr(kernels, "find_spec", lambda name: object())
    kernels.require_kernels("qwen3_5")


def test_exit_statuses_are_those_of_the_command_line() -> None:
    errors = (ConfigError("x"), JudgeConfigError("x"), TrainingStopped("x"), RuntimeError("x"), Interrupted(15))
    assert [status_of(e) for e in errors] == [2, 2, 3, 1, 75]
    assert status_of(SystemExit(75)) == 75


def test_the_health_check_looks_for_the_job_and_the_disk(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    (proc / "17").mkdir(parents=True)
    (proc / "17" / "cmdline").write_bytes(b"/bin/sh\0-c\0sleep")
    assert healthcheck.healthy(proc, tmp_path) == "no draco process is running"
    (proc / "17" / "cmdline").write_bytes(b"/opt/draco/bin/python\0/opt/draco/bin/draco\0train\0steps=1")
    assert healthcheck.healthy(proc, tmp_path) == ""
    assert "takes no files" in healthcheck.healthy(proc, tmp_path / "none")


def test_a_rank_hides_no_fault_of_its_own_in_a_preflight(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What all ranks are told is a row of rank 0's table; a fault of one rank alone must reach the others."""
    monkeypatch.setattr(preflight, "rank", lambda: 1)

    def try_it(fault: Exception) -> None:
        monkeypatch.setattr(preflight, "_folder", lambda *_: (_ for _ in ()).throw(fault))
        preflight.preflight(composed(), tmp_path)

    try_it(ConfigError("not shared"))
    with pytest.raises(PermissionError):
        try_it(PermissionError("of this machine"))


def test_weights_are_fetched_once_a_node_at_one_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    from draco.run import launch as placement

    fetched: list[tuple[str, str]] = []

    class Api:
        def model_info(self, path: str, revision: str | None) -> object:
            return type("Info", (), {"sha": f"commit of {revision}"})

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda p, revision: fetched.append((p, revision)))
    monkeypatch.setattr(placement, "world_size", lambda: 2)
    monkeypatch.setattr(placement, "barrier", lambda: None)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for rank, local in ((0, 0), (1, 1), (2, 0)):  # two on one node, one on another
        monkeypatch.setattr(placement, "main_only", lambda work, rank=rank: "commit of v1" if rank else work())
        monkeypatch.setattr(placement, "local_rank", lambda local=local: local)
        config = composed("policy=hf", "policy.path=owner/model", "policy.revision=v1")
        placement.fetch_weights(config)
        assert config.policy.revision == "commit of v1"
    assert fetched == [("owner/model", "commit of v1")] * 2
