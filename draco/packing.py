"""Credits → rows of tokens for the update.

A row is one trajectory up to its last step token. Rows are sorted by length and right-padded to the longest of their
micro-batch: with causal attention a pad that follows can change nothing before it, so no mask is needed and the result
is exact for every kind of layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draco.types import Credit, Trajectory

__all__ = ["MicroBatch", "Row", "collate", "plan", "rows_of"]


@dataclass(frozen=True, slots=True)
class Row:
    """One trajectory with its credit."""

    trajectory: Trajectory
    step_advantages: tuple[float, ...]  #: [M] a_j for every token of step j

    @property
    def length(self) -> int:
        """Tokens up to the last step token: what follows trains nothing."""
        return self.trajectory.steps[-1].span[1]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tensors of one forward pass; N step tokens in row-major order."""

    input_ids: Tensor  #: [B, T] int64, right-padded with 0
    predicts: (
        Tensor  #: [B, T] bool: position t is a step token's predecessor, so its hidden state predicts a step token
    )
    targets: Tensor  #: [N] int64 step tokens
    advantages: Tensor  #: [N] float32 a_j
    engine_logprobs: Tensor  #: [N] float32, what the engine reported at sampling time
    tokens: int  #: Σ of row lengths, padding excluded


def rows_of(credit: Credit) -> tuple[Row, ...]:
    """Rows of one group: the members of the judgement that have steps."""
    pairs = zip(credit.judgement.group.trajectories, credit.step_advantages, strict=True)
    return tuple(Row(t, a) for t, a in pairs if t.steps)


def plan(rows: Sequence[Row], max_tokens: int) -> Iterator[tuple[Row, ...]]:
    """Split rows into micro-batches of at most `max_tokens` padded tokens (a longer row stands alone).

    Rows of like length stand together; ties keep the order given, so the plan is deterministic.
    """
    batch: list[Row] = []
    for row in sorted(rows, key=lambda r: -r.length):
        if batch and (len(batch) + 1) * batch[0].length > max_tokens:
            yield tuple(batch)
            batch = []
        batch.append(row)
    if batch:
        yield tuple(batch)


def collate(rows: Sequence[Row], device: torch.device) -> MicroBatch:
    """Tensors of some rows."""
    width = max(row.length for row in rows)
    input_ids = torch.zeros(len(rows), width, dtype=torch.int64)
    step_of = torch.full((len(rows), width), -1, dtype=torch.int64)
    advantages: list[Tensor] = []
    engine: list[Tensor] = []
    for i, row in enumerate(rows):
        t, n = row.trajectory, row.length
        input_ids[i, :n] = torch.tensor(t.token_ids[:n])
        step_of[i, :n] = torch.tensor(t.step_of[:n])
        steps = step_of[i, :n]
        steps = steps[steps >= 0]
        advantages.append(torch.tensor(row.step_advantages, dtype=torch.float64)[steps])
        engine.append(torch.tensor(t.logprobs[:n], dtype=torch.float32)[step_of[i, :n] >= 0])
    is_step = step_of >= 0
    predicts = torch.zeros_like(is_step)
    predicts[:, :-1] = is_step[:, 1:]
    return MicroBatch(
        input_ids=input_ids.to(device),
        predicts=predicts.to(device),
        targets=input_ids[is_step].to(device),
        advantages=torch.cat(advantages).float().to(device),
        engine_logprobs=torch.cat(engine).to(device),
        tokens=sum(row.length for row in rows),
    )
