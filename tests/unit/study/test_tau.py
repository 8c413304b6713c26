"""τ-bench: results in the banking shape, counted by hand, and a stand-in for the tau2 executable."""

from __future__ import annotations

import json
import shutil
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from draco.core.errors import ConfigError, EnvironmentFault
from draco.core.files import resolve
from draco.core.llm.money import Prices
from draco.study.runs import open_run
from draco.study.tables import all_tables
from draco.study.tau import TauOptions, parse_results, run_tau2, tau2_command
from draco.study.verbs import evaluate


def simulation(task: str, trial: int, reward: float | None, end: str = "user_stop", turns: int = 2) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for _ in range(turns):
        messages += [
            {"role": "assistant", "content": "x", "usage": {"prompt_tokens": 100, "completion_tokens": 10}},
            {"role": "user", "content": "y", "usage": {"prompt_tokens": 50, "completion_tokens": 5}},
            {"role": "tool", "content": "z"},
        ]
    info = (
        None
        if reward is None
        else {"reward": reward, "db_check": {"db_match": True}, "reward_breakdown": {"DB": reward}}
    )
    return {
        "task_id": task,
        "trial": trial,
        "reward_info": info,
        "termination_reason": end,
        "agent_cost": 0.0,
        "messages": messages,
    }


def test_the_greeting_is_no_turn_of_the_agent(tmp_path: Path) -> None:
    greeted = simulation("task_000", 0, 1.0)
    greeted["messages"].insert(0, {"role": "assistant", "content": "Hi!"})
    assert parse_results(results(tmp_path / "r.json", [greeted], tasks=1, trials=1), n=1)["turns"] == 2.0
    greeted["messages"][1] = "text"
    with pytest.raises(ConfigError, match=r"simulation 0: field 'messages'\[1\]: expected an object, got str"):
        parse_results(results(tmp_path / "r.json", [greeted], tasks=1, trials=1), n=1)


def results(path: Path, simulations: list[dict[str, Any]], tasks: int = 3, trials: int | None = 2) -> Path:
    content = {
        "info": {"git_commit": "abc", "agent_info": {"llm_args": {"api_key": "secret"}}},
        "tasks": [{"id": f"task_{i:03}"} for i in range(tasks)], "simulations": simulations,
    }  # fmt: skip
    if trials is not None:  # not every version says
        content["info"]["num_trials"] = trials
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


BANKING = [
    simulation("task_000", 0, 1.0), simulation("task_000", 1, 1.0), simulation("task_001", 0, 1.0, turns=4),
    simulation("task_001", 1, None, "infrastructure_error", turns=0), simulation("task_002", 0, 0.0, "max_steps"),
]  # fmt: skip


def test_infrastructure_errors_and_missing_runs_are_failures(tmp_path: Path) -> None:
    found = parse_results(
        results(tmp_path / "r.json", BANKING), n=2, prices=Prices(2.0, 8.0), user_prices=Prices(1.0, 4.0)
    )
    # 3 of 3 × 2: tau2 itself would report 3 of 4 that it counts.
    assert found["tgc"] == pytest.approx(3 / 6)
    assert found["tgc_pass_hat"] == pytest.approx([0.5, 1 / 3])
    assert found["tgc_pass_at"] == pytest.approx([0.5, 2 / 3])
    assert (found["infrastructure_errors"], found["missing"], found["quarantined"]) == (1, 1, 2)
    assert found["turns"] == pytest.approx((2 + 2 + 4 + 0 + 2 + 0) / 6)
    # 10 agent and 10 user turns; half of the bill is one pass.
    assert found["agent_cost_usd"] == pytest.approx((1000 * 2 + 100 * 8) / 1e6)
    assert found["user_cost_usd"] == pytest.approx((500 * 1 + 50 * 4) / 1e6)
    assert found["cost_usd"] == pytest.approx((2800 + 700) / 2e6)
    assert "secret" not in json.dumps(found)
    assert parse_results(tmp_path / "r.json", n=2)["cost_usd"] is None  # tau2's $0 of a local model is no price


def test_what_is_no_results_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ConfigError, match="simulations"):
        parse_results(tmp_path / "a.json", n=1)
    with pytest.raises(ConfigError, match=r"simulation 0: field 'reward_info\.reward'"):
        parse_results(results(tmp_path / "b.json", [simulation("t", 0, "x")], trials=1), n=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="more than n=1"):
        parse_results(results(tmp_path / "c.json", BANKING, trials=None), n=1)
    with pytest.raises(ConfigError, match="was run with 2 trials a task; pass n=2"):
        parse_results(results(tmp_path / "d.json", BANKING), n=3)


def test_what_the_user_simulator_did_wrong_is_a_fault_and_no_answer_of_the_agent(tmp_path: Path) -> None:
    runs = [simulation("task_000", 0, 0.0, "user_error"), simulation("task_000", 1, 0.0, "agent_error")]
    found = parse_results(results(tmp_path / "r.json", runs, tasks=1), n=2)
    assert (found["infrastructure_errors"], found["quarantined"]) == (1, 1)
    assert found["terminations"] == {"environment_error": 0.5, "no_action": 0.5}


def test_the_command_holds_no_key_and_doubles_the_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    command = tau2_command(TauOptions(max_turns=100), "policy", "http://127.0.0.1:1/v1", Path("/x/out"))
    assert command[command.index("--max-steps") + 1] == "200"
    assert command[command.index("--retrieval-config") + 1] == "alltools-qwen"
    assert "sk-secret" not in " ".join(command)
    other = tau2_command(TauOptions(domain="airline", retrieval=None), "policy", "x", Path("/x/out"))
    assert "--retrieval-config" not in other  # tau2 refuses it for a domain without documents


@pytest.fixture
def tau2(tmp_path: Path) -> Path:
    """Writes the results above to where --save-to says; fails for the user simulator `bad`."""
    program = tmp_path / "tau2"
    program.write_text(
        f"#!{sys.executable}\nimport json, os, pathlib, sys\n"
        f"called = {{'argv': sys.argv, 'key': os.environ.get('HOSTED_VLLM_API_KEY')}}\n"
        f"pathlib.Path({str(tmp_path / 'tau2.json')!r}).write_text(json.dumps(called))\n"
        "if 'bad' in sys.argv: sys.exit('no such model')\n"
        "status = 3 if 'late' in sys.argv else 0\n"
        "out = pathlib.Path(sys.argv[sys.argv.index('--save-to') + 1])\n"
        "out.mkdir(parents=True)\n"
        f"(out / 'results.json').write_text(pathlib.Path({str(tmp_path / 'r.json')!r}).read_text())\n"
        "sys.exit(status)\n",
        encoding="utf-8",
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    results(tmp_path / "r.json", BANKING)
    return program


def test_evaluate_runs_the_executable(tmp_path: Path, tau2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(
        "policy: {path: x}\nrubric: {name: dynamic}\ncredit: {name: step}\n", encoding="utf-8"
    )
    arguments = [
        "env=tau_banking",
        f"run={run}",
        "n=2",
        "checkpoint=base",
        f"tau2={tau2}",
        "api_base=http://127.0.0.1:1/v1",
    ]
    evaluate.main(arguments)
    printed = capsys.readouterr().out
    assert "3 tasks × 2: SR p1 50.0%  p2 33.3%" in printed
    assert "1 infrastructure errors, 1 missing" in printed
    content = json.loads((run / "evaluations" / "tau_banking-base-n2.json").read_text(encoding="utf-8"))
    assert (content["retrieval"], content["split"]) == ("alltools-qwen", "tau_banking")
    assert content["tau2"] == {"version": None, "num_trials": 2}  # a commit would be that of the working directory
    with pytest.raises(ConfigError, match="is there already"):
        evaluate.main(arguments)
    evaluate.main([*arguments, f"results={tmp_path / 'r.json'}"])
    found = open_run(run).base_evaluation("tau_banking")
    assert found is not None
    assert found.n == 2


def test_of_a_results_file_only_what_it_says_is_written(tmp_path: Path) -> None:
    """The options' defaults stood there: a user simulator and a retrieval that nobody had used."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(
        "policy: {path: x}\nrubric: {name: dynamic}\ncredit: {name: step}\n", encoding="utf-8"
    )
    file = results(tmp_path / "r.json", BANKING)
    arguments = ["env=tau_banking", f"run={run}", "n=2", "checkpoint=base", f"results={file}"]

    def written(name: str = "tau_banking") -> dict[str, Any]:
        content = json.loads((run / "evaluations" / f"{name}-base-n2.json").read_text(encoding="utf-8"))
        known = {k: content[k] for k in ("domain", "retrieval", "user", "max_turns") if k in content}
        return {**known, "version": content["tau2"]["version"]}

    evaluate.main(arguments)
    assert written() == {"domain": "banking_knowledge", "version": None}
    (table,) = [t for t in all_tables([open_run(run)]) if t.name == "T8_models"]
    assert table.rows[0][:2] == ("base", "tau_banking")
    evaluate.main([*arguments, "retrieval=bm25"])
    assert written() == {"domain": "banking_knowledge", "retrieval": "bm25", "version": None}

    content = json.loads(file.read_text(encoding="utf-8"))
    content["info"] |= {
        "environment_info": {"domain_name": "airline"}, "max_steps": 60,
        "user_info": {"llm": "openai/u", "llm_args": {"api_key": "secret"}},
    }  # fmt: skip
    file.write_text(json.dumps(content), encoding="utf-8")
    evaluate.main(arguments)
    assert written("tau_airline") == {
        "domain": "airline", "retrieval": None, "user": "openai/u", "max_turns": 30, "version": None,
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"was made with user=openai/u, not openai/v; leave user= out"):
        evaluate.main([*arguments, "user=openai/v"])
    content["info"]["environment_info"]["domain_name"] = "x/../../../out"
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"domain_name' is 'x/.*expected a name"):
        evaluate.main(arguments)


def test_a_failing_executable_is_quoted(tmp_path: Path, tau2: Path) -> None:
    with pytest.raises(EnvironmentFault, match="no such model"):
        run_tau2(TauOptions(tau2=str(tau2), user="bad"), "m", "http://127.0.0.1:1/v1", tmp_path / "o")
    with pytest.raises(EnvironmentFault, match=r"status 3 and left partial results in .*results=") as caught:
        run_tau2(TauOptions(tau2=str(tau2), user="late"), "m", "http://127.0.0.1:1/v1", tmp_path / "late")
    assert str(tmp_path / "late") in str(caught.value)
    with pytest.raises(ConfigError, match="no executable"):
        run_tau2(TauOptions(tau2=str(tmp_path / "none")), "m", "x", tmp_path / "o")


@pytest.fixture
def port() -> Iterator[int]:
    """Held until the test ends: a server that says SO_REUSEADDR may listen there, nobody else gets it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


#: an "interpreter with vLLM": it keeps what it is started with, and answers as a server with adapters does
SERVER = """#!{python}
import json, os, pathlib, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from safetensors import safe_open

seen = {{"argv": sys.argv, "key": os.environ["VLLM_API_KEY"], "judge": os.environ.get("OPENAI_API_KEY"), "names": []}}

def note():
    pathlib.Path({file!r}).write_text(json.dumps(seen))

class H(BaseHTTPRequestHandler):
    def say(self, content):
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        assert self.path == "/health" or self.headers["Authorization"] == "Bearer " + seen["key"]
        self.say({{"data": [{{"id": "draco-base"}}]}})

    def do_POST(self):
        assert self.headers["Authorization"] == "Bearer " + seen["key"]
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/load_lora_adapter":
            with safe_open(body["lora_path"] + "/adapter_model.safetensors", "pt") as stored:
                seen["names"] = list(stored.keys())
            note()
            return self.say({{}})
        changed = body["model"] != "draco-base" and {applies}
        row = [None] + [{{str(t): {{"logprob": -2.0 if changed else -1.0}}}} for t in body["prompt"][1:]]
        choice = {{"token_ids": [1], "logprobs": {{"token_logprobs": [-1.0]}}, "prompt_logprobs": row}}
        self.say({{"choices": [choice]}})

note()
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), H).serve_forever()
"""


@pytest.fixture
def trained_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of a `qwen3_5` model with a checkpoint; it has a config and a tokenizer, and needs no weights here."""
    from peft import LoraConfig
    from safetensors.torch import save_file

    monkeypatch.setenv("VLLM_API_KEY", "")  # the launcher makes one up; the variable is put back after the test
    monkeypatch.setenv("OPENAI_API_KEY", "sk-judge")
    run, model = tmp_path / "run", tmp_path / "model"
    shutil.copytree(resolve("pkg://draco.policy.tiny"), model)
    config = {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]}
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    adapter = run / "checkpoints" / "step=000001" / "adapter"
    adapter.mkdir(parents=True)
    LoraConfig(r=20).save_pretrained(str(adapter))
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    weights = {f"{layer}.lora_A.weight": torch.ones(20, 4), f"{layer}.lora_B.weight": torch.ones(4, 20)}
    save_file(weights, adapter / "adapter_model.safetensors")
    (run / "config.yaml").write_text(f"policy: {{path: {model}}}\n", encoding="utf-8")
    return run


def fake_vllm(folder: Path, *, applies: bool) -> Path:
    program = folder / "python-with-vllm"
    text = SERVER.format(python=sys.executable, file=str(folder / "seen.json"), applies=applies)
    program.write_text(text, encoding="utf-8")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


def test_the_checkpoint_is_served_and_the_server_ends(
    tmp_path: Path, trained_run: Path, tau2: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a key, behind the watchdog, and under the names that vLLM applies."""
    program = fake_vllm(tmp_path, applies=True)
    options = [f"run={trained_run}", "n=2", "checkpoint=1", f"tau2={tau2}", f"python={program}", f"port={port}"]
    evaluate.main(["env=tau_banking", *options, "tool_parser=hermes"])
    seen = json.loads((tmp_path / "seen.json").read_text(encoding="utf-8"))
    arguments = seen["argv"]
    assert arguments[arguments.index("--model") + 1] == str(tmp_path / "model")
    assert arguments[arguments.index("--host") + 1] == "127.0.0.1"
    assert arguments[arguments.index("--max-lora-rank") + 1] == "32"
    assert arguments[arguments.index("--tool-call-parser") + 1] == "hermes"
    assert arguments[-2:] == ["--generation-config", "auto"]  # the last one holds
    assert len(seen["key"]) > 20
    assert seen["key"] not in arguments
    assert seen["judge"] is None
    called = json.loads((tmp_path / "tau2.json").read_text(encoding="utf-8"))
    model = called["argv"][called["argv"].index("--agent-llm") + 1]
    assert model.startswith("hosted_vllm/draco-v000000-")
    assert called["key"] == seen["key"]
    assert seen["key"] not in " ".join(called["argv"])
    assert all(".model.language_model.layers." in name for name in seen["names"])
    assert (trained_run / "evaluations" / "tau_banking-step=000001-n2.json").is_file()
    with socket.socket() as again, pytest.raises(ConnectionRefusedError):
        again.connect(("127.0.0.1", port))


def test_several_checkpoints_are_played_on_one_server(tmp_path: Path, trained_run: Path, tau2: Path, port: int) -> None:
    from safetensors.torch import load_file, save_file

    first = trained_run / "checkpoints" / "step=000001"
    for step in (2, 3):
        other = first.with_name(f"step={step:06d}")
        shutil.copytree(first, other)
        weights = load_file(other / "adapter" / "adapter_model.safetensors")
        changed = {name: step * w for name, w in weights.items()}
        save_file(changed, other / "adapter" / "adapter_model.safetensors")
    newest = trained_run / "checkpoints" / "step=000003"
    options = [f"run={trained_run}", "n=2", f"tau2={tau2}", f"python={fake_vllm(tmp_path, applies=True)}"]
    options = ["env=tau_banking", *options, f"port={port}", "tensor_parallel=2", "max_len=4096"]
    (newest / "state.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="did not write down how long its epochs are; name steps"):
        evaluate.main([*options, "checkpoints=last2"])
    (newest / "state.json").write_text('{"epoch_steps": 1}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"last4: the run has 3 epoch-end checkpoint\(s\)"):
        evaluate.main([*options, "checkpoints=last4"])
    evaluate.main([*options, "checkpoints=last2"])
    names = ["tau_banking-step=000002-n2.json", "tau_banking-step=000003-n2.json"]
    assert sorted(f.name for f in (trained_run / "evaluations").iterdir()) == names
    content = json.loads((trained_run / "evaluations" / names[0]).read_text(encoding="utf-8"))
    assert content["adapter_proven"] is True
    assert content["judge"] == "openai/gpt-5.4"
    assert content["served"] == {
        "max_len": 4096, "yarn": None, "tool_parser": "qwen3_coder", "reasoning_parser": "qwen3", "tensor_parallel": 2,
    }  # fmt: skip
    arguments = json.loads((tmp_path / "seen.json").read_text(encoding="utf-8"))["argv"]
    assert arguments[arguments.index("--tensor-parallel-size") + 1] == "2"


def test_an_adapter_that_changes_nothing_is_an_error(tmp_path: Path, trained_run: Path, tau2: Path, port: int) -> None:
    program = fake_vllm(tmp_path, applies=False)
    options = [f"run={trained_run}", "n=2", "checkpoint=1", f"tau2={tau2}", f"python={program}", f"port={port}"]
    with pytest.raises(ConfigError, match=r"cannot be served: .* exactly as the base model.*vllm#39369"):
        evaluate.main(["env=tau_banking", *options])
    assert not (tmp_path / "tau2.json").exists()
    with socket.socket() as again, pytest.raises(ConnectionRefusedError):
        again.connect(("127.0.0.1", port))


def test_a_server_that_ends_is_quoted(tmp_path: Path, trained_run: Path, tau2: Path, port: int) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho no module named vllm >&2\nexit 3\n", encoding="utf-8")
    program.chmod(0o755)
    options = [f"run={trained_run}", "n=2", "checkpoint=base", f"tau2={tau2}", f"python={program}", f"port={port}"]
    with pytest.raises(
        ConfigError, match=r"env=tau_banking started has ended \(exit status 3\)(.|\n)*no module named vllm"
    ):
        evaluate.main(["env=tau_banking", *options])
    with pytest.raises(ConfigError, match=r"^python=.*none: no such interpreter"):
        evaluate.main(["env=tau_banking", *options[:-2], f"python={tmp_path / 'none'}"])
