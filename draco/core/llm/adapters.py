"""Whether a server that somebody else runs applies the LoRA adapter that it lists."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

__all__ = ["applies_adapter"]

_PROMPT = "Send 31 to ana, then say what you did. 0 1 2"
_SLOW_S = 120.0  #: of one request
#: litellm's names of providers that are OpenAI-compatible servers of one's own
_PROVIDERS = ("hosted_vllm/", "openai/")


def applies_adapter(api_base: str, model: str, key: str = "") -> bool | None:
    """Ask a server the same prompt by an adapter and by its base model, and compare the log-probs of the prompt.

    vLLM loads an adapter whose names fit no module, and answers with the base model (vllm#39369). vLLM lists the base
    model of every adapter as its `parent`; a server that lists none says nothing of adapters.

    Args:
        api_base: address, ending in ``/v1`` as a rule.
        model: the adapter's name there, with or without litellm's provider.
        key: API key; empty if it wants none.

    Returns:
        True: the answers differ. False: they are equal, so the adapter changes nothing. None: the model is listed as no
        adapter, or the server cannot be asked.
    """
    name = model
    for provider in _PROVIDERS:
        name = name.removeprefix(provider)
    base = api_base.rstrip("/")
    try:
        listed = _answer(f"{base}/models", key)["data"]
        parent = next((m.get("parent") for m in listed if m.get("id") == name), None)
        if not parent:
            return None
        answers = [_prompt_logprobs(f"{base}/completions", one, key) for one in (name, parent)]
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, urllib.error.URLError):
        return None
    return None if not answers[0] or not answers[1] else answers[0] != answers[1]


def _prompt_logprobs(url: str, model: str, key: str) -> Any:
    body = {"model": model, "prompt": _PROMPT, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    return _answer(url, key, body)["choices"][0]["prompt_logprobs"]


def _answer(url: str, key: str, body: Any = None) -> Any:
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=_SLOW_S) as reply:
        return json.loads(reply.read())
