"""Checkpoints served by vLLM one after another for tau2: started, watched and proven like the servers of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from draco.core.errors import ConfigError, EngineError
from draco.core.files import resolve
from draco.rollout.engines.vllm.adapter_check import require_applied
from draco.rollout.engines.vllm.adapters import Adapter, AdapterStore, adapter_rank
from draco.rollout.engines.vllm.launch import BASE, Launch, Launched, ServedModel, interpreter
from draco.rollout.engines.vllm.replicas import Replicas, wait_for
from draco.rollout.engines.vllm.sync import push

__all__ = ["ServeOptions", "Served", "Serving", "parsers", "serving", "yarn_override"]

_LOAD_S = 1800.0  #: within which a served model must answer
_REQUEST_S = 300.0  #: of one request of the adapter check
_KEY = "VLLM_API_KEY"  #: environment variable of the server's key
_PROMPT = "Send 31 to ana, then say what you did. 0 1 2"


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How a model is served."""

    python: str = ".venv-vllm/bin/python"  #: interpreter of the environment that has vLLM
    port: int = 8010  #: on the loopback interface
    tensor_parallel: int = 1  #: GPUs
    max_len: int | None = None  #: tokens of a conversation; None: `yarn`, or what the model can
    yarn: int | None = None  #: tokens that YaRN stretches the context to; None: the model's own
    tool_parser: str | None = None  #: vLLM's parser of tool calls; None: no tool calls are parsed
    reasoning_parser: str | None = None  #: vLLM's parser of reasoning; None: reasoning is text like any other

    def launch(self, config: Any) -> Launch:
        """The server to start, for a model of this configuration.

        Raises:
            ConfigError: no YaRN can stretch it to `yarn`, or `max_len` goes beyond `yarn`.
        """
        # The model's own sampling defaults stay: who asks sets the temperature alone.
        extra = ["--generation-config", "auto"]
        if self.tool_parser:
            extra = ["--enable-auto-tool-choice", "--tool-call-parser", self.tool_parser, *extra]
        if self.reasoning_parser:
            extra = ["--reasoning-parser", self.reasoning_parser, *extra]
        if self.yarn:
            if self.max_len and self.max_len > self.yarn:
                raise ConfigError(f"max_len={self.max_len} is more than yarn={self.yarn} stretches the context to")
            extra = ["--hf-overrides", json.dumps(yarn_override(config, self.yarn)), *extra]
        return Launch(
            port=self.port, tensor_parallel=self.tensor_parallel, max_len=self.max_len or self.yarn, extra=extra
        )


def parsers(model_type: str) -> tuple[str, str | None]:
    """vLLM's parsers of tool calls and of reasoning for a model type, as its makers name them.

    Qwen 3.5 and 3.6 call tools in XML and think; Qwen 2.5 writes JSON between tags, as Hermes does, and does not think.
    """
    return ("qwen3_coder", "qwen3") if model_type.startswith("qwen3_5") else ("hermes", None)


def yarn_override(config: Any, tokens: int) -> dict[str, Any]:
    """What vLLM is to change in a model's configuration so that YaRN stretches its context to `tokens` (Appendix D).

    Raises:
        ConfigError: the model does as much by itself.
    """
    text = config.get_text_config()
    native = int(text.max_position_embeddings)
    if tokens <= native:
        raise ConfigError(f"yarn={tokens}: the model handles {native} tokens by itself; leave yarn= out")
    kept = dict(getattr(text, "rope_parameters", None) or {})
    changed = {**kept, "rope_type": "yarn", "factor": tokens / native, "original_max_position_embeddings": native}
    override: dict[str, Any] = {"rope_parameters": changed}
    return override if text is config else {"text_config": override}


@dataclass(frozen=True, slots=True)
class Served:
    """Where a checkpoint answers."""

    model: str  #: litellm's name, provider first
    api_base: str
    key: str = field(repr=False)


class Serving:
    """One server with one base model; `give` chooses the checkpoint that answers."""

    def __init__(self, replicas: Replicas, launched: Launched, model: str, folder: Path) -> None:
        self._replicas, self._launched, self._store = replicas, launched, AdapterStore((folder / "adapters").absolute())
        path = resolve(model)
        self._type = str(AutoConfig.from_pretrained(path).model_type)
        self._prompt: list[int] = AutoTokenizer.from_pretrained(path)(_PROMPT).input_ids

    def give(self, adapter: Path | None) -> Served:
        """Load an adapter (PEFT's format) under the names that vLLM applies, and have the server prove it.

        Args:
            adapter: its folder; None: the base model answers.

        Raises:
            ConfigError: the server has ended, or does not apply the adapter.
        """
        name = BASE
        if adapter is not None:
            published = self._store.publish_folder(adapter, self._type)
            try:
                wait_for(self._check(published))
            except EngineError as error:
                self._launched.check()  # one that has ended says why
                raise ConfigError(f"the checkpoint cannot be served: {error}") from error
            name = published.name
        return Served(f"hosted_vllm/{name}", f"{self._launched.urls[0]}/v1", self._replicas.key)

    async def _check(self, adapter: Adapter) -> None:
        (replica,) = self._replicas.each
        async with self._replicas.session() as session:
            server = self._replicas.server(replica, session)
            answer = await push(replica, server, adapter, adapter.folder, self._prompt, temperature=1.0)
        assert replica.base_answer is not None
        require_applied(replica.url, adapter, answer, replica.base_answer)


@contextmanager
def serving(
    model: str, adapters: Sequence[Path], options: ServeOptions, *, folder: Path, asked_by: str
) -> Iterator[Serving]:
    """A server on the loopback interface, behind a key, while the body runs.

    Args:
        model: path of the base model, as in `policy.path`.
        adapters: folders of all adapters that will be given, for their rank; empty: the base model alone.
        options: how it is served.
        folder: of the server's output and of adapters as vLLM loads them.
        asked_by: the option that wants it, for messages.

    Raises:
        ConfigError: the server ended or did not answer in time, or an option does not fit the model.
    """
    launched = Launched(
        options.launch(AutoConfig.from_pretrained(resolve(model)) if options.yarn else None),
        interpreter(options.python, "python="),
        ServedModel(model, resolve(model), max(map(adapter_rank, adapters), default=1)),
        logs=folder / "servers",
        key_variable=_KEY,
        option=asked_by,
    )
    try:
        replicas = Replicas(launched.urls, key_variable=_KEY, timeout_s=_REQUEST_S, launched=launched)
        try:
            wait_for(replicas.reach(_LOAD_S))
            wait_for(replicas.inspect(0))
        except EngineError as error:
            launched.check()  # one that has ended says why
            raise ConfigError(f"the checkpoint cannot be served: {error}") from error
        yield Serving(replicas, launched, model, folder)
    finally:
        launched.stop()
