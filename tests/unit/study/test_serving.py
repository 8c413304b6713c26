"""What vLLM is started with for tau2, the judge inside tau2, and whether a server applies the adapter that it lists."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Qwen2Config

from draco.core.errors import ConfigError
from draco.core.llm.adapters import applies_adapter
from draco.core.llm.money import Prices, Usage
from draco.study import tau_judge
from draco.study.serving import ServeOptions, parsers, yarn_override
from draco.study.tau import TauOptions, judge_log, judge_usage, parse_results, tau2_command
from draco.study.verbs import evaluate_tau


def qwen25() -> Qwen2Config:
    return Qwen2Config(max_position_embeddings=32768, rope_parameters={"rope_type": "default", "rope_theta": 1e6})


def test_yarn_stretches_qwen25_as_the_paper_does() -> None:
    """32,768 to 131,072 tokens (Appendix D). The model's own rope_theta stays: vLLM replaces the whole mapping."""
    assert yarn_override(qwen25(), 131_072) == {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768,
        }
    }  # fmt: skip
    with pytest.raises(ConfigError, match="handles 32768 tokens by itself; leave yarn= out"):
        yarn_override(qwen25(), 32_768)


def test_the_options_of_a_server_pass_through() -> None:
    options = ServeOptions(tensor_parallel=8, yarn=131_072, tool_parser="hermes", reasoning_parser="qwen3")
    launch = options.launch(qwen25())
    assert (launch.tensor_parallel, launch.max_len, launch.port) == (8, 131_072, 8010)
    extra = list(launch.extra)
    assert json.loads(extra[extra.index("--hf-overrides") + 1])["rope_parameters"]["factor"] == 4.0
    assert extra[extra.index("--reasoning-parser") + 1] == "qwen3"
    assert extra[extra.index("--tool-call-parser") + 1] == "hermes"
    plain = ServeOptions().launch(None)
    assert (list(plain.extra), plain.max_len) == (["--generation-config", "auto"], None)
    with pytest.raises(ConfigError, match="max_len=200000 is more than yarn=131072"):
        ServeOptions(max_len=200_000, yarn=131_072).launch(qwen25())


def test_parsers_follow_the_model() -> None:
    assert parsers("qwen3_5") == ("qwen3_coder", "qwen3")
    assert parsers("qwen2") == ("hermes", None)


def test_the_judge_inside_tau2_is_set_and_its_tokens_are_logged(tmp_path: Path) -> None:
    seen: list[str] = []

    def generate(model: str) -> SimpleNamespace:
        seen.append(model)
        return SimpleNamespace(usage={"prompt_tokens": 70, "completion_tokens": 7})

    module = SimpleNamespace(DEFAULT_LLM_NL_ASSERTIONS="gpt-4.1", generate=generate)
    log = tmp_path / "judge.jsonl"
    tau_judge.set_judge(module, "openai/gpt-5.4", str(log))
    module.generate(model=module.DEFAULT_LLM_NL_ASSERTIONS)
    module.generate(model=module.DEFAULT_LLM_NL_ASSERTIONS)
    assert seen == ["openai/gpt-5.4"] * 2
    assert judge_usage(log) == Usage(140, 14)
    assert judge_usage(tmp_path / "none.jsonl") is None
    with pytest.raises(SystemExit, match="its judge cannot be set"):
        tau_judge.set_judge(SimpleNamespace(), "x", str(log))


def test_tau2_is_started_by_its_own_python_where_there_is_one(tmp_path: Path) -> None:
    executable = tmp_path / "bin" / "tau2"
    executable.parent.mkdir()
    executable.write_text("#!/bin/sh\n", encoding="utf-8")
    executable.chmod(0o755)
    out = tmp_path / "out"
    alone = tau2_command(TauOptions(tau2=str(executable)), "m", "x", out)
    assert alone[:2] == [str(executable), "run"]
    (executable.parent / "python").symlink_to(sys.executable)
    own = tau2_command(TauOptions(tau2=str(executable)), "m", "x", out)
    assert own[:5] == [
        str(executable.parent / "python"), tau_judge.__file__, "openai/gpt-5.4", str(judge_log(out)), "run",
    ]  # fmt: skip
    assert tau2_command(TauOptions(tau2=str(executable), judge=None), "m", "x", out)[:2] == [str(executable), "run"]


def test_the_judge_is_in_the_cost_of_a_pass(tmp_path: Path) -> None:
    said = {"role": "assistant", "content": "x", "usage": {"prompt_tokens": 100, "completion_tokens": 10}}
    one = {"task_id": "t", "trial": 0, "reward_info": {"reward": 1.0}, "termination_reason": "user_stop",
           "messages": [said]}  # fmt: skip
    file = tmp_path / "r.json"
    file.write_text(json.dumps({"info": {}, "tasks": [{"id": "t"}], "simulations": [one]}), encoding="utf-8")
    price = Prices(1.0, 10.0)
    found = parse_results(file, n=1, prices=price, user_prices=price, judge_prices=price, judge=Usage(140, 14))
    assert found["judge_cost_usd"] == pytest.approx(280 / 1e6)
    assert found["cost_usd"] == pytest.approx((200 + 0 + 280) / 1e6)
    unpriced = parse_results(file, n=1, prices=price, user_prices=price, judge=Usage(140, 14))
    assert unpriced["cost_usd"] is None  # tokens without a price are no $0
    unused = parse_results(file, n=1, prices=price, user_prices=price, judge=Usage(0, 0))
    assert unused["cost_usd"] == pytest.approx(200 / 1e6)


@pytest.fixture
def server() -> Iterator[Callable[..., str]]:
    """A server that lists `mine` as an adapter of `base`, and answers by it as it is told."""
    running: list[ThreadingHTTPServer] = []

    def start(*, applies: bool, lists: bool = True) -> str:
        class Handler(BaseHTTPRequestHandler):
            def say(self, content: Any) -> None:
                data = json.dumps(content).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                self.say({"data": [{"id": "base"}, {"id": "mine", **({"parent": "base"} if lists else {})}]})

            def do_POST(self) -> None:
                model = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["model"]
                value = -2.0 if applies and model == "mine" else -1.0
                self.say({"choices": [{"prompt_logprobs": [None, {"7": {"logprob": value}}]}]})

            def log_message(self, *_: Any) -> None:
                pass

        made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=made.serve_forever, daemon=True).start()
        running.append(made)
        return f"http://127.0.0.1:{made.server_port}/v1"

    yield start
    for made in running:
        made.shutdown()
        made.server_close()


def test_a_listed_adapter_that_changes_nothing_is_found(server: Callable[..., str]) -> None:
    assert applies_adapter(server(applies=True), "hosted_vllm/mine") is True
    silent = server(applies=False)
    assert applies_adapter(silent, "openai/mine") is False
    assert applies_adapter(silent, "base") is None  # no adapter
    assert applies_adapter(server(applies=False, lists=False), "mine") is None
    assert applies_adapter("http://127.0.0.1:9/v1", "mine") is None  # nobody there


def test_tau_bench_refuses_such_a_server_of_the_users_own(tmp_path: Path, server: Callable[..., str]) -> None:
    run = tmp_path / "run"
    (run / "checkpoints" / "step=000001").mkdir(parents=True)
    (run / "checkpoints" / "step=000002").mkdir()
    (run / "config.yaml").write_text("policy: {path: x}\n", encoding="utf-8")
    common = [f"run={run}", "model=mine", f"tau2={tmp_path / 'none'}"]
    with pytest.raises(ConfigError, match="exactly as its base model"):
        evaluate_tau.main([*common, "checkpoint=1", f"api_base={server(applies=False)}"])
    with pytest.raises(ConfigError, match="is no executable"):  # the adapter is applied: on to tau2
        evaluate_tau.main([*common, "checkpoint=1", f"api_base={server(applies=True)}"])
    with pytest.raises(ConfigError, match="api_base= serves one model and 2 checkpoints are named"):
        evaluate_tau.main([*common, "checkpoints=1,2", "api_base=http://127.0.0.1:9/v1"])
    with pytest.raises(ConfigError, match="are the same; give one"):
        evaluate_tau.main([*common, "checkpoints=1", "checkpoint=1"])
