"""A checkpoint served by vLLM for tau2: started, watched and checked like the servers of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer

from draco.core.errors import ConfigError, EngineError
from draco.core.files import resolve
from draco.rollout.engines.vllm.adapter_check import require_applied
from draco.rollout.engines.vllm.adapters import Adapter, AdapterStore, adapter_rank
from draco.rollout.engines.vllm.launch import BASE, Launch, Launched, ServedModel, interpreter
from draco.rollout.engines.vllm.replicas import Replicas, wait_for
from draco.rollout.engines.vllm.sync import push

__all__ = ["Served", "served"]

_LOAD_S = 900.0  #: within which a served model must answer
_REQUEST_S = 300.0  #: of one request of the adapter check
_KEY = "VLLM_API_KEY"  #: environment variable of the server's key
_PROMPT = "Send 31 to ana, then say what you did. 0 1 2"


@dataclass(frozen=True, slots=True)
class Served:
    """Where the model answers."""

    model: str  #: litellm's name, provider first
    api_base: str
    key: str = field(repr=False)


@contextmanager
def served(
    python: str, model: str, adapter: Path | None, *, tool_parser: str, port: int, folder: Path
) -> Iterator[Served]:
    """Serve a checkpoint on the loopback interface, behind a key, while the body runs.

    Args:
        python: interpreter of the environment that has vLLM.
        model: path of the base model, as in `policy.path`.
        adapter: folder of the LoRA adapter in PEFT format; None serves the base model.
        tool_parser: vLLM's name of the model family's tool-call parser, such as hermes.
        port: to listen on.
        folder: of the server's output and of the adapter as vLLM loads it.

    Raises:
        ConfigError: the server ended, did not answer in time, or does not apply the adapter.
    """
    # The model's own sampling defaults stay: tau2 sets the temperature alone.
    extra = ("--enable-auto-tool-choice", "--tool-call-parser", tool_parser, "--generation-config", "auto")
    launched = Launched(
        Launch(port=port, extra=extra),
        interpreter(python, "python="),
        ServedModel(model, resolve(model), 1 if adapter is None else adapter_rank(adapter)),
        logs=folder / "servers",
        key_variable=_KEY,
        option="env=tau_banking",
    )
    try:
        replicas = Replicas(launched.urls, key_variable=_KEY, timeout_s=_REQUEST_S, launched=launched)
        try:
            wait_for(replicas.reach(_LOAD_S))
            wait_for(replicas.inspect(0))
            name = BASE if adapter is None else _give(replicas, model, adapter, folder / "adapters")
        except EngineError as error:
            launched.check()  # one that has ended says why
            raise ConfigError(f"the checkpoint cannot be served: {error}") from error
        yield Served(f"hosted_vllm/{name}", f"{launched.urls[0]}/v1", replicas.key)
    finally:
        launched.stop()


def _give(replicas: Replicas, model: str, source: Path, store: Path) -> str:
    """Give the server the adapter under the names that vLLM applies; returns its name there."""
    path = resolve(model)
    adapter = AdapterStore(store.absolute()).publish_folder(source, AutoConfig.from_pretrained(path).model_type)
    prompt = AutoTokenizer.from_pretrained(path)(_PROMPT).input_ids
    wait_for(_check(replicas, adapter, prompt))
    return adapter.name


async def _check(replicas: Replicas, adapter: Adapter, prompt: list[int]) -> None:
    (replica,) = replicas.each
    async with replicas.session() as session:
        server = replicas.server(replica, session)
        answer = await push(replica, server, adapter, adapter.folder, prompt, temperature=1.0)
    assert replica.base_answer is not None
    require_applied(replica.url, adapter, answer, replica.base_answer)
