"""Signals end a job between whole steps; what a launcher then sees."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment
from support import ROOT

from draco.core.signals import Interrupted, hold, listening, release, uninterrupted


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGUSR2, 75)]
)
def test_a_signal_raises_and_has_a_status(number: int, status: int) -> None:
    before = signal.getsignal(number)
    with pytest.raises(Interrupted) as caught, listening():
        signal.raise_signal(number)
    assert caught.value.status == status
    assert signal.getsignal(number) is before


def test_a_held_signal_waits_for_release_and_only_the_first_counts() -> None:
    with listening():
        hold()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(Interrupted, match="SIGTERM"):
            release()
    with listening():
        release()  # nothing is left over


def test_a_signal_inside_uninterrupted_comes_after_it() -> None:
    done = []

    def body() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGTERM)
            done.append(True)

    with listening(), pytest.raises(Interrupted):
        body()
    assert done == [True]


def test_an_interrupt_that_was_swallowed_comes_again_at_the_end_of_the_step() -> None:
    with listening():
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGTERM)
        hold()
        with pytest.raises(Interrupted):
            release()


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with listening():
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_another_thread_changes_nothing() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []

    def body() -> None:
        with listening(), uninterrupted():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [before]


@pytest.mark.usefixtures("ctrl_c")
def test_a_second_ctrl_c_ends_at_once() -> None:
    program = (
        "import signal; from draco.core.signals import *\n"
        "with listening():\n"
        "    hold(); signal.raise_signal(signal.SIGINT); print('first', flush=True)\n"
        "    signal.raise_signal(signal.SIGINT); print('second', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "first\n", "")


class Looks(LightningModule):
    """Sees who answers SIGUSR1 during training."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.handler = signal.getsignal(signal.SIGUSR1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)


def test_slurm_does_not_write_lightnings_checkpoint_or_requeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PROCID", "LOCALID", "NODEID", "JOB_ID"):
        monkeypatch.setenv(f"SLURM_{name}", "0")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    module = Looks()
    with listening():
        ours = signal.getsignal(signal.SIGUSR1)
        trainer = Trainer(
            max_epochs=1,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            plugins=[SLURMEnvironment()],
            default_root_dir=str(tmp_path),
        )
        trainer.fit(module, [torch.zeros(1)])
    assert module.handler == ours
