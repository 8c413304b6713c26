"""The in-process engine: all rollouts of a batch decoded together, key/value cache kept across turns.

Each tick is one forward pass over the tokens that the rows have not been fed yet: for most rows the token just sampled,
for some a chunk (prompt, observation, template text). Nothing is padded and nothing is fed twice; see `ragged.py`. A
model that cannot do this (recurrent layers) advances all rows by one position a tick instead. A row that ends gives its
place to a waiting one. Environments that block are stepped on worker threads; the batch waits for them.
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

from draco.config.options import Count, Index, NonNegative, checked
from draco.core.types import Termination
from draco.rollout.engines.base import Engine, at_a_time
from draco.rollout.engines.cache import slab_cache
from draco.rollout.engines.ragged import RaggedBatch, RaggedCache, decodes_ragged, ragged_attention
from draco.rollout.rollout import Rollout

if TYPE_CHECKING:
    from draco.policy.policy import Policy

__all__ = ["TransformersEngine"]


@checked("engine")
class TransformersEngine(Engine):
    """Decodes in the trainer's process and on its thread.

    Args:
        max_batch: rollouts decoded together, and no more than their environment has places for; further ones wait.
        max_chunk_tokens: tokens of prompts and observations in one forward pass, over all rows; the rest waits for the
            next one. It bounds the memory of a pass.
        env_threads: worker threads that step environments; 0 steps them on the caller's thread.
        threads: torch's CPU threads while generating; None changes nothing. With a small model one token a row is too
            little work for several threads, and judging needs some meanwhile.
        max_mismatch: see `Engine`.
    """

    in_process = True

    def __init__(
        self,
        max_batch: Count = 256,
        max_chunk_tokens: Count = 4096,
        env_threads: Index = 0,
        threads: Count | None = None,
        max_mismatch: NonNegative | None = None,
    ) -> None:
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
        fed = [0] * len(places)  #: tokens of each place's row that the cache holds
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
            # Only until the next yield: the caller may train or judge with the model before it asks for more.
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
        room = self.max_chunk_tokens
        now: list[tuple[int, int, Rollout]] = []  #: new tokens, place
        for place, row in enumerate(places):
            if row is None:
                continue
            count = len(row.token_ids) - fed[place]
            if count > 1:
                count = min(count, room)
                room -= count
            if count:
                now.append((count, place, row))
        now.sort(key=lambda entry: entry[0] > 1)  # single tokens first
        counts, order, rows = (list(column) for column in zip(*now, strict=True))
        starts = [fed[place] for place in order]
        tokens = [
            t for n, start, row in zip(counts, starts, rows, strict=True) for t in row.token_ids[start : start + n]
        ]
        batch = RaggedBatch(order, starts, counts, policy.device)
        for count, place, _ in now:
            fed[place] += count
        due = [i for i, (_, place, row) in enumerate(now) if fed[place] == len(row.token_ids)]
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
        """At position t each row is fed its next given token or the token just sampled: no padding and no mask."""
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
                    cache.reorder_cache(torch.tensor(alive, device=device))
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
