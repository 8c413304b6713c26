"""A family as a run trains it, against plain transformers and PEFT: nothing of draco is in the reference."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model, set_peft_model_state_dict
from support.module import prepared
from support.policies import perturb
from torch import Tensor
from transformers import AutoModelForCausalLM

from draco.core.errors import ConfigError
from draco.core.types import Trajectory
from draco.policy.policy import Policy
from draco.rollout.engines.ragged import decodes_ragged
from draco.rollout.engines.transformers import TransformersEngine
from draco.run.conformance import settle
from draco.run.conformance.rows import WORDS, conversations, rows_of_tokens, text
from draco.update.options import LossOptions
from draco.update.packing import Row

__all__ = ["Measured", "measure"]

LENGTHS = (12, 20, 45, 33, 70, 69, 25, 24)  #: of rows: both sides of every switch, and two that may share padding
TALKS = (*WORDS, *WORDS[::-1])


@dataclass(frozen=True)
class Measured:
    """What a run does with a model, and how far it is from the reference."""

    kind: str  #: packed, unpacked or refused
    reason: str  #: why refused
    ragged: bool = False  #: rollouts are decoded in one pass
    logprobs: float = 0.0  #: largest |Δ log p| of the update's rows
    gradients: float = 0.0  #: ‖Δg‖ / ‖g‖ of the update
    engine: float = 0.0  #: largest |Δ log p| of sampled tokens
    mismatch: float = 0.0  #: mean |Δ log p| of engine and trainer, over sampled tokens


def measure(folder: Path, dtype: str = "float32", **options: Any) -> Measured:
    """Load, check and run a model as a training run does; compare with a second copy of it.

    Args:
        folder: of `support.families.save`.
        options: of the policy.
    """

    def make() -> Policy:
        return Policy(str(folder), dtype=dtype, gradient_checkpointing=True, **options)  # type: ignore[arg-type]

    try:
        module = prepared(make, loss=LossOptions(kl_coef=0.0))
        settle(module, engine=True)
    except ConfigError as error:
        return Measured("refused", str(error))
    policy = module.policy
    perturb(policy, 0.05)
    rows = rows_of_tokens(LENGTHS, policy.chat.encode_text(text(12)))
    worker = module._worker()
    ours = [row.old_logprobs for row in worker.remember(rows) if row.old_logprobs is not None]
    worker.accumulate(rows)
    gradients = {n: p.grad for n, p in policy.model.named_parameters() if p.grad is not None}
    sampled = _sampled(policy)
    trainer = worker.remember([_row(t) for t in sampled])
    plain = _reference(folder, policy, dtype)
    theirs, expected = _plain(plain, rows)
    engine = torch.cat([_engine(t) for t in sampled])
    return Measured(
        "packed" if module.packed else "unpacked",
        "",
        decodes_ragged(policy.model),
        float((torch.cat(ours) - theirs).abs().max()),
        _apart(gradients, expected),
        float((engine - torch.cat([_logprobs(plain, t).detach() for t in sampled])).abs().max()),
        float((engine - torch.cat([r.old_logprobs for r in trainer if r.old_logprobs is not None])).abs().mean()),
    )


def _sampled(policy: Policy) -> list[Trajectory]:
    """Fewer places than rollouts: a place is used twice. Chunks are short: prompts are fed in parts."""
    engine = TransformersEngine(max_batch=len(TALKS) - 2, max_chunk_tokens=24)
    done = engine.run(policy, conversations(policy.chat, TALKS), temperature=1.0)
    return [rollout.trajectory() for rollout in done]


def _row(trajectory: Trajectory) -> Row:
    return Row(trajectory, (1.0,) * len(trajectory.steps))


def _engine(trajectory: Trajectory) -> Tensor:
    return torch.tensor([p for p, j in zip(trajectory.logprobs, trajectory.step_of, strict=True) if j >= 0])


def _reference(folder: Path, policy: Policy, dtype: str) -> Any:
    """Transformers and PEFT alone, with the same adapter, in eval mode."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    base.requires_grad_(False)
    lora = copy.deepcopy(policy.model.peft_config["default"])
    lora.inference_mode = False
    model = get_peft_model(base, lora)
    result = set_peft_model_state_dict(model, policy.adapter_state())
    assert not result.unexpected_keys
    return model.eval()


def _logprobs(model: Any, trajectory: Trajectory) -> Tensor:
    """log p of the step tokens of one row, alone."""
    ids = torch.tensor([trajectory.token_ids])
    every = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    own = every.gather(1, ids[0, 1:, None]).squeeze(1)
    return own[torch.tensor(trajectory.step_of[1:]) >= 0]


def _plain(model: Any, rows: Sequence[Row]) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs of all rows, and gradients of −Σ a · log p."""
    found = [_logprobs(model, row.trajectory) for row in rows]
    for row, own in zip(rows, found, strict=True):
        (-sum(row.step_advantages[j] * p for j, p in zip(_steps(row), own, strict=True))).backward()  # type: ignore[union-attr]
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return torch.cat(found).detach(), gradients


def _steps(row: Row) -> list[int]:
    return [j for j in row.trajectory.step_of if j >= 0]


def _apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    norm = sum(float(g.double().square().sum()) for g in other.values())
    return float((sum(float((one[n] - g).double().square().sum()) for n, g in other.items()) / norm) ** 0.5)
