"""AppWorld as an environment of draco: episodes in processes of their own, and an evaluator in another process.

A rollout reaches only the fork server over the data root *without* ground truth. It leaves an end state: a text of what
the episode changed. So nothing on disk has to outlive the episode, and `AppWorldEvaluator`, whose server alone sees the
full root, can score it at any time.
"""

from __future__ import annotations

import base64
import json
import logging
import shutil
import zlib
from collections.abc import Coroutine, Sequence
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge

from draco.config.options import Count, Positive, checked
from draco.core.background import BackgroundLoop
from draco.core.errors import ConfigError
from draco.core.types import Message, Task
from draco.env.appworld.client import SERVER, Limits, ServerOptions
from draco.env.appworld.data import SETUP, Roots
from draco.env.appworld.faults import AppWorldFault
from draco.env.appworld.inside import sandbox
from draco.env.appworld.pool import KeptServer, PerLoop, Pool, Slot
from draco.env.appworld.prompt import CAVEATS, TokenCounter, cut, opening
from draco.env.base import CODE, Environment, Episode, Evaluator, Outcome, Reply

__all__ = ["AppWorldEnvironment", "AppWorldEpisode", "AppWorldEvaluator", "pack_state", "unpack_state"]

log = logging.getLogger("draco")
T = TypeVar("T")
_REQUIRED = ("limits", "landlock", "seccomp")


def _required_layers(python: str, isolation: str) -> tuple[str, ...]:
    """The layers of isolation without which nothing runs.

    Raises:
        ConfigError: this machine lacks one, or the interpreter is not there.
    """
    if shutil.which(python) is None:
        raise ConfigError(f"env.python={python}: no interpreter there; run scripts/setup_appworld.sh of the repository")
    found = sandbox.available()
    missing = ", ".join(layer for layer in _REQUIRED if layer not in found)
    if missing and isolation == "strict":
        raise ConfigError(
            f"this machine's kernel has no {missing}, which keeps an agent's code away from answers, other processes "
            "and the network; use another machine, or env.isolation=auto to go on with a syntax check and "
            f"{', '.join(found)} alone"
        )
    if missing:
        log.warning("env.isolation=auto: episodes run without %s", missing)
    return _REQUIRED if isolation == "strict" else ()


def pack_state(state: dict[str, Any]) -> str:
    """An end state as one line of text."""
    return base64.b85encode(zlib.compress(json.dumps(state, separators=(",", ":")).encode(), 9)).decode()


def unpack_state(text: str) -> dict[str, Any]:
    """The inverse of `pack_state`.

    Raises:
        ValueError: the text is none.
    """
    try:
        state: dict[str, Any] = json.loads(zlib.decompress(base64.b85decode(text)))
    except (ValueError, zlib.error) as error:
        raise ValueError(f"no end state of AppWorld: {error}") from error
    return state


class AppWorldEpisode(Episode):
    """One task in a process of its own. The process starts with the first action, so that opening many costs nothing.

    `step`, `end_state` and `close` block; `act`, `finish` and `release` are the same as coroutines on the pool's loop.
    """

    def __init__(self, environment: AppWorldEnvironment, task: Task) -> None:
        self.format = CODE
        self.opening = opening(task, thinking=environment.thinking)
        self.places = environment.places
        self._environment, self._task = environment, task
        self._slot: Slot | None = None

    async def act(self, actions: Sequence[str]) -> Reply:
        """Run the code blocks of one turn, in order.

        Raises:
            AppWorldFault: a fault that is not the agent's.
        """
        environment, observations = self._environment, []
        if self._slot is None:
            self._slot = await environment.pools.get().open(self._task.id)
        slot = self._slot
        for code in actions:
            if slot.over:
                break
            done = await environment.pools.get().execute(slot, code)
            if done.mistake == "deadline":
                log.warning(
                    "%s: a code block ran too long and was killed; if many are, env.environment.places is too much for "
                    "this machine's cores",
                    self._task.id,
                )
            observations.append(cut(done.output.rstrip(), environment.observation_tokens, environment.count_tokens))
        return Reply(tuple(observations), done=slot.over, completed=slot.completed, failed=slot.failed)

    async def finish(self) -> str:
        """What the episode changed, for `AppWorldEvaluator`."""
        if self._slot is None:
            return pack_state({"task": self._task.id, "dbs": {"changes": {}, "hashes": None}})
        return pack_state(await self._environment.pools.get().state(self._slot))

    async def release(self) -> None:
        """End the process and remove its files."""
        if self._slot is not None:
            await self._environment.pools.get().close(self._slot)

    def step(self, actions: Sequence[str]) -> Reply:
        return _wait(self.act(actions))

    def end_state(self) -> str:
        return _wait(self.finish())

    def close(self) -> None:
        _wait(self.release())


def _wait(coro: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the process's background loop, to its end. Not to be called on that loop."""
    return BackgroundLoop.shared().submit(coro).result()


@checked("env.environment", python="env.python", data="env.data", thinking="env.thinking", isolation="env.isolation")
class AppWorldEnvironment(Environment):
    """The real engine in its own Python environment (scripts/setup_appworld.sh).

    Args:
        python: interpreter of that environment.
        data: folder of the two data roots; only `rollout`, the one without ground truth, is used here.
        thinking: the prompt for a model that thinks before it acts.
        observation_tokens: longer outputs are cut at a line end.
        tokenizer, tokenizer_gguf: whose tokens those are (`policy.path`, `policy.gguf_file`); None estimates.
        places: live episodes at most, about 60 MB each; engines hold further rollouts back.
        servers: fork servers.
        soft_s: AppWorld's own timeout of a code block, which the agent reads of and survives.
        execute_s: deadline of a code block: its process is killed and the episode is over.
        open_s: deadline of opening an episode.
        queue_s: an episode that waits for a place gives up when no other has ended for so long.
        start_s: deadline of starting a server.
        memory_mb, cpu_s: of one episode's process.
        isolation: strict refuses a machine without Landlock and seccomp; auto warns and goes on with what it has.
        check_code, server: for tests: without the check of code, or with another program as the server.
    """

    name = "appworld"
    scaffold = "draco's own code agent, not AppWorld's Simplified ReAct Code Agent"
    caveats = CAVEATS

    def __init__(
        self,
        python: str,
        data: str,
        *,
        thinking: bool = False,
        observation_tokens: Annotated[int, Ge(100)] = 3000,
        tokenizer: str | None = None,
        tokenizer_gguf: str | None = None,
        places: Count = 128,
        servers: Count = 1,
        soft_s: Count = 60,
        execute_s: Positive = 90.0,
        open_s: Positive = 60.0,
        queue_s: Positive = 600.0,
        start_s: Positive = 300.0,
        memory_mb: Count = 1024,
        cpu_s: Count = 900,
        isolation: Literal["strict", "auto"] = "strict",
        check_code: bool = True,
        server: str = str(SERVER),
    ) -> None:
        required = _required_layers(python, isolation)
        if execute_s <= soft_s:
            raise ConfigError(
                f"env.environment.execute_s is {execute_s}; expected more than env.environment.soft_s={soft_s}, which "
                "it backs up"
            )
        self.roots = Roots.at(data)
        self.thinking, self.observation_tokens, self.places = thinking, observation_tokens, places
        self.count_tokens = TokenCounter(tokenizer, tokenizer_gguf)
        self._options = options = ServerOptions(
            python=python, data=str(self.roots.rollout), role="rollout", soft_s=soft_s, start_s=start_s,
            limits=Limits(memory_mb=memory_mb, cpu_s=cpu_s), require=required, check_code=check_code, server=server,
        )  # fmt: skip
        self.pools = PerLoop(
            lambda: Pool(options, places=places, servers=servers, open_s=open_s, execute_s=execute_s, queue_s=queue_s)
        )

    @property
    def splits(self) -> tuple[str, ...]:
        return self.roots.splits

    def tasks(self, split: str) -> tuple[Task, ...]:
        return self.roots.tasks(split)

    def open(self, task: Task, *, seed: int) -> AppWorldEpisode:
        """Start an episode. A task fixes its world, so `seed` changes nothing."""
        return AppWorldEpisode(self, task)

    def opening(self, task: Task) -> tuple[Message, ...]:
        return opening(task, thinking=self.thinking)

    def check(self) -> None:
        """Start the servers and run one block.

        Raises:
            ConfigError: it does not work.
        """
        task = next(t for split in self.splits for t in self.tasks(split))
        episode = self.open(task, seed=0)
        try:
            episode.step(["print('ready')"])
        except AppWorldFault as error:
            raise ConfigError(
                f"env=appworld cannot open task {task.id} with env.python={self._options.python} on "
                f"{self.roots.rollout}: {error}; scripts/setup_appworld.sh of the repository makes what "
                "it needs, --help says how"
            ) from error
        finally:
            episode.close()

    def close(self) -> None:
        """End the servers, from outside their loop. Not needed at the end of a process; they end with it."""
        self.pools.close()


@checked("env.evaluator", python="env.python", data="env.data", isolation="env.isolation")
class AppWorldEvaluator(Evaluator):
    """AppWorld's own evaluator, in a process of its own over the full data root.

    Args:
        python, data: as for the environment; `full` is used here.
        deadline_s: of one evaluation.
        start_s: deadline of starting the server.
        isolation: as for the environment.
        server: for tests: another program as the server.
    """

    def __init__(
        self,
        python: str,
        data: str,
        *,
        deadline_s: Positive = 60.0,
        start_s: Positive = 300.0,
        isolation: Literal["strict", "auto"] = "strict",
        server: str = str(SERVER),
    ) -> None:
        roots, self.deadline_s = Roots.at(data), deadline_s
        if not (roots.full / "tasks").is_dir():
            raise ConfigError(f"{roots.full} holds no tasks/, which the evaluator needs; {SETUP}")
        options = ServerOptions(
            python=python, data=str(roots.full), role="evaluate", start_s=start_s,
            require=_required_layers(python, isolation), server=server,
        )  # fmt: skip
        self._servers = PerLoop(lambda: KeptServer(options))
        self._count = 0

    def evaluate(self, task: Task, end_state: str) -> Outcome:
        """AppWorld's own verdict; `detail["failures"]` has the tests that failed.

        Raises:
            ValueError: the end state is none, or of another task.
            AppWorldFault: it could not be scored.
        """
        state = unpack_state(end_state)
        if state.get("task") != task.id:
            raise ValueError(f"the end state is of task {state.get('task')!r}, not of {task.id!r}")
        answer = _wait(self._evaluate(task.id, state["dbs"]))
        return Outcome(bool(answer["success"]), detail={"failures": answer["failures"]})

    async def _evaluate(self, task_id: str, dbs: dict[str, Any]) -> dict[str, Any]:
        server = await self._servers.get().get()
        self._count += 1
        return await server.request(
            "evaluate", task=task_id, experiment=f"v{self._count}", dbs=dbs, deadline_s=self.deadline_s
        )

    def close(self) -> None:
        """End the server, from outside its loop. Not needed at the end of a process; it ends with it."""
        self._servers.close()
