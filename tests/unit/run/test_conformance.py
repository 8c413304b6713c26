"""The check of a model before it trains: what it leaves alone, what it finds, what is decided, and its cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import save
from support.module import prepared
from support.policies import TINY, tiny_policy

from draco.cli import run as draco
from draco.core.errors import ConfigError
from draco.policy import attention
from draco.policy.attention import pack_attention
from draco.policy.policy import Policy
from draco.rollout.engines import ragged, transformers
from draco.rollout.engines.ragged import decodes_ragged
from draco.run.conformance import Verdict, check, conform, paths, settle
from draco.run.conformance.examine import examine as look
from draco.run.conformance.twin import Twin
from draco.run.conformance.verdict import Finding
from draco.update.gradients import Worker


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRACO_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def packable(new_policy: Callable[[], Policy]) -> Policy:
    policy = new_policy()
    assert pack_attention(policy.model)
    return policy


def found(verdict: Verdict) -> dict[str, bool | None]:
    return {f.name: f.passed for f in verdict.findings}


# --- what it leaves alone ---------------------------------------------------------------------------------------------


def test_nothing_is_changed(packable: Policy) -> None:
    packable.model.train()
    before = {name: p.detach().clone() for name, p in packable.named_parameters()}
    stream = torch.random.get_rng_state()
    how = packable.model.config._attn_implementation
    verdict = look(packable, packed=True, engine=True)
    assert verdict.line() == "packed"
    assert verdict.ragged
    assert all(found(verdict)[name] for name in ("end tokens", "template", "trainer, model, packed"))
    assert all(torch.equal(p, before[name]) for name, p in packable.named_parameters())
    assert all(p.grad is None for p in packable.parameters())
    assert torch.equal(torch.random.get_rng_state(), stream)
    assert packable.model.training
    assert packable.model.config._attn_implementation == how


def test_dropout_of_the_adapter_is_no_difference_and_stays() -> None:
    policy = Policy(TINY, dropout=0.3)
    pack_attention(policy.model)
    assert look(policy, packed=True, engine=True).kind == "packed"
    layers = [m for m in policy.model.modules() if isinstance(m, torch.nn.Dropout)]
    assert layers
    assert all(layer.p == 0.3 for layer in layers)


def test_a_copy_has_the_class_and_the_adapter_of_the_model(packable: Policy) -> None:
    twin = Twin(packable)
    own, copied = packable.model.get_base_model(), twin.model.get_base_model()
    assert type(own) is type(copied)
    names = {n.split(".")[-3] for n, _ in packable.model.named_parameters() if "lora_A" in n}
    assert {n.split(".")[-3] for n, _ in twin.model.named_parameters() if "lora_A" in n} == names


# --- what it finds ----------------------------------------------------------------------------------------------------


def test_packed_rows_that_see_each_other_are_unpacked(packable: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = attention.packed_inputs

    def one_row(model: Any, lengths: Any, device: Any) -> dict[str, Any]:
        return plain(model, lengths, device) | {"packed_lengths": (sum(lengths),)}

    monkeypatch.setattr("draco.update.gradients.packed_inputs", one_row)
    verdict = look(packable, packed=True, engine=True)
    assert verdict.kind == "unpacked"
    assert "packed rows differ from plain ones" in verdict.reason
    assert found(verdict)["trainer, model, packed"] is False
    assert found(verdict)["trainer, model, one a row"] is True


def test_an_update_at_another_temperature_is_refused(packable: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "Worker", lambda *a, temperature, **k: Worker(*a, temperature=1.5 * temperature, **k))
    verdict = look(packable, packed=True, engine=True)
    assert verdict.kind == "refused"
    assert "the update differs from plain transformers and PEFT" in verdict.reason


def test_a_base_model_that_is_random_in_training_is_refused(packable: Policy) -> None:
    """In a way that `draco.policy.mode` does not know: a block looks at its own mode."""
    block = packable.model.get_base_model().model.layers[1]
    block.register_forward_hook(lambda module, inputs, out: torch.dropout(out, 0.1, module.training))
    assert look(packable, packed=True, engine=False).kind == "refused"


def test_a_gradient_that_is_wrong_alone_is_refused(packable: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(*args: Any, **options: Any) -> Worker:
        return Worker(*args, **options | {"backward": lambda loss: (2 * loss).backward()})

    monkeypatch.setattr(paths, "Worker", doubled)
    verdict = look(packable, packed=True, engine=True)
    assert verdict.kind == "refused"
    assert "gradients 1.0e+00" in verdict.reason


def test_rollouts_that_are_wrong_in_one_pass_advance_one_by_one(
    packable: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert decodes_ragged(packable.model)
    plain = ragged.RaggedBatch.inputs
    monkeypatch.setattr(
        ragged.RaggedBatch, "inputs", lambda self, t: plain(self, t) | {"position_ids": self.positions[None] // 2}
    )
    verdict = look(packable, packed=True, engine=True)
    assert verdict.kind == "packed"
    assert not verdict.ragged
    assert not decodes_ragged(packable.model)
    assert found(verdict)["engine, model, one position at a time"] is True


def test_an_engine_that_reports_other_numbers_is_refused(packable: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = transformers.sample
    monkeypatch.setattr(transformers, "sample", lambda logits, u, t: plain(logits * 1.2, u, t))
    verdict = look(packable, packed=True, engine=True)
    assert verdict.kind == "refused"
    assert "the in-process engine differs from plain rows" in verdict.reason
    assert look(packable, packed=True, engine=False).kind == "packed"  # servers sample: it is not used


def test_an_engine_that_raises_is_refused_in_one_line(packable: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise ValueError("a cache\nof its own")

    monkeypatch.setattr(transformers, "sample", broken)
    verdict = look(packable, packed=True, engine=True)
    assert verdict.kind == "refused"
    assert "ValueError: a cache of its own" in verdict.reason
    assert "\n" not in verdict.reason


def test_a_turn_that_the_template_ends_otherwise_is_refused(packable: Policy) -> None:
    packable.chat.end_ids = frozenset({0})
    verdict = look(packable, packed=True, engine=True)
    assert verdict.kind == "refused"
    assert "'<|end|>', which is no end token" in verdict.reason
    assert "trainer, model, packed" not in found(verdict)  # nothing expensive follows


def test_other_text_than_the_template_renders_is_refused(packable: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = packable.chat.encode_text
    monkeypatch.setattr(packable.chat, "encode_text", lambda text: plain(text.replace("  ", " ")))
    verdict = look(packable, packed=True, engine=True)
    assert verdict.kind == "refused"
    assert "becomes other text than the template renders" in verdict.reason


def test_a_model_without_a_copy_is_checked_at_short_lengths(packable: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(policy: Policy, longest: int | None) -> Twin:
        raise ConfigError("no small copy")

    monkeypatch.setattr("draco.run.conformance.examine.Twin", none)
    verdict = look(packable, packed=True, engine=True)
    assert verdict.kind == "packed"
    assert found(verdict)["copy"] is None


def test_of_a_sharded_policy_the_copy_is_checked() -> None:
    policy = Policy(TINY, sharded=True)
    verdict = look(policy, packed=True, engine=False)
    assert verdict.kind == "packed"
    assert found(verdict)["model"] is None
    assert found(verdict)["trainer, copy, packed"] is True
    assert all(p.is_meta for p in policy.model.get_base_model().parameters() if not p.requires_grad)


# --- what follows from it ---------------------------------------------------------------------------------------------


def given(monkeypatch: pytest.MonkeyPatch, verdict: Verdict) -> list[dict[str, Any]]:
    """`examine` gives this verdict; its calls are recorded."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(check, "examine", lambda policy, **how: calls.append(how) or verdict)
    return calls


def test_a_module_keeps_to_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    module = prepared(tiny_policy)
    assert module.packed
    given(monkeypatch, Verdict("unpacked", "it differs", False, ()))
    settle(module, engine=True)
    assert not module.packed
    assert module.update_options.packing == "off"
    assert not decodes_ragged(module.policy.model)


def test_a_refusal_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    module = prepared(tiny_policy)
    given(monkeypatch, Verdict("refused", "the update differs", False, ()))
    with pytest.raises(ConfigError, match=r"would not train as it is served: the update differs; draco check"):
        settle(module, engine=True)


def test_an_equal_model_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = given(monkeypatch, Verdict("packed", "", True, (Finding("template", True, "system"),)))
    first = conform(tiny_policy(), packed=True, engine=True)
    assert conform(tiny_policy(), packed=True, engine=True) == first
    assert len(calls) == 1
    assert conform(tiny_policy(), packed=True, engine=True, fresh=True) == first
    assert len(calls) == 2


@pytest.mark.parametrize(
    "other",
    [
        {"rank": 8}, {"targets": ["q_proj"]}, {"gradient_checkpointing": True}, {"dtype": "bfloat16"},
        {"chat_template": "other.jinja"}, {"template_kwargs": {"word": "x"}},
    ],
)  # fmt: skip
def test_another_model_is_looked_at_anew(
    other: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = given(monkeypatch, Verdict("packed", "", True, ()))
    template = Path(str(files("draco.policy") / "tiny" / "chat_template.jinja")).read_text()
    (tmp_path / "t.jinja").write_text("{{ word }}" + template)
    (tmp_path / "other.jinja").write_text("{# another #}" + template)
    same = {"chat_template": str(tmp_path / "t.jinja")}
    if "chat_template" in other:
        other = {"chat_template": str(tmp_path / "other.jinja")}
    conform(Policy(TINY, **same), packed=True, engine=True)
    conform(Policy(TINY, **same | other), packed=True, engine=True)
    assert len(calls) == 2
    conform(Policy(TINY, **same), packed=False, engine=True)
    conform(Policy(TINY, **same), packed=True, engine=False)
    assert len(calls) == 4


def test_a_refusal_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = given(monkeypatch, Verdict("refused", "no", False, ()))
    for _ in range(2):
        conform(tiny_policy(), packed=True, engine=True)
    assert len(calls) == 2


def test_a_broken_or_missing_cache_costs_a_check_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = given(monkeypatch, Verdict("packed", "", True, ()))
    conform(tiny_policy(), packed=True, engine=True)
    (file,) = check.cache_folder().iterdir()
    for broken in ("", "[1]", '{"kind": "packed"}'):
        file.write_text(broken)
        conform(tiny_policy(), packed=True, engine=True)
    assert len(calls) == 4
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DRACO_CACHE", str(tmp_path / "file"))
    conform(tiny_policy(), packed=True, engine=True)
    assert len(calls) == 5


# --- the command ------------------------------------------------------------------------------------------------------


def test_draco_check_packed(capsys: pytest.CaptureFixture[str]) -> None:
    assert draco(["check", "policy=tiny", "json=true"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "packed"
    assert draco(["check", "policy=tiny", "update.packing=off"]) == 0
    assert "unpacked" in capsys.readouterr().out


def test_draco_check_of_a_family(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(tmp_path / "m", "qwen3_5", num_hidden_layers=2)
    assert draco(["check", "policy=hf", f"policy.path={folder}", "policy.dtype=float32", "json=true"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["kind"] == "unpacked"
    assert "linear_attention" in said["reason"]


def test_draco_check_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert draco(["check", "policy=hf", f"policy.path={tmp_path / 'nothing'}"]) == 2
    assert "could not be loaded" in " ".join(capsys.readouterr().out.split())
    assert draco(["check", "policy=none"]) == 2
