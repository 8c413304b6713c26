"""Training runs, in this process or by `python train.py`, and what their run folders hold."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from support import ROOT
from support.configuration import configuration

from draco.run.checkpoint import checkpoints
from draco.run.folder import resume_config
from draco.run.train import train as run_job

#: options of the smallest run, and of one that is large enough to learn something
SMALL = ("tasks_per_step=2", "group_size=2", "eval.tasks=2", "policy.rank=4")
QUICK = ("steps=2", "tasks_per_step=3", "group_size=3", "eval.tasks=6", "policy.rank=4")


def start(*arguments: str, cwd: Path = ROOT, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """`python train.py …`, not waited for."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *arguments],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def shell(*arguments: str, code: int = 0, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    """Run `python train.py …` to its end and return everything printed."""
    process = start(*arguments, cwd=cwd, env=env)
    out, err = process.communicate(timeout=900)
    assert process.returncode == code, out + err
    return out + err


def train(*overrides: str, conf: Path | None = None) -> dict[str, Any]:
    """The same job in this process; returns the summary."""
    searched = [f"hydra.searchpath=[file://{conf}]"] if conf else []
    config = configuration(*overrides, *searched)
    if config.resume:
        config = resume_config(Path(config.resume), config, list(overrides))
    return run_job(config)


def adapter(run: Path) -> dict[str, torch.Tensor]:
    """The adapter of the last checkpoint."""
    return load_file(checkpoints(run)[-1] / "adapter" / "adapter_model.safetensors")


def same(a: Path, b: Path) -> bool:
    """Whether two runs ended with the same adapter, to the bit."""
    left, right = adapter(a), adapter(b)
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def rows_of(file: Path) -> list[dict[str, str]]:
    with open(file, encoding="utf-8", newline="") as opened:
        return list(csv.DictReader(opened))
