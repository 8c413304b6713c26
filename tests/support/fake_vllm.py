"""A loopback server with vLLM's HTTP surface. Only the sampling is faked: it types a script, and gives the log-probs
that the tiny policy, with the adapter that was loaded from disk, has for what it typed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from peft import set_peft_model_state_dict
from safetensors.torch import load_file
from support.echo import EchoEpisode
from torch import Tensor

from draco.core.types import Task
from draco.env.base import Episode
from draco.policy.policy import Policy
from draco.rollout.engines.base import Engine
from draco.rollout.engines.vllm.launch import BASE
from draco.rollout.loop import Limits
from draco.rollout.rollout import Rollout, sampling_seed

__all__ = ["LIMITS", "SCRIPT", "FakeVllm", "rollouts", "run"]

SCRIPT = ("<code>a</code>", "<code>b</code>", "<code>done</code>")
LIMITS = Limits(max_turns=8, max_response_tokens=200)


class FakeVllm:
    """Runs on a thread of its own until `stop`.

    Args:
        policy: weights that it may change; not the trainer's.
        script: turn t of every conversation is typed as the t-th text, then the end token.
        api_key: what requests must bring.
    """

    lock = threading.Lock()  #: one model may stand behind several servers
    holds: tuple[int, str] | None = None  #: server and adapter whose weights that model has now

    def __init__(self, policy: Policy, script: Sequence[str] = ("<code>done</code>",), api_key: str = "") -> None:
        self.policy, self.script, self.api_key = policy, script, api_key
        self.adapters: dict[str, dict[str, Tensor]] = {}
        self.loads: list[str] = []
        self.unloads: list[str] = []
        self.requests: list[dict[str, Any]] = []  #: completions for rollouts, in order
        self.fault: Callable[[dict[str, Any]], web.Response | float | None] = lambda body: None  #: or seconds to wait
        self.ignores_adapters = False  #: loads them and applies none of them
        self.wrong: dict[str, Tensor] | None = None  #: serves these weights instead of what it loads
        self.raw_logprobs = False  #: vLLM's default: at temperature 1
        self.reads_disk = True
        self.max_len = 4096
        self.asleep = False
        self.order: list[str] = []  #: every call
        self.reply = "{}"  #: to a chat
        self.chats: list[dict[str, Any]] = []
        self._started, self._ending = threading.Event(), threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._started.wait(120)

    # --- thread -----------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._begin(0))
        self._loop.run_forever()

    async def _begin(self, port: int) -> None:
        app = web.Application(middlewares=[self._authorised])
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/load_lora_adapter", self._load)
        app.router.add_post("/v1/unload_lora_adapter", self._unload)
        app.router.add_post("/sleep", self._sleep)
        app.router.add_post("/wake_up", self._wake)
        app.router.add_get("/is_sleeping", self._is_sleeping)
        self._runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=0)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, "127.0.0.1", port)
        await self._site.start()
        self.port = int(self._runner.addresses[0][1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._started.set()

    def stop(self) -> None:
        """As if killed: the port is closed, open connections are reset."""
        with self._ending:
            if not self._loop.is_closed():
                asyncio.run_coroutine_threadsafe(self._die(), self._loop).result(120)
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join(120)
                self._loop.close()

    async def _die(self) -> None:
        await self._site.stop()
        for connection in list(self._runner.server.connections if self._runner.server else ()):
            if connection.transport is not None:
                connection.transport.abort()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._runner.cleanup()

    def kill_soon(self) -> None:
        """Stop from inside a handler."""
        threading.Thread(target=self.stop, daemon=True).start()

    def forget(self) -> None:
        """As if restarted: no adapters."""
        self.adapters.clear()

    # --- requests ---------------------------------------------------------------------------------------------------

    @web.middleware
    async def _authorised(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.order.append(request.path)
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}" and request.path[1] == "v":
            return web.json_response({"error": "Unauthorized"}, status=401)
        response = await handler(request)
        assert isinstance(response, web.StreamResponse)
        return response

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        base = {"id": BASE, "parent": None, "max_model_len": self.max_len}
        return web.json_response({"data": [base, *({"id": name, "parent": BASE} for name in self.adapters)]})

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        name, folder = body["lora_name"], Path(body["lora_path"])
        self.loads.append(name)
        if name in self.adapters:
            return web.json_response({"error": f"'{name}' has already been loaded."}, status=400)
        if not self.reads_disk or not folder.is_dir():
            return web.json_response({"error": "No adapter found for <path>"}, status=404)
        self.adapters[name] = self.wrong or load_file(folder / "adapter_model.safetensors")
        return web.Response(text="Success")

    async def _unload(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        self.unloads.append(name)
        self.adapters.pop(name, None)
        return web.Response(text="Success")

    async def _sleep(self, request: web.Request) -> web.Response:
        self.asleep = True
        return web.Response()

    async def _wake(self, request: web.Request) -> web.Response:
        self.asleep = False
        return web.Response()

    async def _is_sleeping(self, request: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": self.asleep})

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["model"] != BASE and body["model"] not in self.adapters:
            return web.json_response({"error": "The model does not exist."}, status=404)
        if "prompt_logprobs" not in body:
            self.requests.append(body)
            fault = self.fault(body)
            if isinstance(fault, web.Response):
                return fault
            if fault is not None:
                await asyncio.sleep(fault)
        assert not self.asleep
        prompt = body["prompt"]
        ids, stopped = self._type(prompt, body["max_tokens"], body["stop"], body["stop_token_ids"])
        logprobs = self._logprobs(body["model"], [*prompt, *ids])
        scaled = logprobs[1.0 if self.raw_logprobs else body["temperature"] or 1.0]
        choice: dict[str, Any] = {
            "token_ids": ids,
            "logprobs": {"token_logprobs": scaled[len(prompt) - 1 :]},
            "finish_reason": "stop" if stopped else "length",
        }
        if "prompt_logprobs" in body:
            pairs = zip(prompt[1:], logprobs[1.0], strict=False)
            choice["prompt_logprobs"] = [None, *({str(token): {"logprob": x}} for token, x in pairs)]
        return web.json_response({"choices": [choice]})

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["model"] != BASE and body["model"] not in self.adapters:
            return web.json_response({"error": {"message": "The model does not exist."}}, status=404)
        self.chats.append(body)
        message = {"role": "assistant", "content": self.reply}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
        head = {"object": "chat.completion", "model": body["model"]}
        return web.json_response({**head, "choices": [choice], "usage": usage})

    def _type(self, prompt: list[int], budget: int, stop: list[str], end: list[int]) -> tuple[list[int], bool]:
        """What follows the prompt in the script; it knows where it is by the tokens alone, as a model does."""
        chat = self.policy.chat
        text = chat.decode(prompt)
        turn = text.count("<|assistant|>") - 1
        typed = text.rsplit("<|assistant|>", 1)[1]
        script = self.script[min(turn, len(self.script) - 1)]
        (end_id,) = chat.end_ids
        rest = [*chat.encode_text(script), end_id]
        done = len(chat.encode_text(typed))
        ids: list[int] = []
        for token in rest[done:][:budget]:
            ids.append(token)
            if token in end or any(s in chat.decode(ids) for s in stop):
                return ids, True
        return ids, False

    def _logprobs(self, model: str, ids: list[int]) -> dict[float, list[float]]:
        with self.lock, torch.no_grad(), self.policy.sampling():
            row = torch.tensor([ids])
            off = model == BASE or self.ignores_adapters
            if not off and FakeVllm.holds != (id(self), model):
                set_peft_model_state_dict(self.policy.model, self.adapters[model])
                FakeVllm.holds = (id(self), model)
            if off:
                with self.policy.model.disable_adapter():
                    logits = self.policy.model(input_ids=row, use_cache=False).logits[0, :-1]
            else:
                logits = self.policy.model(input_ids=row, use_cache=False).logits[0, :-1]
        return {t: (logits / t).log_softmax(-1).gather(1, row[0, 1:, None]).squeeze(1).tolist() for t in (0.5, 1.0)}


def rollouts(
    policy: Policy,
    groups: int = 1,
    size: int = 1,
    limits: Limits = LIMITS,
    episode: Callable[[Task], Episode] = EchoEpisode,
) -> list[Rollout]:
    """Rollouts of the echoing environment, in groups."""
    tasks = [Task(f"train_{i}", f"say {i}", "train", f"s{i}") for i in range(groups)]
    return [
        Rollout(
            episode(task), policy.chat, limits, task=task, sample=sample, group_index=index,
            seed=sampling_seed(0, "t", 0, task.id, sample), policy_version=0,
        )
        for index, task in enumerate(tasks)
        for sample in range(size)
    ]  # fmt: skip


def run(engine: Engine, policy: Policy, rows: list[Rollout], temperature: float = 1.0) -> list[Rollout]:
    """All of them, in the order in which they end."""
    ended = list(engine.run(policy, rows, temperature=temperature))
    assert {id(r) for r in ended} == {id(r) for r in rows}
    return ended
