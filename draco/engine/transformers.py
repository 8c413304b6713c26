"""The in-process engine: all rollouts of a batch decoded together, key/value cache kept across turns.

Rows advance in lockstep, one position a tick: at position t each row takes its next forced token (prompt, observation,
glue) or the token just sampled. So there is no padding, no attention mask and no re-prefill, and a row that ends is
dropped from the batch. An environment that blocks is stepped on worker threads; the batch waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draco.agent import Rollout
from draco.engine.base import Engine
from draco.engine.cache import select_rows, slab_cache
from draco.errors import ConfigError
from draco.types import Termination

if TYPE_CHECKING:
    from draco.policy import Policy

__all__ = ["TransformersEngine"]


class TransformersEngine(Engine):
    """Decodes in the trainer's process and on its thread.

    Args:
        max_batch: rollouts decoded together; further ones wait.
        env_threads: worker threads that step environments; 0 steps them on the caller's thread.
        threads: torch's CPU threads while generating; None leaves them. One token a row is too little work for several
            threads when the model is small, and judging goes on meanwhile.
        max_mismatch: see `Engine`.
    """

    def __init__(
        self,
        max_batch: int = 256,
        env_threads: int = 0,
        threads: int | None = None,
        max_mismatch: float | None = None,
    ) -> None:
        if max_batch < 1:
            raise ConfigError(f"engine.max_batch is {max_batch}; expected an integer ≥ 1")
        self.max_batch, self.threads, self.max_mismatch = max_batch, threads, max_mismatch
        self._pool = ThreadPoolExecutor(env_threads) if env_threads else None

    def run(self, policy: Policy, rollouts: Sequence[Rollout], *, temperature: float) -> Iterator[Rollout]:
        """Yield each rollout as it ends. `temperature` > 0, or 0 for greedy decoding."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads or before)
        try:
            for start in range(0, len(rollouts), self.max_batch):
                yield from self._lockstep(policy, list(rollouts[start : start + self.max_batch]), temperature)
        finally:
            torch.set_num_threads(before)

    @torch.inference_mode()
    def _lockstep(self, policy: Policy, rows: list[Rollout], temperature: float) -> Iterator[Rollout]:
        model, device = policy.model, policy.device
        cache = slab_cache(model.config)
        with policy.sampling():
            ready = min(len(r.token_ids) for r in rows)
            inputs = [r.token_ids[:ready] for r in rows]
            position = ready
            while rows:
                logits = model(
                    input_ids=torch.tensor(inputs, device=device),
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                ).logits[:, -1]
                self._sample(rows, position, logits, temperature)
                alive = [i for i, r in enumerate(rows) if r.termination is None]
                if len(alive) < len(rows):
                    ended = [r for r in rows if r.termination is not None]
                    rows = [rows[i] for i in alive]
                    if rows:
                        select_rows(cache, alive, device)
                    yield from ended
                inputs = [[r.token_ids[position]] for r in rows]
                position += 1

    def _sample(self, rows: list[Rollout], position: int, logits: Tensor, temperature: float) -> None:
        """Give a token to every row that has none at `position`, then let turns that ended run their environment."""
        for row in rows:
            if row.overdue():
                row.end(Termination.DEADLINE)
        due = [i for i, r in enumerate(rows) if len(r.token_ids) == position and r.termination is None]
        if not due:
            return
        if len(due) < len(rows):
            logits = logits[torch.tensor(due, device=logits.device)]
        uniforms = [rows[i].uniform() for i in due]
        tokens, logprobs = sample(logits, uniforms, temperature)
        finished = []
        for i, token, logprob in zip(due, tokens, logprobs, strict=True):
            if not math.isfinite(logprob):
                rows[i].end(Termination.ENGINE_ERROR, "the model returned non-finite logits")
            elif rows[i].push(token, logprob):
                finished.append(rows[i])
        if self._pool is None or len(finished) < 2:
            for row in finished:
                row.finish_turn()
        else:
            list(self._pool.map(Rollout.finish_turn, finished))


def sample(logits: Tensor, uniforms: Sequence[float], temperature: float) -> tuple[list[int], list[float]]:
    """Inverse-CDF sampling, one uniform number a row.

    Args:
        logits: [B, V].
        uniforms: B numbers in [0, 1).
        temperature: divides the logits; 0 means greedy.

    Returns:
        Token ids and their log-probabilities at the sampling temperature (at temperature 1 for greedy).
    """
    scaled = logits.float() if temperature == 0 else logits.float() / temperature
    logprobs = scaled.log_softmax(-1)
    if temperature == 0:
        tokens = logprobs.argmax(-1)
    else:
        cdf = logprobs.double().exp().cumsum(-1)
        target = torch.tensor(uniforms, dtype=torch.float64, device=logits.device).unsqueeze(1) * cdf[:, -1:]
        tokens = torch.searchsorted(cdf, target, right=True).squeeze(1).clamp_(max=logits.shape[-1] - 1)
    return tokens.tolist(), logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1).tolist()
