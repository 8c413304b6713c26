"""What a server must answer before rollouts use an adapter version: the trainer's own log-probs.

One request carries a fixed prompt. The log-probs of the prompt's tokens (always at temperature 1) and of a few sampled
ones (at the sampling temperature) are compared with a forward pass of the trainer, and with the base model's. A server
that comes back while a batch is under way is asked about the prompt alone, from memory: the trainer's thread may be at
work on the same modules, and of a sharded policy a forward pass takes all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draco.core.errors import EngineError
from draco.core.types import Message
from draco.policy.policy import Policy
from draco.policy.sharding import call_with_head
from draco.rollout.engines.vllm.adapters import Adapter
from draco.rollout.engines.vllm.client import Completion

__all__ = ["SAMPLED", "AdapterCheck", "default_tolerance", "require_applied"]

SAMPLED = 16  #: tokens sampled after the prompt
_PROMPT = 128  #: tokens of the prompt
_OPENING = (
    Message("system", "You act by code."),
    Message("user", "Send 31 to ana, then say what you did. 0 1 2"),
)


def default_tolerance(policy: Policy) -> float:
    """Mean |Δ log-prob| that two correct implementations stay below, nats: float32 1e-3, half precision 0.1."""
    return 1e-3 if next(policy.model.parameters()).dtype == torch.float32 else 0.1


def require_applied(url: str, adapter: Adapter, answer: Completion, base: Completion) -> None:
    """Compare a server's answer by the adapter with its answer by the base model, on the same prompt.

    Raises:
        EngineError: they are equal, though the adapter was trained.
    """
    if adapter.trained and answer.prompt_logprobs == base.prompt_logprobs:
        raise EngineError(
            f"{url} answers {adapter.name} exactly as the base model: it loaded the adapter and applies none of it "
            "(names that do not fit the served class? vllm#39369)"
        )


class AdapterCheck:
    """The trainer's side of the comparison, for one adapter version; `tolerance` is the bar on the mean |Δ|."""

    def __init__(self, policy: Policy, temperature: float, tolerance: float) -> None:
        self.policy, self.temperature, self.tolerance = policy, temperature, tolerance
        self.prompt = policy.chat.prompt_ids(_OPENING)[:_PROMPT]
        self._scale = temperature or 1.0  # greedy log-probs are those at temperature 1
        self._known: Tensor | None = None  #: the trainer's log-probs of prompt tokens 1…

    @property
    def ready(self) -> bool:
        """Whether the trainer's side is known; a sharded policy has no weights at first."""
        return self._known is not None

    @torch.no_grad()
    def expect(self, sampled: Sequence[int]) -> dict[float, Tensor]:
        """[T − 1] log-prob of each token of prompt and `sampled` given those before it, by temperature.

        A forward pass: on the trainer's thread, and of a sharded policy on every rank.
        """
        row = torch.tensor([[*self.prompt, *sampled]], device=self.policy.device)
        model = self.policy.model
        with self.policy.sampling():
            logits = call_with_head(model, lambda: model(input_ids=row, use_cache=False).logits)[0, :-1].float()
        target = row[0, 1:, None]
        found = {t: (logits / t).log_softmax(-1).gather(1, target).squeeze(1).cpu() for t in {1.0, self._scale}}
        self._known = found[1.0][: len(self.prompt) - 1]
        return found

    def compare(self, url: str, adapter: str, answer: Completion, ours: dict[float, Tensor]) -> None:
        """Compare a server's answer with what `expect` gave for the tokens that it sampled.

        Raises:
            EngineError: the server does not serve these weights, or not at this temperature.
        """
        bar = max(self.tolerance, 3 * self.compare_prompt(url, adapter, answer))
        count = len(self.prompt) - 1
        sampled = _mean_gap(answer.logprobs, ours[self._scale][count:])
        if not sampled <= bar:
            raw = _mean_gap(answer.logprobs, ours[1.0][count:])
            hint = "; they are those at temperature 1: start it with --logprobs-mode processed_logprobs"
            raise EngineError(
                f"{url}: log-probs of sampled tokens differ from the trainer's at temperature {self.temperature:g} by "
                f"{sampled:.3g} nats{hint if raw <= bar else ''}"
            )

    def compare_prompt(self, url: str, adapter: str, answer: Completion) -> float:
        """Compare the prompt's tokens with what the last `expect` gave for them.

        Returns:
            The mean |Δ log-prob|.

        Raises:
            EngineError: the server serves other weights.
        """
        assert self._known is not None
        gap = _mean_gap(answer.prompt_logprobs, self._known)
        if not gap <= self.tolerance:
            raise EngineError(
                f"{url} serves other weights than the trainer holds: log-probs of {adapter} differ by {gap:.3g} nats a "
                f"token on a fixed prompt, more than engine.probe_tolerance={self.tolerance:g}; is it the same base "
                "model, dtype and adapter?"
            )
        return gap


def _mean_gap(theirs: Sequence[float], ours: Tensor) -> float:
    if len(theirs) != len(ours) or not len(ours):
        raise EngineError(f"a server gave {len(theirs)} log-probs for the {len(ours)} tokens of the adapter check")
    return float((torch.tensor(theirs, dtype=torch.float64) - ours.double()).abs().mean())
