"""Compares every path of a policy with plain rows, and decides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from draco.core.errors import ConfigError, TemplateError
from draco.policy.attention import leaks_across_rows, pack_attention
from draco.policy.policy import Policy
from draco.policy.structure import base_model
from draco.rollout.engines.ragged import advance_one_by_one, decodes_ragged
from draco.run.conformance.paths import Result, borrowed, difference, gradient_difference, plain, sampled, trained
from draco.run.conformance.rows import NUMBERS, WORDS, Talk, conversations, rows_of_tokens, text
from draco.run.conformance.templates import end_tokens, round_trips
from draco.run.conformance.twin import Twin
from draco.run.conformance.verdict import BARS, COPY_BARS, Bars, Finding, Verdict
from draco.update.packing import Row

__all__ = ["examine"]

_SHORT = (12, 33, 20)  #: tokens of the trainer's rows
_LENGTHS = (12, 20, 45, 33, 70, 69, 25, 24)  #: the same for copies: both sides of every switch, two of similar length
_CHUNK = 4096  #: tokens of prompts that the engine feeds in one pass; few for copies, so that prompts are cut


@dataclass(slots=True)
class _Case:
    """A policy under test: the model itself, or its copy."""

    name: str
    policy: Policy
    ids: Sequence[int]  #: rows are made of them
    talks: Sequence[Talk]
    packed: bool
    bars: Bars
    lengths: Sequence[int] = _SHORT
    chunk: int = _CHUNK
    noise: float = 0.005  #: in the adapter; little, for a model may have many layers
    findings: list[Finding] = field(default_factory=list)
    unpacked: str = ""  #: why its rows are not packed
    refused: str = ""


def examine(
    policy: Policy, *, packed: bool, engine: bool, temperature: float = 1.0, longest: int | None = None
) -> Verdict:
    """Compare all paths with plain rows. Weights, modes and random streams are afterwards what they were.

    About 800 tokens run through the model, 130 of them with a backward pass, and 1,500 through a small copy. Only
    the copy of a sharded policy is tried.

    Args:
        policy: as it will train.
        packed: its rows shall be packed, and its attention is prepared for that.
        engine: rollouts are sampled in this process.
        temperature: of training rollouts.
        longest: tokens that no trajectory exceeds: a model is not refused for what changes beyond. None: no limit.
    """
    findings = list(_format(policy))
    refused = next((f.detail for f in findings if f.passed is False), "")
    cases: list[_Case] = []
    if not refused:
        cases = list(_cases(policy, packed, longest, findings))
    for case in cases:
        if not refused:
            _trainer(case, temperature)
        if engine and not (refused or case.refused):
            _engine(case, temperature)
        findings += case.findings
        refused = refused or case.refused
    findings.append(_share(policy.model))
    unpacked = next((c.unpacked for c in cases if c.unpacked), "" if packed else _why(policy.model))
    ragged = engine and not refused and all(decodes_ragged(c.policy.model) for c in cases)
    kind = "refused" if refused else "unpacked" if unpacked else "packed"
    return Verdict(kind, refused or unpacked, ragged, tuple(findings))  # type: ignore[arg-type]


def _format(policy: Policy) -> Iterator[Finding]:
    """End tokens and template."""
    for name, find in (("end tokens", end_tokens), ("template", round_trips)):
        try:
            yield Finding(name, True, find(policy.chat))
        except TemplateError as error:
            yield Finding(name, False, str(error))


def _cases(policy: Policy, packed: bool, longest: int | None, findings: list[Finding]) -> Iterator[_Case]:
    first = next(base_model(policy.model).parameters())
    if first.is_meta:
        findings.append(Finding("model", None, "sharded: only its small copy is tried"))
    else:
        yield _Case("model", policy, policy.chat.encode_text(text(12)), WORDS, packed, BARS[first.dtype])
    try:
        twin = Twin(policy, longest)
    except ConfigError as error:
        findings.append(Finding("copy", None, str(error)))
        return
    able = packed and pack_attention(twin.model)
    case = _Case("copy", twin, twin.numbers.ids, NUMBERS, able, COPY_BARS, _LENGTHS, chunk=16, noise=0.05)
    if packed and not able:
        case.unpacked = "its small copy differs when packed"
    yield case


def _trainer(case: _Case, temperature: float) -> None:
    """The update's forward and backward passes."""
    rows = rows_of_tokens(case.lengths, case.ids)
    name = f"trainer, {case.name}"
    with borrowed(case.policy, case.noise):
        try:
            truth = plain(case.policy, rows, temperature)
        except Exception as error:  # code of any model
            case.refused = f"its forward or backward pass fails: {_short(error)}"
            case.findings.append(Finding(name, False, case.refused))
            return
        for packed in (True, False) if case.packed else (False,):
            how = "packed" if packed else "one a row"
            passed, detail = _compare(case, rows, truth, temperature, packed)
            case.findings.append(Finding(f"{name}, {how}", passed, detail))
            if passed:
                return
            if packed:
                case.packed, case.unpacked = False, f"packed rows differ from plain ones ({detail})"
            else:
                case.refused = f"the update differs from plain transformers and PEFT ({detail})"


def _compare(case: _Case, rows: Sequence[Row], truth: Result, temperature: float, packed: bool) -> tuple[bool, str]:
    try:
        found = trained(case.policy, rows, temperature, packed=packed)
    except Exception as error:  # code of any model
        return False, _short(error)
    apart, gradients = difference(found.logprobs, truth.logprobs), gradient_difference(found, truth)
    passed = apart <= case.bars.logprobs and gradients <= case.bars.gradients
    return passed, f"{apart:.1e} nats, gradients {gradients:.1e}; {_span(rows)}"


def _span(rows: Sequence[Row]) -> str:
    lengths = [row.length for row in rows]
    return f"{len(rows)} rows of {min(lengths)} to {max(lengths)} tokens"


def _engine(case: _Case, temperature: float) -> None:
    """Rollouts in this process: all rows in one pass, or one position at a time."""
    model = case.policy.model
    name = f"engine, {case.name}"
    with borrowed(case.policy, case.noise):
        for ragged in (True, False) if decodes_ragged(model) else (False,):
            how = "all rows in one pass" if ragged else "one position at a time"
            try:
                rollouts = conversations(case.policy.chat, case.talks)
                apart, tokens = sampled(case.policy, rollouts, temperature, case.chunk)
                passed, detail = apart <= case.bars.logprobs, f"{apart:.1e} nats; {tokens} tokens sampled"
            except Exception as error:  # code of any model
                passed, detail = False, _short(error)
            case.findings.append(Finding(f"{name}, {how}", passed, detail))
            if passed:
                return
            if ragged:
                advance_one_by_one(model)
            else:
                case.refused = f"the in-process engine differs from plain rows ({detail})"


def _share(model: nn.Module) -> Finding:
    """How much of the decoder's matrices carries an adapter."""
    inside = ((n, p) for n, p in model.named_parameters() if not p.requires_grad and p.ndim >= 2)
    outside = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    head = base_model(model).get_output_embeddings()
    outside.add(id(getattr(head, "weight", None)))
    sizes = [(p.numel(), ".base_layer." in n) for n, p in inside if id(p) not in outside]
    share = sum(n for n, adapted in sizes if adapted) / max(1, sum(n for n, _ in sizes))
    rest = "" if share > 0.995 else "; the rest stays as it is (policy.targets)"
    return Finding("adapter", None, f"on {share:.0%} of the weights in matrices, embeddings and head left out{rest}")


def _why(model: nn.Module) -> str:
    """Why rows are not packed although nothing was found to differ."""
    reason = leaks_across_rows(base_model(model).config)
    return reason or "its attention cannot be replaced, its trial failed, or update.packing=off"


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
