"""AppWorld without AppWorld: faults of the protocol against a pretending server, the environment, data roots."""

from __future__ import annotations

import asyncio
import os
import selectors
import shutil
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import fake_appworld

from draco.core.errors import ConfigError, EnvironmentFault
from draco.core.types import Task, Termination
from draco.env.appworld import AppWorldEnvironment, AppWorldEvaluator
from draco.env.appworld.client import ForkServer, ServerOptions
from draco.env.appworld.environment import pack_state, unpack_state
from draco.env.appworld.faults import (
    AppWorldFault,
    EngineFailed,
    PoolBusy,
    ProtocolBroken,
    StartFailed,
    TooSlow,
    UnknownEpisode,
    UnknownTask,
    WorkerDied,
)  # fmt: skip
from draco.env.appworld.inside import data_roots
from draco.env.appworld.inside import server as inside
from draco.env.appworld.pool import Pool
from draco.policy.chat import ChatFormat
from draco.policy.policy import Policy
from draco.rollout.engines.base import at_a_time
from draco.rollout.engines.transformers import TransformersEngine
from draco.rollout.loop import Limits
from draco.rollout.rollout import Rollout

FAKE = fake_appworld.__file__
INSIDE = Path(data_roots.__file__).parent


def options(**more: Any) -> ServerOptions:
    return replace(ServerOptions(sys.executable, "/tmp", "rollout", server=FAKE), **more)


def with_pool(body: Callable[[Pool], Awaitable[Any]], **more: Any) -> Any:
    async def run() -> Any:
        pool = Pool(options(), **more)
        try:
            return await body(pool)
        finally:
            await pool.stop()

    return asyncio.run(run())


# --- faults: the agent's become observations, the others are typed ---


@pytest.mark.parametrize(
    ("code", "mistake", "words"),
    [
        ("slow", "deadline", "ran longer than 90 s and was stopped for good"),
        ("die SIGSEGV", "crashed", "ended its own process (SIGSEGV)"),
        ("die SIGXCPU", "crashed", "SIGXCPU"),
    ],
)
def test_what_the_agent_does_to_its_process_is_an_observation(code: str, mistake: str, words: str) -> None:
    async def body(pool: Pool) -> None:
        slot = await pool.open("s1_1")
        await pool.execute(slot, "complete")
        done = await pool.execute(slot, code)
        assert (done.mistake, slot.over, slot.completed) == (mistake, True, True)
        assert words in done.output
        await pool.close(slot)

    with_pool(body)


@pytest.mark.parametrize(
    ("code", "error"),
    [("die SIGKILL", WorkerDied), ("engine", EngineFailed), ("garbage", ProtocolBroken), ("hangup", WorkerDied)],
)
def test_what_it_does_not_do_is_a_typed_fault(code: str, error: type[AppWorldFault]) -> None:
    async def body(pool: Pool) -> None:
        slot = await pool.open("s1_1")
        with pytest.raises(error):
            await pool.execute(slot, code)
        await pool.close(slot)
        assert pool.live == 0
        first, slot = slot, await pool.open("s1_1")  # the pool goes on, with a new server where the old one hung up
        assert (await pool.execute(slot, "ok 1")).output == "ran 1"
        assert (slot.server is not first.server) == (code == "hangup")

    with_pool(body)
    assert issubclass(error, EnvironmentFault)


@pytest.mark.parametrize(("task", "error"), [("nothere_1", UnknownTask), ("slow_1", TooSlow)])
def test_a_task_that_cannot_be_opened_gives_its_place_back(task: str, error: type[AppWorldFault]) -> None:
    async def body(pool: Pool) -> None:
        for _ in range(3):
            with pytest.raises(error):
                await pool.open(task)
        await pool.open("s1_1")
        assert pool.live == 1

    with_pool(body, places=1)


def skipping(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Awaitable[None]]:
    """Lets seconds pass on the running loop's clock at once; what is due by then has been done when it returns."""
    loop, skipped = asyncio.get_running_loop(), 0.0
    real = loop.time
    monkeypatch.setattr(loop, "time", lambda: real() + skipped)

    async def skip(seconds: float) -> None:
        nonlocal skipped
        skipped += seconds
        for _ in range(10):
            await asyncio.sleep(0)

    return skip


def test_back_pressure_waits_in_order_and_gives_up_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(pool: Pool) -> None:
        skip = skipping(monkeypatch)
        first = await pool.open("s1_1")
        waiting = [asyncio.create_task(pool.open("s1_1")) for _ in range(2)]
        await skip(0)
        await skip(900)
        assert not any(w.done() for w in waiting)
        await pool.close(first)
        await pool.close(first)  # twice is once
        second = await waiting[0]
        await skip(900)  # that end started the clock anew
        assert not waiting[1].done()
        await skip(101)
        with pytest.raises(PoolBusy, match=r"1 episodes are open; raise env\.environment\.places"):
            await waiting[1]
        with pytest.raises(UnknownEpisode):
            await pool.execute(first, "ok")
        await pool.close(second)
        assert pool.live == 0

    with_pool(body, places=1, queue_s=1000)


def test_a_queue_that_moves_is_waited_for_however_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(pool: Pool) -> None:
        skip = skipping(monkeypatch)

        async def one() -> None:
            slot = await pool.open("s1_1")
            await skip(400)
            await pool.close(slot)

        await asyncio.gather(*(one() for _ in range(20)))  # the last waits for more than 7000 s

    with_pool(body, places=2, queue_s=1000)


def test_the_engine_has_no_more_episodes_on_their_way_than_places(
    environment: AppWorldEnvironment, policy: Policy
) -> None:
    (task,) = environment.tasks("train")
    limits = Limits(max_turns=1, max_response_tokens=4)
    rows = [
        Rollout(environment.open(task, seed=i), policy.chat, limits, task=task, sample=i, seed=i, policy_version=0)
        for i in range(7)
    ]
    assert at_a_time(rows, 5) == 2
    assert at_a_time(rows, 1) == 1
    stream = TransformersEngine().run(policy, rows, temperature=1.0)
    next(stream)
    assert sum(r._started is not None for r in rows) == 2
    assert len(list(stream)) == 6


def test_one_dead_server_takes_no_other_with_it() -> None:
    async def body(pool: Pool) -> None:
        a, b = await pool.open("s1_1"), await pool.open("s1_1")
        assert a.server is not b.server
        with pytest.raises(WorkerDied):
            await pool.execute(a, "hangup")
        assert (await pool.execute(b, "ok b")).output == "ran b"

    with_pool(body, servers=2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"python": "/no/such/python"}, "could not be started"),
        ({"max_output": 1}, "no appworld here"),
        ({"server": str(Path(FAKE).parent / "none.py")}, "did not start"),
    ],
)
def test_a_server_that_does_not_come_up_says_why(change: dict[str, Any], words: str) -> None:
    async def run() -> None:
        server = ForkServer(options(**change))
        with pytest.raises(StartFailed, match=words):
            await server.start()
        await server.stop()

    asyncio.run(run())


def test_a_worker_inherits_no_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-canary")
    spy = tmp_path / "spy.py"
    spy.write_text("import os, sys\nsys.exit('ENV ' + ' '.join(sorted(os.environ)))")

    async def run() -> None:
        with pytest.raises(StartFailed) as caught:
            await ForkServer(options(server=str(spy))).start()
        assert "APPWORLD_ROOT" in str(caught.value)
        assert "OPENAI_API_KEY" not in str(caught.value)

    asyncio.run(run())


# --- as an environment ---


def played(environment: AppWorldEnvironment, chat: ChatFormat, turns: list[str], **limits: Any) -> Rollout:
    from support.factory import rollout_of

    (task,) = environment.tasks("train")
    return rollout_of(chat, turns, limits=Limits(**limits), episode=environment.open(task, seed=0))


@pytest.mark.parametrize(
    ("turns", "termination"),
    [
        (["<code>ok 1</code>", "<code>complete</code>", "Done."], Termination.SUBMITTED),
        (["<code>fail</code>", "It cannot be done."], Termination.GAVE_UP),
        (["I would rather not.", "No."], Termination.GAVE_UP),
        (["<code>slow</code>"], Termination.GAVE_UP),
        (["<code>die SIGKILL</code>"], Termination.ENVIRONMENT_ERROR),
        (["<code>engine</code>"], Termination.ENVIRONMENT_ERROR),
        (["<code>complete</code>", "<code>ok 2</code>"], Termination.TURN_LIMIT),
    ],
)
def test_terminations(
    environment: AppWorldEnvironment, chat: ChatFormat, turns: list[str], termination: Termination
) -> None:
    rollout = played(environment, chat, turns, max_turns=max(len(turns), 2))
    assert rollout.termination == termination
    assert environment.pools.made is None or environment.pools.made.live == 0
    trajectory = rollout.trajectory()
    if not termination.quarantined:
        assert unpack_state(trajectory.end_state)["task"] == "s1_1"


def test_an_episode_without_actions_needs_no_process(environment: AppWorldEnvironment) -> None:
    (task,) = environment.tasks("train")
    episodes = [environment.open(task, seed=i) for i in range(50)]  # more than places
    states = [unpack_state(e.end_state()) for e in episodes]
    for episode in episodes:
        episode.close()
    assert states[0] == {"task": "s1_1", "dbs": {"changes": {}, "hashes": None}}
    assert environment.pools.made is None


def test_tasks_say_what_is_asked_and_no_answer(environment: AppWorldEnvironment, data: Path) -> None:
    (task,) = environment.tasks("train")
    assert (task.scenario_id, task.difficulty, task.instruction) == ("s1", 3, "Count my notes.")
    assert not list((data / "rollout").rglob("ground_truth"))
    assert "canary-answer" not in repr(task)
    assert (data / "full").stat().st_mode & 0o077 == 0
    with pytest.raises(ConfigError, match="no split 'dev'; expected one of train"):
        environment.tasks("dev")
    index = data / "rollout" / "data" / "draco_tasks.json"
    known = index.read_text()
    index.write_text("{}")
    try:
        assert [t.difficulty for t in environment.tasks("train")] == [0]  # unknown, which is not level 1
    finally:
        index.write_text(known)


def test_evaluating_checks_whose_end_state_it_is(data: Path) -> None:
    evaluator = AppWorldEvaluator(sys.executable, str(data), server=FAKE)
    task = Task("s1_1", "", "train", "s1")
    assert evaluator.evaluate(task, pack_state({"task": "s1_1", "dbs": {}})).success is True
    with pytest.raises(ValueError, match="of task 's2_1', not of 's1_1'"):
        evaluator.evaluate(task, pack_state({"task": "s2_1", "dbs": {}}))
    with pytest.raises(ValueError, match="no end state of AppWorld"):
        evaluator.evaluate(task, "nonsense")
    evaluator.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": "/nowhere"}, "no AppWorld data there; run scripts/setup_appworld.sh"),
        ({"isolation": "none"}, r"env\.isolation is 'none'; expected strict or auto"),
        ({"soft_s": 100}, r"execute_s is 90\.0; expected more than env\.environment\.soft_s=100"),
        ({"places": 0}, r"env\.environment\.places is 0; expected an integer ≥ 1"),
        ({"python": "/no/such/python"}, "no interpreter there; run scripts/setup_appworld.sh"),
    ],
)
def test_bad_options_are_named_at_once(data: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        AppWorldEnvironment(**{"python": sys.executable, "data": str(data), **change})


def test_a_server_that_does_not_start_is_refused_before_the_run(data: Path) -> None:
    broken = AppWorldEnvironment(sys.executable, str(data), server=str(Path(FAKE).parent / "none.py"))
    with pytest.raises(ConfigError, match=r"cannot open task s1_1 with env\.python=.*did not start") as caught:
        broken.check()
    assert "\n" not in str(caught.value)
    works = AppWorldEnvironment(sys.executable, str(data), server=FAKE)
    works.check()
    assert works.pools.made is not None
    assert works.pools.made.live == 0
    works.close()


def test_a_root_without_answers_is_refused_by_the_evaluator(data: Path) -> None:
    shutil.rmtree(data / "full")
    AppWorldEnvironment(sys.executable, str(data))
    with pytest.raises(ConfigError, match="holds no tasks/, which the evaluator needs"):
        AppWorldEvaluator(sys.executable, str(data))


def test_a_machine_without_a_sandbox_is_refused_at_once(
    data: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("draco.env.appworld.inside.sandbox.available", lambda: ["limits", "seccomp"])
    with pytest.raises(ConfigError, match=r"has no landlock, .* env\.isolation=auto"):
        AppWorldEnvironment(sys.executable, str(data))
    AppWorldEnvironment(sys.executable, str(data), isolation="auto")
    assert "without landlock" in caplog.text


def test_an_opening_that_is_cancelled_leaves_no_episode_behind() -> None:
    async def body(pool: Pool) -> None:
        first = await pool.open("s1_1")
        opening = asyncio.create_task(pool.open("silent_1"))
        await asyncio.sleep(0.05)
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        await asyncio.gather(*pool._tidying)
        assert (await first.server.request("ping"))["children"] == 1
        assert pool.live == 1

    with_pool(body)


def test_a_process_that_is_closed_in_the_round_in_which_it_speaks_is_not_heard(tmp_path: Path) -> None:
    """Both messages lie there before the server looks: the first ends the process that sent the second."""
    (ours, theirs), (process, its) = socket.socketpair(), socket.socketpair()
    with ours, its:
        ours.sendall(b'{"id": 1, "op": "close", "experiment": "e1"}\n')
        its.sendall(b'{"ok": {}}\n')
        server = inside.Server(theirs, {"role": "rollout", "root": str(tmp_path / "root"), "outputs": str(tmp_path)})
        pid = os.posix_spawn("/bin/sleep", ["sleep", "600"], {})
        server.children["e1"] = child = inside.Child(pid, process, "e1", "s1_1")
        server.selector.register(process, selectors.EVENT_READ, child)
        ours.shutdown(socket.SHUT_WR)
        server.run()
        server.selector.close()
        theirs.close()
        assert ours.recv(1000) == b'{"id": 1, "ok": {"closed": "e1"}}\n'
    with pytest.raises(ChildProcessError):  # it has ended and was waited for
        os.waitpid(pid, 0)


def test_roots_refuse_what_appworld_cannot_use(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="memory"):
        data_roots.build(tmp_path, tmp_path / "memory" / "x")
    with pytest.raises(FileNotFoundError, match="holds no tasks/"):
        data_roots.build(tmp_path, tmp_path / "x")
