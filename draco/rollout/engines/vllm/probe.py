"""What a server must answer before rollouts use an adapter version: the trainer's own log-probs.

One request carries a fixed prompt. The log-probs of the prompt's tokens (always at temperature 1) and of a few sampled
ones (at the sampling temperature) are compared with a forward pass of the trainer, and with the base model's. A server
that comes back while a batch is under way is asked about the prompt alone, from memory: the trainer's thread may be at
work on the same modules, and of a sharded policy a forward pass takes all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draco.core.errors import EngineError
from draco.core.types import Message
from draco.policy.policy import Policy
from draco.policy.sharding import whole_call
from draco.rollout.engines.vllm.client import Completion

__all__ = ["SAMPLED", "Probe", "default_tolerance"]

SAMPLED = 16  #: tokens sampled after the prompt
_PROMPT = 128  #: tokens of the prompt


def default_tolerance(policy: Policy) -> float:
    """Mean |Δ log-prob| that two correct implementations stay below, nats: float32 1e-3, half precision 0.1."""
    return 1e-3 if next(policy.model.parameters()).dtype == torch.float32 else 0.1


@dataclass(slots=True)
class Probe:
    """The trainer's side of the comparison, for one adapter version.

    Args:
        policy: with the adapter's weights.
        temperature: of sampling.
        tolerance: bar on the mean |Δ|.
    """

    policy: Policy
    temperature: float
    tolerance: float
    _known: Tensor | None = None  #: the trainer's log-probs of prompt tokens 1…

    @property
    def prompt(self) -> tuple[int, ...]:
        """Fixed for a policy."""
        opening = (
            Message("system", "You act by code."),
            Message("user", "Send 31 to ana, then say what you did. 0 1 2"),
        )
        return self.policy.chat.prompt_ids(opening)[:_PROMPT]

    @property
    def ready(self) -> bool:
        """Whether the trainer's side is known; a sharded policy has no weights at first."""
        return self._known is not None

    @torch.no_grad()
    def expect(self, sampled: Sequence[int]) -> dict[float, Tensor]:
        """[T − 1] log-prob of each token of prompt and `sampled` given those before it, by temperature.

        A forward pass: on the trainer's thread, and of a sharded policy on every rank.
        """
        prompt = self.prompt
        row = torch.tensor([[*prompt, *sampled]], device=self.policy.device)
        model = self.policy.model
        with self.policy.sampling():
            logits = whole_call(model, lambda: model(input_ids=row, use_cache=False).logits)[0, :-1].float()
        target = row[0, 1:, None]
        found = {t: (logits / t).log_softmax(-1).gather(1, target).squeeze(1).cpu() for t in {1.0, self._scale}}
        self._known = found[1.0][: len(prompt) - 1]
        return found

    def check(
        self, url: str, adapter: str, trained: bool, answer: Completion, base: Completion, ours: dict[float, Tensor]
    ) -> None:
        """Compare all.

        Args:
            url, adapter: for the message.
            trained: some B ≠ 0.
            answer: the server's, by the adapter.
            base: the server's, by the base model, on the same prompt.
            ours: what `expect` gave for the sampled tokens.

        Raises:
            EngineError: the server does not serve these weights, or not at this temperature.
        """
        gap = self.check_prompt(url, adapter, trained, answer, base)
        count = len(self.prompt) - 1
        sampled = _mean_gap(answer.logprobs, ours[self._scale][count:])
        if not sampled <= max(self.tolerance, 3 * gap):
            raw = _mean_gap(answer.logprobs, ours[1.0][count:])
            hint = "; they are those at temperature 1: start it with --logprobs-mode processed_logprobs"
            raise EngineError(
                f"{url}: log-probs of sampled tokens differ from the trainer's at temperature {self.temperature:g} by "
                f"{sampled:.3g} nats{hint if raw <= max(self.tolerance, 3 * gap) else ''}"
            )

    def check_prompt(self, url: str, adapter: str, trained: bool, answer: Completion, base: Completion) -> float:
        """Compare the prompt's tokens with what the last `expect` gave for them; see `check`. Returns the mean |Δ|."""
        assert self._known is not None
        gap = _mean_gap(answer.prompt_logprobs, self._known)
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
        return gap

    @property
    def _scale(self) -> float:
        return self.temperature or 1.0  # greedy log-probs are those at temperature 1


def _mean_gap(theirs: Sequence[float], ours: Tensor) -> float:
    if len(theirs) != len(ours) or not len(ours):
        raise EngineError(f"a probe came back with {len(theirs)} log-probs for {len(ours)} tokens")
    return float((torch.tensor(theirs, dtype=torch.float64) - ours.double()).abs().mean())
