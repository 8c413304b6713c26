"""A whole run whose rollouts and self-judge go to one (fake) vLLM server, under the name of the current adapter."""

from __future__ import annotations

import json
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from support.fake_vllm import FakeVllm
from support.policies import TINY
from support.runs import rows_of, train

from draco.core.errors import ConfigError
from draco.env.desk.judge.reading import read_prompt
from draco.env.desk.judge.replies import reply
from draco.policy.policy import Policy
from draco.run.archive import read_calls

pytestmark = pytest.mark.judge


class Judging(FakeVllm):
    """Answers judge calls as the scripted judge does."""

    async def _chat(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json()
        self.reply = json.dumps(reply(read_prompt(body["messages"][1]["content"])))
        return await super()._chat(request)


def test_the_judge_is_the_current_adapter_on_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret-of-the-server")
    model = tmp_path / "model"  # policy=tiny by another name, which is not refused
    shutil.copytree(str(files("draco.policy") / "tiny"), model)
    server = Judging(
        Policy(TINY, rank=4), ["<code>apis.mail.list()</code>", "<code>apis.done()</code>"], "secret-of-the-server"
    )
    server.max_len = 200_000
    run = tmp_path / "run"
    options = (
        "steps=2",
        "tasks_per_step=2",
        "group_size=2",
        "eval.before=false",
        "eval.tasks=1",
        "policy.rank=4",
        f"policy.path={model}",
        "engine=vllm",
        f"engine.servers=[{server.url}]",
        "limits.max_turns=3",
        "report=false",
        "limits.max_response_tokens=160",
        "limits.max_prompt_tokens=600",
        "rubric=self_judge",
    )
    try:
        train(*options, f"run={run}")
        names = [c["model"] for c in server.chats]
        server.max_len = 2_000
        with pytest.raises(ConfigError, match="served with 2000"):
            train(*options, f"run={tmp_path / 'short'}")
    finally:
        server.stop()
    assert len(set(names)) == 2  # the adapter of each step
    assert sorted(names) == names
    assert all(name.startswith("draco-v") for name in names)
    assert {c["model"] for c in read_calls(run)} == {f"hosted_vllm/{name}" for name in names}
    assert [float(r["judge/failed_share"]) for r in rows_of(run / "metrics.csv")] == [0.0, 0.0]
    assert not [p for p in run.rglob("*") if p.is_file() and b"secret-of-the-server" in p.read_bytes()]
