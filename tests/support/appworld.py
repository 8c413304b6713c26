"""Where the real AppWorld is installed, and episodes of its miniature tasks, played block by block."""

from __future__ import annotations

import os
from collections.abc import Coroutine
from typing import Any

from support import ROOT
from support.appworld_coder import GOLD

from draco.core.background import BackgroundLoop
from draco.core.types import Task
from draco.env.appworld import AppWorldEnvironment
from draco.env.appworld.environment import AppWorldEpisode

PYTHON = os.environ.get("DRACO_APPWORLD_PYTHON", str(ROOT / ".venv-appworld" / "bin" / "python"))
DATA = os.environ.get("DRACO_APPWORLD_DATA", str(ROOT / ".appworld-mini"))
TASKS = sorted(GOLD)


def task_of(environment: AppWorldEnvironment, task_id: str) -> Task:
    """One of the nine tasks."""
    return next(t for t in environment.tasks("train") if t.id == task_id)


def on_loop(coro: Coroutine[Any, Any, Any]) -> Any:
    """Wait for a coroutine on the loop that AppWorld's servers live on."""
    return BackgroundLoop.shared().submit(coro).result()


async def play(episode: AppWorldEpisode, codes: list[str]) -> tuple[list[str], str]:
    """What the blocks printed and the end state."""
    try:
        seen = []
        for code in codes:
            reply = await episode.act([code])
            seen += reply.observations
        return seen, await episode.finish()
    finally:
        await episode.release()


def run(environment: AppWorldEnvironment, task_id: str, *codes: str) -> tuple[list[str], str]:
    """One whole episode."""
    return on_loop(play(environment.open(task_of(environment, task_id), seed=0), list(codes)))
