"""Credits become micro-batches of token rows, with little or no padding.

A row is one trajectory up to its last step token. Where the model mixes tokens by attention alone, rows are packed:
they follow one another up to a token budget, and `draco.policy.attention` keeps them apart, so no pad token is
computed. Other models (hybrids with linear attention or convolutions) take one trajectory a row. Rows of similar
length then share a micro-batch and are padded on the right: in causal layers a pad cannot change what stands before
it, so no mask is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draco.core.types import Credit, Trajectory
from draco.update.options import LossOptions

__all__ = ["MicroBatch", "Row", "balance", "collate", "micro_batches", "rows_of"]

#: Largest share of pad tokens in a micro-batch of rows of different length.
MAX_PADDING = 0.02


@dataclass(frozen=True, slots=True)
class Row:
    """One trajectory with its credit."""

    trajectory: Trajectory
    step_advantages: tuple[float, ...]  #: [M] a_j for every token of step j
    weight: float = 1.0  #: factor on each of its token losses (loss.aggregation)
    old_logprobs: Tensor | None = None  #: [n] trainer log-probs at sampling time; None: the current ones, detached

    @property
    def length(self) -> int:
        """Tokens up to the last step token: what follows trains nothing."""
        return self.trajectory.steps[-1].span[1]

    @property
    def step_tokens(self) -> int:
        """n, the tokens that train."""
        return sum(j >= 0 for j in self.trajectory.step_of)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tensors of one forward pass; N step tokens in row-major order."""

    input_ids: Tensor  #: [B, T] int64; packed: B = 1, else right-padded with 0
    lengths: tuple[int, ...] | None  #: of the trajectories in a packed row; None: one trajectory a row
    predicts: Tensor  #: [N] int64 flat positions: the hidden state there predicts the step token
    targets: Tensor  #: [N] int64 step tokens
    advantages: Tensor  #: [N] float32 a_j
    weights: Tensor | None  #: [N] float32 factors on the token losses; None: 1
    engine_logprobs: Tensor  #: [N] float32, what the engine reported at sampling time
    old_logprobs: Tensor | None  #: [N] float32
    tokens: int  #: Σ of row lengths, padding excluded


def rows_of(credit: Credit, loss: LossOptions) -> list[Row]:
    """Rows of one group: the members of the judgement that have step tokens."""
    pairs = zip(credit.judgement.group.trajectories, credit.step_advantages, strict=True)
    rows = [Row(t, a) for t, a in pairs if t.steps]
    if loss.aggregation == "token_mean":
        return rows
    return [replace(r, weight=loss.token_weight(r.step_tokens)) for r in rows]


def micro_batches(rows: Sequence[Row], max_tokens: int, *, packed: bool = False) -> Iterator[tuple[Row, ...]]:
    """Split rows into micro-batches of at most `max_tokens` computed tokens (a longer row stands alone).

    The split depends on nothing but the rows and their order. Packed rows keep that order. Others are sorted by length
    (equal lengths keep their order), and a micro-batch ends where its padding would exceed `MAX_PADDING`.
    """
    batch: list[Row] = []
    tokens = 0
    for row in rows if packed else sorted(rows, key=lambda r: -r.length):
        size = tokens + row.length
        if batch and not packed:
            computed = (len(batch) + 1) * batch[0].length
            size = computed if computed - size <= MAX_PADDING * computed else max_tokens + 1
        if batch and size > max_tokens:
            yield tuple(batch)
            batch, tokens = [], 0
        batch.append(row)
        tokens += row.length
    if batch:
        yield tuple(batch)


def collate(rows: Sequence[Row], device: torch.device, *, packed: bool = False) -> MicroBatch:
    """The tensors of one micro-batch."""
    lengths = [row.length for row in rows]
    width = sum(lengths) if packed else max(lengths)
    input_ids = torch.zeros(1 if packed else len(rows), width, dtype=torch.int64)
    flat = input_ids.view(-1)
    predicts, targets, advantages, engine = [], [], [], []
    start = 0
    for i, (row, n) in enumerate(zip(rows, lengths, strict=True)):
        t = row.trajectory
        start = start if packed else i * width
        ids = torch.tensor(t.token_ids[:n])
        step_of = torch.tensor(t.step_of[:n])
        where = (step_of >= 0).nonzero().squeeze(1)
        flat[start : start + n] = ids
        predicts.append(where + (start - 1))
        targets.append(ids[where])
        advantages.append(torch.tensor(row.step_advantages, dtype=torch.float64)[step_of[where]])
        engine.append(torch.tensor(t.logprobs[:n], dtype=torch.float32)[where])
        start += n
    weights = None
    if any(row.weight != 1.0 for row in rows):
        weights = torch.cat([torch.full((len(a),), r.weight) for r, a in zip(rows, advantages, strict=True)])
    old = [row.old_logprobs for row in rows if row.old_logprobs is not None]
    if old and len(old) != len(rows):
        raise ValueError("expected old log-probs for all rows of a micro-batch or for none")
    return MicroBatch(
        input_ids=input_ids.to(device),
        lengths=tuple(lengths) if packed else None,
        predicts=torch.cat(predicts).to(device),
        targets=torch.cat(targets).to(device),
        advantages=torch.cat(advantages).float().to(device),
        weights=None if weights is None else weights.to(device),
        engine_logprobs=torch.cat(engine).to(device),
        old_logprobs=torch.cat(old).to(device) if old else None,
        tokens=sum(lengths),
    )


def balance(rows: Sequence[Row], own: Sequence[tuple[Row, ...]], count: int, limit: int) -> list[tuple[Row, ...]]:
    """A rank's rows as `count` micro-batches of similar size; some may be empty.

    All ranks run their k-th micro-batch at the same time, so the slowest rank sets the pace: largest first everywhere.

    Args:
        rows: packed rows of this rank.
        own: its own micro-batches, which are kept where an even split would exceed the limit.
        count: the largest number of micro-batches of any rank.
        limit: tokens of a micro-batch of several rows.
    """
    bins: list[list[Row]] = [[] for _ in range(count)]
    sizes = [0] * count
    for row in sorted(rows, key=lambda r: -r.length):
        lightest = sizes.index(min(sizes))
        bins[lightest].append(row)
        sizes[lightest] += row.length
    if any(len(b) > 1 and s > limit for b, s in zip(bins, sizes, strict=True)):
        bins = [list(m) for m in own] + [[] for _ in range(count - len(own))]
    return [tuple(b) for b in sorted(bins, key=lambda b: -sum(r.length for r in b))]
