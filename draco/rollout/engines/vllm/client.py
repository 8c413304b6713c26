"""One vLLM server over HTTP. Errors say whether the request may succeed elsewhere; none of them holds the API key."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from draco.core.errors import ServerLost, ServerRefused

__all__ = ["Completion", "ModelMissing", "Server", "ServerBusy", "attempts"]

#: the sampling distribution is softmax(logits / temperature) and nothing else, whatever the model's own defaults are
_PLAIN = {
    "top_p": 1.0, "top_k": 0, "min_p": 0.0,
    "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
}  # fmt: skip


class ServerBusy(ServerLost):
    """The server lives and turned the request away (429, 503)."""


class ModelMissing(ServerLost):
    """The server lives and does not know the adapter: it was restarted, or has dropped it."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What a server sampled."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  #: of each token, at the sampling temperature where the server is set up so
    prompt_logprobs: tuple[float, ...] = ()  #: of prompt tokens 1…, at temperature 1; only where asked for


class Server:
    """The requests that the engine makes.

    Args:
        url: e.g. ``http://127.0.0.1:8000``, without ``/v1``.
        session: carries the API key in its headers.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession, *, timeout_s: float) -> None:
        self.url, self._session, self.timeout_s = url, session, timeout_s

    async def complete(
        self,
        model: str,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        seed: int,
        stop: Sequence[str] = (),
        end_ids: Sequence[int] = (),
        with_prompt: bool = False,
    ) -> Completion:
        """Sample up to `max_tokens` after `prompt`; the stop string's last token and the end token are included.

        Raises:
            ServerLost: no answer, or a fault.
            ServerRefused: the request cannot work, or the reply lacks what was asked for.
        """
        body: dict[str, Any] = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "logprobs": 0,  # of the sampled token alone
            "return_token_ids": True,
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,
            "ignore_eos": True,  # only the template's own end tokens end a turn
            "stop": list(stop),
            "stop_token_ids": list(end_ids),
            **_PLAIN,
        }
        if with_prompt:
            body["prompt_logprobs"] = 0
        reply = await self._request("POST", "/v1/completions", body)
        try:
            (choice,) = reply["choices"]
            ids = tuple(int(i) for i in choice["token_ids"])
            logprobs = tuple(_number(x) for x in choice["logprobs"]["token_logprobs"])
            seen: tuple[float, ...] = ()
            if with_prompt:
                given = choice["prompt_logprobs"][1:]
                seen = tuple(
                    _number(entry[str(token)]["logprob"]) for token, entry in zip(prompt[1:], given, strict=True)
                )
        except (KeyError, TypeError, ValueError) as error:
            raise ServerRefused(
                f"{self.url} gave a completion without token ids and log-probs ({type(error).__name__}: {error}); "
                "expected vLLM 0.32's /v1/completions with return_token_ids"
            ) from error
        if len(ids) != len(logprobs):
            raise ServerRefused(f"{self.url} gave {len(ids)} token ids with {len(logprobs)} log-probs")
        return Completion(ids, logprobs, seen)

    async def models(self) -> list[dict[str, Any]]:
        """Served model and adapters, as the server lists them."""
        reply = await self._request("GET", "/v1/models")
        data = reply.get("data")
        return data if isinstance(data, list) else []

    async def healthy(self) -> bool:
        """True once it answers."""
        try:
            async with self._session.get(self.url + "/health", timeout=aiohttp.ClientTimeout(total=5)) as reply:
                return reply.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter folder that the server can read; one that is there already is left as it is."""
        try:
            await self._request("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
        except ServerRefused as error:
            if "already been loaded" not in str(error):
                raise

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter; unknown ones are ignored."""
        try:
            await self._request("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        except (ModelMissing, ServerRefused):
            return

    async def sleep(self) -> None:
        """Give the GPU's memory back, weights kept in main memory. Requests wait until `wake`."""
        await self._request("POST", "/sleep?level=1")

    async def wake(self) -> None:
        """Take the GPU's memory back."""
        await self._request("POST", "/wake_up")

    async def sleeps(self) -> bool:
        """True if it is asleep.

        Raises:
            ServerRefused: it cannot sleep.
        """
        try:
            return bool((await self._request("GET", "/is_sleeping")).get("is_sleeping"))
        except ModelMissing as error:
            raise ServerRefused(
                f"{self.url} cannot sleep; start it with --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1, or set "
                "engine.sleep=false"
            ) from error

    async def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=self.timeout_s, sock_connect=10)
        try:
            async with self._session.request(method, self.url + path, json=body, timeout=timeout) as reply:
                if reply.status == 200:
                    if "json" not in reply.content_type:
                        await reply.read()
                        return {}
                    content = await reply.json()
                    return content if isinstance(content, dict) else {}
                text = (await reply.text())[:300]
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            what = f"no answer within {self.timeout_s:.0f} s" if isinstance(error, TimeoutError) else str(error)
            raise ServerLost(f"{self.url}{path}: {what or type(error).__name__}") from error
        message = f"{self.url}{path} answered {reply.status}: {text}"
        if reply.status in (429, 503):
            raise ServerBusy(message)
        if reply.status == 404:
            raise ModelMissing(message)
        if reply.status in (401, 403):
            raise ServerRefused(f"{self.url}{path} answered {reply.status}: it wants another API key")
        if reply.status >= 500:
            raise ServerLost(message)
        raise ServerRefused(message)


def attempts(kind: type[Exception], retries: int) -> AsyncRetrying:
    """A first attempt and so many repetitions after errors of a kind, with growing pauses."""
    return AsyncRetrying(
        stop=stop_after_attempt(retries + 1),
        wait=wait_random_exponential(multiplier=0.2, max=10),
        retry=retry_if_exception_type(kind),
        reraise=True,
    )


def _number(value: Any) -> float:
    """A log-prob; NaN for what is not one (JSON has neither NaN nor infinity)."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
