"""Makes the two data roots that draco uses out of one AppWorld root. Standard library alone.

    python data_roots.py SOURCE TARGET

TARGET/full     everything, readable by this user alone: for the evaluator
TARGET/rollout  the same without any `ground_truth`: all that a rollout can ever reach
Files are hard links where the file system allows it, else copies. `rollout/data/draco_tasks.json` keeps what tables
need to know of a task (its difficulty), which is no answer.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
from pathlib import Path

__all__ = ["HIDDEN", "INDEX", "build"]

HIDDEN = "ground_truth"
INDEX = "draco_tasks.json"


def build(source: Path, target: Path) -> dict[str, int]:
    """Write TARGET anew; how many tasks each split names.

    Raises:
        FileNotFoundError: SOURCE is no AppWorld root.
        ValueError: a path holds the word "memory", which AppWorld takes for a database in memory.
    """
    source, target = source.absolute(), target.absolute()
    if "memory" in str(target):
        raise ValueError(f"{target}: no path may hold the word 'memory' (AppWorld reads it as a database in memory)")
    data = source / "data"
    for needed in ("tasks", "datasets", "base_dbs", "api_docs"):
        if not (data / needed).is_dir():
            raise FileNotFoundError(f"{data} holds no {needed}/: expected the data of AppWorld")
    new = target.with_name(target.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    shutil.copytree(data, new / "full" / "data", copy_function=_link)
    shutil.copytree(
        data, new / "rollout" / "data", copy_function=_link, ignore=lambda _, names: [n for n in names if n == HIDDEN]
    )
    os.chmod(new / "full", stat.S_IRWXU)
    index = {}
    for task in sorted(p.name for p in (data / "tasks").iterdir() if p.is_dir()):
        metadata = data / "tasks" / task / HIDDEN / "metadata.json"
        if metadata.is_file():
            index[task] = {"difficulty": int(json.loads(metadata.read_text(encoding="utf-8"))["difficulty"])}
    (new / "rollout" / "data" / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(target, ignore_errors=True)
    os.rename(new, target)
    left = [str(p) for p in (target / "rollout").rglob(HIDDEN)]
    if left:
        raise ValueError(f"ground truth is left in the rollout root: {left[:3]}")
    return {
        p.stem: sum(1 for line in p.read_text(encoding="utf-8").splitlines() if line.strip())
        for p in sorted((target / "rollout" / "data" / "datasets").glob("*.txt"))
    }


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


if __name__ == "__main__":
    try:
        found = build(Path(sys.argv[1]), Path(sys.argv[2]))
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(", ".join(f"{split}: {count} tasks" for split, count in found.items()))
