"""The in-process engine: all rollouts of a batch decoded together, key/value cache kept across turns.

Every tick is one forward pass over what the rows have not been fed yet: one sampled token of most, a chunk (prompt,
observation, glue) of those that have got one. Nothing is padded and nothing is fed twice; see `ragged.py`.
Rows of a model that cannot do this (recurrent layers) advance in lockstep instead, one position a tick. A row that ends
leaves its place to a waiting one. An environment that blocks is stepped on worker threads; the batch waits for it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draco.config.checks import whole
from draco.core.types import Termination
from draco.rollout.engines.base import Engine, at_a_time
from draco.rollout.engines.cache import select_rows, slab_cache
from draco.rollout.engines.ragged import RaggedBatch, RaggedCache, decodes_ragged, ragged_attention
from draco.rollout.rollout import Rollout

if TYPE_CHECKING:
    from draco.policy.policy import Policy

__all__ = ["TransformersEngine"]


class TransformersEngine(Engine):
    """Decodes in the trainer's process and on its thread.

    Args:
        max_batch: rollouts decoded together, and no more than their environment has places for; further ones wait.
        max_chunk_tokens: tokens of prompts and observations that one forward pass takes, over all rows; the rest waits
            for the next one. It bounds the memory of a pass.
        env_threads: worker threads that step environments; 0 steps them on the caller's thread.
        threads: torch's CPU threads while generating; None leaves them. One token a row is too little work for several
            threads when the model is small, and judging goes on meanwhile.
        max_mismatch: see `Engine`.
    """

    in_process = True

    def __init__(
        self,
        max_batch: int = 256,
        max_chunk_tokens: int = 4096,
        env_threads: int = 0,
        threads: int | None = None,
        max_mismatch: float | None = None,
    ) -> None:
        whole("engine.max_batch", max_batch, 1)
        whole("engine.max_chunk_tokens", max_chunk_tokens, 1)
        self.max_batch, self.max_chunk_tokens = max_batch, max_chunk_tokens
        self.threads, self.max_mismatch = threads, max_mismatch
        self._pool = ThreadPoolExecutor(env_threads) if env_threads else None

    def run(self, policy: Policy, rollouts: Sequence[Rollout], *, temperature: float) -> Iterator[Rollout]:
        """Yield each rollout as it ends. `temperature` > 0, or 0 for greedy decoding."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads or before)
        try:
            if decodes_ragged(policy.model):
                yield from self._ragged(policy, rollouts, temperature)
            else:
                most = at_a_time(rollouts, self.max_batch)
                for start in range(0, len(rollouts), most):
                    yield from self._lockstep(policy, list(rollouts[start : start + most]), temperature)
        finally:
            torch.set_num_threads(before)

    @torch.inference_mode()
    def _ragged(self, policy: Policy, rollouts: Sequence[Rollout], temperature: float) -> Iterator[Rollout]:
        waiting = deque(rollouts)
        places: list[Rollout | None] = [None] * min(at_a_time(rollouts, self.max_batch), len(rollouts))
        fed = [0] * len(places)  #: tokens of the row in the cache
        cache = RaggedCache(len(places))
        while True:
            for place, row in enumerate(places):
                if row is None and waiting:
                    admitted = waiting.popleft()
                    admitted.start()
                    places[place], fed[place] = admitted, 0
            alive = [place for place, row in enumerate(places) if row is not None]
            if not alive:
                return
            if 2 * len(alive) <= len(places):
                cache.keep(alive)
                places, fed = [places[i] for i in alive], [fed[i] for i in alive]
            ended: list[Rollout] = []
            # Between two yields only: the caller may train or judge with the model before it asks for the next rollout.
            with ExitStack() as stack:
                stack.enter_context(policy.sampling())
                stack.enter_context(ragged_attention(policy.model))
                while not ended:
                    self._tick(policy, cache, places, fed, temperature)
                    ended = [row for row in places if row is not None and row.termination is not None]
            for place, row in enumerate(places):
                if row in ended:
                    places[place] = None
                    if row.termination is Termination.ENGINE_ERROR:
                        cache.clear(place)
            yield from ended

    def _tick(
        self, policy: Policy, cache: RaggedCache, places: list[Rollout | None], fed: list[int], temperature: float
    ) -> None:
        """One forward pass; rows that have been fed everything get a token, and their turns may end."""
        singles: list[int] = []
        chunks: list[int] = []
        room = self.max_chunk_tokens
        counts: dict[int, int] = {}
        for place, row in enumerate(places):
            if row is None:
                continue
            count = len(row.token_ids) - fed[place]
            if count > 1:
                count = min(count, room)
                room -= count
            if count:
                counts[place] = count
                (singles if count == 1 else chunks).append(place)
        order = singles + chunks
        tokens: list[int] = []
        rows: list[Rollout] = []
        for place in order:
            row = places[place]
            assert row is not None
            rows.append(row)
            tokens += row.token_ids[fed[place] : fed[place] + counts[place]]
        batch = RaggedBatch(order, [fed[p] for p in order], [counts[p] for p in order], policy.device)
        for place in order:
            fed[place] += counts[place]
        due = [i for i, place in enumerate(order) if fed[place] == len(rows[i].token_ids)]
        cache.batch = batch
        logits = policy.model(
            **batch.inputs(tokens),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=batch.ends[torch.tensor(due, device=policy.device)] if due else 1,
        ).logits[0]
        for row in places:
            if row is not None and row.overdue():
                row.end(Termination.DEADLINE)
        self._sample([rows[i] for i in due], logits, temperature)

    @torch.inference_mode()
    def _lockstep(self, policy: Policy, rows: list[Rollout], temperature: float) -> Iterator[Rollout]:
        """At position t each row takes its next forced token or the token just sampled: no padding and no mask."""
        for row in rows:
            row.start()
        model, device = policy.model, policy.device
        cache = slab_cache(model.config)
        ready = min(len(r.token_ids) for r in rows)
        inputs = [r.token_ids[:ready] for r in rows]
        position = ready
        while rows:
            with policy.sampling():
                logits = model(
                    input_ids=torch.tensor(inputs, device=device),
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                ).logits[:, -1]
            for row in rows:
                if row.overdue():
                    row.end(Termination.DEADLINE)
            due = [i for i, r in enumerate(rows) if len(r.token_ids) == position]
            if due:
                if len(due) < len(rows):
                    logits = logits[torch.tensor(due, device=device)]
                self._sample([rows[i] for i in due], logits, temperature)
            alive = [i for i, r in enumerate(rows) if r.termination is None]
            if len(alive) < len(rows):
                ended = [r for r in rows if r.termination is not None]
                rows = [rows[i] for i in alive]
                if rows:
                    select_rows(cache, alive, device)
                yield from ended
            inputs = [[r.token_ids[position]] for r in rows]
            position += 1

    def _sample(self, rows: list[Rollout], logits: Tensor, temperature: float) -> None:
        """Give every row that goes on a token from its [V] of `logits`; turns that end run their environment."""
        going = [i for i, row in enumerate(rows) if row.termination is None]
        if not going:
            return
        if len(going) < len(rows):
            rows, logits = [rows[i] for i in going], logits[torch.tensor(going, device=logits.device)]
        tokens, logprobs = sample(logits, [row.uniform() for row in rows], temperature)
        finished = []
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            if not math.isfinite(logprob):
                row.end(Termination.ENGINE_ERROR, "the model returned non-finite logits")
            elif row.push(token, logprob):
                finished.append(row)
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
