"""What the code of an agent cannot do to other episodes, to the trainer, or to find answers: `make test-appworld`."""

# ruff: noqa: E501 - the programs of policies are quoted whole

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support import ROOT
from support.appworld import DATA, PYTHON, TASKS, on_loop, run, task_of
from support.appworld_coder import GOLD, mini
from support.processes import gone

from draco.core.errors import ConfigError
from draco.core.types import Task
from draco.env.appworld import AppWorldEnvironment, AppWorldEvaluator
from draco.env.appworld.faults import WorkerDied

pytestmark = pytest.mark.appworld


HOSTILE = {
    "endless": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "uninterruptible": "sum(range(10**13))",
    "fork_bomb": "import os\nwhile True:\n    os.fork()",
    "threads": "import threading, time\nfor i in range(10**6):\n    threading.Thread(target=time.sleep, args=(9,)).start()",
    "memory": "hog = []\nwhile True: hog.append(bytearray(10**7))",
    "interrupt": "raise KeyboardInterrupt",
    "exit": "raise SystemExit(3)",
    "hard_exit": "import ctypes\nctypes.string_at(0)",
    "patched": "import json\njson.dumps = json.loads = lambda *a, **k: 1 / 0",
    "flood": "while True: print('x' * 1000)",
    "deep": "def f(): f()\nf()",
    "disk": "open('/tmp/draco-hostile', 'w').write('x')",
}


def test_nine_tasks_of_six_with_one_of_each_kind_of_trouble(
    environment: AppWorldEnvironment, evaluator: AppWorldEvaluator
) -> None:
    """54 episodes at a time. In each group one is killed from outside and three misbehave; gold passes all the same."""

    async def member(task: Task, sample: int) -> tuple[str, Any]:
        episode = environment.open(task, seed=sample)
        trouble = {1: "raise KeyboardInterrupt", 2: "import json\njson.dumps = 1", 3: "def f(): f()\nf()"}.get(sample)
        try:
            await episode.act([trouble or "x = 1"])
            if sample == 4:
                slot = episode._slot
                assert slot is not None
                pids = (await slot.server.request("ping"))["pids"]
                os.kill(pids[slot.experiment], signal.SIGKILL)
            await episode.act([GOLD[task.id]])
            return "played", await episode.finish()
        except WorkerDied as fault:
            return "died", fault
        finally:
            await episode.release()

    async def everything() -> list[tuple[Task, int, tuple[str, Any]]]:
        jobs = [(t, s) for t in environment.tasks("train") for s in range(6)]
        return [
            (t, s, r) for (t, s), r in zip(jobs, await asyncio.gather(*(member(t, s) for t, s in jobs)), strict=True)
        ]

    for task, sample, (how, what) in on_loop(everything()):
        assert how == ("died" if sample == 4 else "played"), (task.id, sample, what)
        if how == "played":
            assert evaluator.evaluate(task, what).success is True, (task.id, sample)
    assert environment.pools.made is not None
    assert environment.pools.made.live == 0


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_without_the_check_trouble_stays_in_its_episode(
    unchecked: AppWorldEnvironment, evaluator: AppWorldEvaluator, name: str
) -> None:
    """Beside each hostile episode another one works on, before and after."""

    async def both() -> tuple[Any, tuple[list[str], str]]:
        good = unchecked.open(task_of(unchecked, TASKS[0]), seed=0)
        bad = unchecked.open(task_of(unchecked, TASKS[0]), seed=1)
        try:
            await good.act(["x = 1"])
            hostile = asyncio.create_task(bad.act([HOSTILE[name]]))
            await good.act(["print(x)"])
            reply = await hostile
            slot = bad._slot
            assert slot is not None
            pid = (await slot.server.request("ping"))["pids"][slot.experiment]
            assert Path(f"/proc/{pid}").exists() is not reply.done  # what passed its deadline runs no more
            state = await bad.finish()
            seen = (await good.act([GOLD[TASKS[0]]])).observations
            return (reply, state), (list(seen), await good.finish())
        finally:
            await good.release()
            await bad.release()

    (reply, state), (seen, good_state) = on_loop(both())
    assert seen == ["all done"]
    task = task_of(unchecked, TASKS[0])
    assert evaluator.evaluate(task, good_state).success is True
    assert evaluator.evaluate(task, state).success is False  # and what the hostile one left can be scored
    (shown,) = reply.observations
    if name != "endless":  # AppWorld's own alarm may or may not get through its handler; the deadline does
        assert reply.done is (name in {"uninterruptible", "hard_exit"}), shown
    if name in {"fork_bomb", "disk"}:
        assert "Permission" in shown or "not permitted" in shown
    assert not Path("/tmp/draco-hostile").exists()


def routes(full: str) -> dict[str, str]:
    """Ways to the answers that a reading of the engine suggests; where they lie (`full`) is even given away."""
    truth = f"{full}/tasks/mini1aa_1/ground_truth"
    return {
        "open": f"print(open('{truth}/answer.json').read())",
        "pathlib": f"import pathlib\nprint(pathlib.Path('{truth}/evaluation.py').read_text())",
        "listdir": f"import os\nprint(os.listdir('{full}/tasks'))",
        "walk": "import os\nprint([f for d, _, fs in os.walk('/') for f in fs if f in ('answer.json', 'test_data.json')][:9])",
        "engine": "import appworld\nfrom appworld.task import Task\nprint(Task.load('mini1aa_1', load_ground_truth=True).ground_truth)",
        "root": f"import appworld\nappworld.update_root('{full}/..')\nfrom appworld.ground_truth import GroundTruth\n"
        "print(GroundTruth.load('mini1aa_1').answer)",
        "evaluate": "import appworld\nprint(appworld.evaluator.evaluate_task('mini1aa_1', 'x'))",
        "subprocess": f"import subprocess\nprint(subprocess.run(['cat', '{truth}/answer.json'], capture_output=True))",
        "system": f"get_ipython().system('cat {truth}/answer.json')",
        "magic": f"print(get_ipython().run_line_magic('sx', 'cat {truth}/answer.json'))",
        "exec": f"import os\nos.execv('/bin/cat', ['cat', '{truth}/answer.json'])",
        "socket": "import socket\ns = socket.create_connection(('127.0.0.1', 80), 2)\nprint('connected')",
        "unix_socket": "import socket\nprint('connected', socket.socket(socket.AF_UNIX))",
        "sqlite": f"import sqlite3\nc = sqlite3.connect('{full}/base_dbs/admin.db')\nprint(c.execute('select * from main_users').fetchall())",
        "sqlite_attach": "import sqlite3\nc = sqlite3.connect(':memory:')\n"
        f"c.execute(\"attach '{full}/base_dbs/admin.db' as x\")\nprint(c.execute('select * from x.main_users').fetchall())",
        "libc": f"import ctypes\nl = ctypes.CDLL(None)\nprint('descriptor', l.open(b'{truth}/answer.json', 0))",
        "symlink": f"import os\nos.symlink('{truth}', 'link')\nprint(open('link/answer.json').read())",
        "parent": "import os\nprint(open(f'/proc/{os.getppid()}/environ').read())",
        "cmdline": "import os\nprint(open(f'/proc/{os.getppid()}/cmdline').read())",
        "ptrace": "import ctypes, os\nprint('ptrace', ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0))",
        "kill": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nprint('killed')",
        "dunder": f"print([c for c in ().__class__.__base__.__subclasses__() if c.__name__ == 'FileLoader'][0]('x', '{truth}/evaluation.py').get_data('{truth}/evaluation.py'))",
        "import": f"print(__import__('pathlib').Path('{truth}/answer.json').read_text())",
        "builtins": f"import builtins\nprint(builtins.open('{truth}/answer.json').read())",
        "module": f"import uuid\nprint(uuid.os.listdir('{truth}'))",
        "own_root": "print(open('data/tasks/mini1aa_1/ground_truth/answer.json').read())",
        "proc_root": f"print(open('/proc/self/root{truth}/answer.json').read())",
        "solutions": f"print(open('{mini.__file__}').read())",
        "search": "import gc\nprint([o for o in gc.get_objects() if type(o).__name__ == 'GroundTruth'])",
        "frames": "import sys\nf = sys._getframe()\nwhile f:\n    if 'world' in f.f_locals: print(f.f_locals['world'].task.ground_truth)\n    f = f.f_back",
        "api_admin": "print(apis.admin.show_main_users())",
        "admin": "print(requester.request('admin', 'show_main_users'))",
        "neighbour": "import os\nprint('neighbours', os.listdir('..') and [open(p).read() for p in os.listdir('.')])",
    }


FULL = str(Path(DATA).absolute() / "full" / "data")


@pytest.mark.parametrize("name", sorted(routes("")))
def test_no_route_leads_to_an_answer(environment: AppWorldEnvironment, name: str) -> None:
    """With the check of code: refused in words, or an error."""
    seen, _ = run(environment, TASKS[0], routes(FULL)[name], "print('still here')")
    assert seen[0].startswith(("Execution refused", "Execution failed", "Syntax")), seen[0]
    assert seen[1] == "still here"


def test_no_line_is_a_magic(environment: AppWorldEnvironment) -> None:
    """Neither what reads as Python and would be one by IPython's automagic, nor what is marked as one."""
    lines = ["ls -l", "alias", "sx", "reset -f", "pwd", "%ls", "%sx ls", "!ls", "%%bash\nls", "ls?"]
    seen, _ = run(environment, TASKS[0], "x = 5", *lines, "print(x)")
    assert seen[-1] == "5"
    for line, shown in zip(lines, seen[1:-1], strict=True):
        assert "NameError" in shown or "Syntax" in shown, (line, shown)


@pytest.mark.parametrize("name", sorted(routes("")))
def test_no_route_leads_to_an_answer_even_without_the_check(unchecked: AppWorldEnvironment, name: str) -> None:
    """Without it the kernel says no: whatever an agent finds in Python, the files are not there for it."""
    seen, _ = run(unchecked, TASKS[0], routes(FULL)[name])
    shown = seen[0]
    for canary in ("no_op_fail", "def evaluate", "answer.json'", "test_data.json", "connected", "killed", "nora.quill"):
        assert canary not in shown.split("Traceback")[0], shown
    if not shown.startswith("Execution failed"):
        assert any(word in shown for word in ("descriptor -1", "ptrace -1", "Execution successful", "[]")) or (
            "not permitted" in shown or "denied" in shown
        ), shown


def test_what_a_format_string_reaches_is_no_answer(environment: AppWorldEnvironment) -> None:
    """It passes the check, which reads code and no strings; what it can show is the process, which holds no answers."""
    program = "print('{0.__class__.__init__.__globals__}'.format(apis))\nprint('{0.__class__.__dict__}'.format(print))"
    seen, _ = run(environment, TASKS[0], program)
    for canary in ("no_op_fail", "def evaluate", "test_data", "ground_truth_answer", FULL):
        assert canary not in seen[0]


def test_the_root_of_the_rollouts_holds_no_ground_truth() -> None:
    """By name, by content, and by inode: the roots share files as hard links."""
    hidden = [p for p in Path(FULL).rglob("ground_truth/*") if p.is_file()]
    assert len(hidden) == 9 * 9  # nothing to find would prove nothing
    shown = [p for p in (Path(DATA) / "rollout").rglob("*") if p.is_file()]
    assert not {p.name for p in shown} & ({p.name for p in hidden} | {"ground_truth"})
    assert not {p.stat().st_ino for p in shown} & {p.stat().st_ino for p in hidden}
    digests = {hashlib.sha256(p.read_bytes()).digest() for p in hidden if len(p.read_bytes()) > 8}
    assert not digests & {hashlib.sha256(p.read_bytes()).digest() for p in shown}
    index = json.loads((Path(DATA) / "rollout" / "data" / "draco_tasks.json").read_text())
    assert {frozenset(entry) for entry in index.values()} == {frozenset({"difficulty"})}


def test_data_that_episodes_could_read_around_is_refused(tmp_path: Path) -> None:
    """Both roots inside a folder that Python loads from: the answers would lie open beside the blind root."""
    prefix = Path(PYTHON).absolute().parents[1]
    inner = prefix / f"draco-test-{os.getpid()}"
    inner.symlink_to(tmp_path)
    shutil.copytree(DATA, tmp_path / "aw", copy_function=os.link)
    environment = AppWorldEnvironment(PYTHON, str(tmp_path / "aw"))
    environment.check()  # a link from there to elsewhere opens nothing
    environment.close()
    inner.unlink()
    try:
        shutil.copytree(DATA, inner / "aw")
        environment = AppWorldEnvironment(PYTHON, str(inner / "aw"))
        with pytest.raises(ConfigError, match=r"lies in .*, which episodes read; move the data"):
            environment.check()
    finally:
        shutil.rmtree(inner, ignore_errors=True)


def test_the_evaluator_is_another_process_that_the_rollouts_cannot_see(
    environment: AppWorldEnvironment, evaluator: AppWorldEvaluator
) -> None:
    run(environment, TASKS[0], "print(1)")
    rollouts = environment.pools.made.servers[0].server  # type: ignore[union-attr]
    assert rollouts is not None
    assert "full" not in Path(f"/proc/{rollouts.pid}/cmdline").read_text()
    assert not hasattr(environment, "evaluate")
    assert not list((Path(DATA) / "rollout").rglob("ground_truth"))


def test_a_killed_server_takes_its_children_with_it() -> None:
    environment = AppWorldEnvironment(PYTHON, DATA)
    episode = environment.open(task_of(environment, TASKS[0]), seed=0)
    episode.step(["x = 1"])
    slot = episode._slot
    assert slot is not None
    pid = on_loop(slot.server.request("ping"))["pids"][slot.experiment]
    os.kill(slot.server.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied):
        episode.step(["x = 2"])
    episode.close()
    assert gone([pid])
    environment.close()


def test_a_killed_trainer_leaves_no_folder() -> None:
    program = (
        "import sys, time\nfrom draco.env.appworld import AppWorldEnvironment\n"
        "e = AppWorldEnvironment(*sys.argv[1:])\np = e.open(e.tasks('train')[0], seed=0)\np.step(['x = 1'])\n"
        "print(p._slot.server.pid, flush=True)\ntime.sleep(600)"
    )
    client = subprocess.Popen(
        [sys.executable, "-c", program, PYTHON, DATA], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert client.stdout is not None
    pid = int(client.stdout.readline())
    stage = Path(json.loads(Path(f"/proc/{pid}/cmdline").read_text().split("\0")[-2])["root"])
    assert stage.is_dir()
    client.kill()
    client.communicate()
    until = time.monotonic() + 120
    while stage.exists():
        assert time.monotonic() < until, f"{stage} is left"
        time.sleep(0.05)
