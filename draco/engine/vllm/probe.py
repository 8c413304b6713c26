"""What a server must answer before rollouts use an adapter version: the trainer's own log-probs.

One request carries a fixed prompt. The log-probs of the prompt's tokens (always at temperature 1) and of a few sampled
ones (at the sampling temperature) are compared with a forward pass of the trainer, and with the base model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draco.engine.vllm.client import Completion
from draco.errors import EngineError
from draco.policy import Policy
from draco.types import Message

__all__ = ["SAMPLED", "Probe", "default_tolerance"]

SAMPLED = 16  #: tokens sampled after the prompt
_PROMPT = 128  #: tokens of the prompt


def default_tolerance(policy: Policy) -> float:
    """Mean |Δ log-prob| that two correct implementations stay below, nats: float32 1e-3, half precision 0.1."""
    return 1e-3 if next(policy.model.parameters()).dtype == torch.float32 else 0.1


@dataclass(slots=True)
class Probe:
    """The trainer's side of the comparison.

    Args:
        policy: with the adapter's weights.
        temperature: of sampling.
        tolerance: bar on the mean |Δ|.
    """

    policy: Policy
    temperature: float
    tolerance: float

    @property
    def prompt(self) -> tuple[int, ...]:
        """Fixed for a policy."""
        opening = (
            Message("system", "You act by code."),
            Message("user", "Send 31 to ana, then say what you did. 0 1 2"),
        )
        return self.policy.chat.prompt_ids(opening)[:_PROMPT]

    def check(self, url: str, adapter: str, trained: bool, answer: Completion, base: Completion) -> float:
        """Compare; returns the mean |Δ| over the prompt's tokens.

        Args:
            url, adapter: for the message.
            trained: some B ≠ 0.
            answer: the server's, by the adapter.
            base: the server's, by the base model, on the same prompt.

        Raises:
            EngineError: the server does not serve these weights, or not at this temperature.
        """
        ours = self._logprobs([*self.prompt, *answer.token_ids])
        count = len(self.prompt) - 1
        gap = _mean_gap(answer.prompt_logprobs, ours[1.0][:count])
        if trained and answer.prompt_logprobs == base.prompt_logprobs:
            raise EngineError(
                f"{url} answers {adapter} exactly as the base model: it loaded the adapter and applies none of it "
                "(names that do not fit the served class? vllm#39369)"
            )
        if not gap <= self.tolerance:
            raise EngineError(
                f"{url} serves other weights than the trainer holds: log-probs of {adapter} differ by {gap:.3g} nats a "
                f"token on a probe, more than engine.probe_tolerance={self.tolerance:g}; is it the same base model, "
                "dtype and adapter?"
            )
        sampled = _mean_gap(answer.logprobs, ours[self._scale][count:])
        if not sampled <= max(self.tolerance, 3 * gap):
            raw = _mean_gap(answer.logprobs, ours[1.0][count:])
            hint = "; they are those at temperature 1: start it with --logprobs-mode processed_logprobs"
            raise EngineError(
                f"{url}: log-probs of sampled tokens differ from the trainer's at temperature {self.temperature:g} by "
                f"{sampled:.3g} nats{hint if raw <= max(self.tolerance, 3 * gap) else ''}"
            )
        return gap

    @property
    def _scale(self) -> float:
        return self.temperature or 1.0  # greedy log-probs are those at temperature 1

    @torch.no_grad()
    def _logprobs(self, ids: Sequence[int]) -> dict[float, Tensor]:
        """[T − 1] log-prob of each token given those before it, by temperature."""
        row = torch.tensor([list(ids)], device=self.policy.device)
        with self.policy.sampling():
            logits = self.policy.model(input_ids=row, use_cache=False).logits[0, :-1].float()
        target = row[0, 1:, None]
        return {t: (logits / t).log_softmax(-1).gather(1, target).squeeze(1).cpu() for t in {1.0, self._scale}}


def _mean_gap(theirs: Sequence[float], ours: Tensor) -> float:
    if len(theirs) != len(ours) or not len(ours):
        raise EngineError(f"a probe came back with {len(theirs)} log-probs for {len(ours)} tokens")
    return float((torch.tensor(theirs, dtype=torch.float64) - ours.double()).abs().mean())
