"""The ways in which a policy gives log-probabilities: plain, as the trainer runs it, as the engine runs it.

Plain is the truth: transformers and PEFT, one row at a time, without padding, packing or cache, in eval mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from draco.core.types import Trajectory
from draco.policy.policy import Policy
from draco.policy.structure import base_model, evaluating
from draco.rollout.engines.transformers import TransformersEngine
from draco.rollout.rollout import Rollout
from draco.update.gradients import Worker
from draco.update.options import LossOptions
from draco.update.packing import Row

__all__ = ["Result", "borrowed", "difference", "gradient_difference", "plain", "sampled", "trained"]


class Result(NamedTuple):
    """Of all rows."""

    logprobs: Tensor  #: [N] of the step tokens, row after row, nats
    gradients: dict[str, Tensor]  #: of −Σ a · log p, by parameter


def plain(policy: Policy, rows: Sequence[Row], temperature: float) -> Result:
    """The model's own logits, one row at a time."""
    logprobs = []
    with _plain_attention(policy.model), policy.sampling(), torch.enable_grad():
        for row in rows:
            found = _own(policy, row.trajectory, temperature)
            weights = [row.step_advantages[j] for j in row.trajectory.step_of if j >= 0]
            (-(found * torch.tensor(weights, device=found.device)).sum()).backward()  # type: ignore[no-untyped-call]
            logprobs.append(found.detach())
    return Result(torch.cat(logprobs), _take_gradients(policy))


def _own(policy: Policy, trajectory: Trajectory, temperature: float) -> Tensor:
    """log p of the step tokens of a row, [n] float32."""
    ids = torch.tensor([trajectory.token_ids], device=policy.device)
    logits: Tensor = policy.model(input_ids=ids, use_cache=False).logits[0, :-1].float() / temperature
    every = logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
    return every[torch.tensor(trajectory.step_of[1:], device=policy.device) >= 0]


def trained(policy: Policy, rows: Sequence[Row], temperature: float, *, packed: bool) -> Result:
    """As the update runs them, in training mode; dropout of the adapter alone is off."""
    worker = Worker(
        policy, LossOptions(kl_coef=0.0), temperature=temperature, max_tokens=8192, packed=packed,
        backward=lambda loss: loss.backward(),  # type: ignore[no-untyped-call]
    )  # fmt: skip
    with ExitStack() as stack:
        stack.enter_context(evaluating(policy.model))  # gives every layer its mode back
        policy.train()
        with _without_lora_dropout(policy.model), torch.enable_grad():
            logprobs = [row.old_logprobs for row in worker.remember(rows) if row.old_logprobs is not None]
            worker.accumulate(rows)
    return Result(torch.cat(logprobs).float(), _take_gradients(policy))


def sampled(policy: Policy, rollouts: Sequence[Rollout], temperature: float, chunk: int) -> tuple[float, int]:
    """Mean |Δ log p| of the engine's tokens from plain rows, and how many tokens; the engine runs the rollouts.

    Args:
        chunk: tokens of a prompt that are fed in one pass.
    """
    engine = TransformersEngine(max_batch=max(1, len(rollouts) - 1), max_chunk_tokens=chunk)
    with torch.no_grad():
        trajectories = [r.trajectory() for r in engine.run(policy, rollouts, temperature=temperature)]
        if errors := [t.error for t in trajectories if t.error]:
            raise RuntimeError(errors[0])
        with _plain_attention(policy.model), policy.sampling():
            own = torch.cat([_own(policy, t, temperature) for t in trajectories])
    engines = [p for t in trajectories for p, j in zip(t.logprobs, t.step_of, strict=True) if j >= 0]
    return difference(torch.tensor(engines, device=own.device), own), len(own)


def difference(one: Tensor, other: Tensor) -> float:
    """Mean |Δ|, infinite where one of them is not finite."""
    value = float((one - other).abs().double().mean())
    return value if value == value else float("inf")


def gradient_difference(one: Result, other: Result) -> float:
    """‖g − h‖ / ‖h‖ over all parameters."""
    pairs = [(one.gradients.get(name), value) for name, value in other.gradients.items()]
    apart = sum(float(((0 if mine is None else mine) - value).double().square().sum()) for mine, value in pairs)
    apart += sum(float(one.gradients[n].double().square().sum()) for n in one.gradients.keys() - other.gradients.keys())
    norm = sum(float(value.double().square().sum()) for value in other.gradients.values())
    value = (apart / norm) ** 0.5 if norm else float(apart > 0)
    return value if value == value else float("inf")


def _take_gradients(policy: Policy) -> dict[str, Tensor]:
    found = {}
    for name, parameter in policy.model.named_parameters():
        if parameter.grad is not None:
            found[name], parameter.grad = parameter.grad, None
    return found


@contextmanager
def _plain_attention(model: nn.Module) -> Iterator[None]:
    """Attention as transformers has it, whatever the trainer has put in its place."""
    base = base_model(model)
    before = base.config._attn_implementation
    ours = str(before).startswith(("draco_", "flash_attention"))
    if ours:
        base.set_attn_implementation("sdpa" if getattr(base, "_supports_sdpa", False) else "eager")
    try:
        yield
    finally:
        if ours:
            base.set_attn_implementation(before)


@contextmanager
def _without_lora_dropout(model: nn.Module) -> Iterator[None]:
    layers = [
        m for layer in model.modules() if isinstance(layer, LoraLayer) for m in layer.lora_dropout.modules()
        if isinstance(m, nn.Dropout)
    ]  # fmt: skip
    rates = [layer.p for layer in layers]
    try:
        for layer in layers:
            layer.p = 0.0
        yield
    finally:
        for layer, rate in zip(layers, rates, strict=True):
            layer.p = rate


@contextmanager
def borrowed(policy: Policy, noise: float) -> Iterator[None]:
    """The adapter is no identity within; afterwards weights, mode and random streams are as before, to the bit.

    Args:
        noise: standard deviation of what is added to the matrices that a fresh adapter has at zero.
    """
    trained = {n: p for n, p in policy.model.named_parameters() if p.requires_grad}
    before = {n: p.detach().clone() for n, p in trained.items()}
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng())
        stack.enter_context(evaluating(policy.model))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in trained.values():
                if not parameter.any():
                    drawn = noise * torch.randn(parameter.shape, generator=generator)
                    parameter.copy_(drawn.to(parameter))
        try:
            yield
        finally:
            with torch.no_grad():
                for name, parameter in trained.items():
                    parameter.copy_(before[name])
                    parameter.grad = None
