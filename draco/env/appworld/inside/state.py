"""The end state of an episode as a text: what its databases hold beyond those of the task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .protocol import Failed

__all__ = ["difference", "restore"]


def _apps(root: Path) -> list[str]:
    return sorted(p.stem for p in (root / "data" / "base_dbs").glob("*.db"))


def _start(root: Path, task: str, app: str) -> str:
    """The changes with which a task starts."""
    file = root / "data" / "tasks" / task / "dbs" / f"{app}.jsonl"
    return file.read_text() if file.is_file() else ""


def difference(dbs: Path, root: Path, task: str) -> dict[str, Any]:
    """What the files of an episode hold beyond those of the task.

    {"changes": {app: [lines in common, text after them]}, "hashes": text}. The engine appends to a task's own changes,
    so the common part is all of them.
    """
    changes: dict[str, Any] = {}
    for app in _apps(root):
        after, before = (dbs / f"{app}.jsonl").read_text(), _start(root, task, app)
        if after == before:
            continue
        kept, lines, base = 0, after.splitlines(keepends=True), before.splitlines(keepends=True)
        while kept < min(len(lines), len(base)) and lines[kept] == base[kept]:
            kept += 1
        changes[app] = [kept, "".join(lines[kept:])]
    return {"changes": changes, "hashes": (dbs / "model_hashes.json").read_text()}


def restore(state: dict[str, Any], dbs: Path, root: Path, task: str) -> None:
    """The inverse of `difference`: write the files of an episode into the folder `dbs`."""
    apps = _apps(root)
    if unknown := set(state["changes"]) - set(apps):
        raise Failed("bad_request", f"the end state names unknown apps: {sorted(unknown)}")
    for app in apps:
        text = _start(root, task, app)
        if app in state["changes"]:
            kept, added = state["changes"][app]
            text = "".join(text.splitlines(keepends=True)[: int(kept)]) + str(added)
        (dbs / f"{app}.jsonl").write_text(text)
    untouched = root / "data" / "tasks" / task / "dbs" / "model_hashes.json"
    hashes = untouched.read_text() if state["hashes"] is None else str(state["hashes"])
    (dbs / "model_hashes.json").write_text(hashes)
