"""Rows of different lengths in one forward pass: the new tokens of all rows packed behind one another, no padding.

To the model all new tokens are one packed row [1, N], so embeddings, norms, projections and feed-forward layers see no
padding; position ids say where each token stands in its own row. Only attention knows the rows: each row's keys and
values lie in a slab of their own. Rows with one new token attend together; a row with a chunk (prompt, observation)
attends by itself.

Registered with transformers' public `AttentionInterface`, under the name `draco_ragged`, and used while sampling only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import sdpa_mask

from draco.policy.attention import leaks_across_rows
from draco.policy.structure import base_model, evaluating

__all__ = ["RaggedBatch", "RaggedCache", "advance_one_by_one", "decodes_ragged", "ragged_attention"]

log = logging.getLogger("draco")

_NAME = "draco_ragged"
_tried: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()  #: models and the result of their trial


@dataclass(slots=True)
class RaggedBatch:
    """The new tokens of one forward pass: those of `slots[i]` are its row's `starts[i]` … `starts[i] + counts[i] − 1`.

    Rows with a single token come first.

    Args:
        slots: row of the cache, one an entry, no row twice.
        starts: tokens that the row has in the cache already.
        counts: new tokens, ≥ 1.
        device: where the model runs.
    """

    slots: Sequence[int]
    starts: Sequence[int]
    counts: Sequence[int]
    device: torch.device
    rows: Tensor = field(init=False)  #: [N] slot of every token
    positions: Tensor = field(init=False)  #: [N] place of every token in its row
    longest: int = field(init=False)  #: tokens of the longest row afterwards
    singles: int = field(init=False)  #: entries with one token
    _masks: dict[Any, Tensor] = field(init=False, default_factory=dict)  #: made once a pass, shared by its layers

    def __post_init__(self) -> None:
        counts = list(self.counts)
        self.singles = next((i for i, n in enumerate(counts) if n > 1), len(counts))
        if any(n == 1 for n in counts[self.singles :]):
            raise ValueError("rows with one new token must stand before those with several")
        places: list[int] = []
        rows: list[int] = []
        for slot, start, n in zip(self.slots, self.starts, counts, strict=True):
            rows += [slot] * n
            places += range(start, start + n)
        self.longest = max(places) + 1
        self.rows = torch.tensor(rows, device=self.device)
        self.positions = torch.tensor(places, device=self.device)

    @property
    def ends(self) -> Tensor:
        """[entries] index of each entry's last token in the packed row."""
        return torch.tensor(self.counts, device=self.device).cumsum(0) - 1

    def inputs(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Arguments of the model's forward pass besides cache and `logits_to_keep`."""
        return {
            "input_ids": torch.tensor([tokens], device=self.device),
            "position_ids": self.positions.unsqueeze(0),
            # A 4-D mask is passed through as it is: no dense mask is built.
            "attention_mask": torch.empty(1, 1, 0, 0, device=self.device),
            "ragged": self,
        }

    def mask(self, slots: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """[slots, 1, 1, longest], 0 where a row with a single new token may look and −inf elsewhere.

        Slots that are not asked see their first place, so that nothing is NaN.
        """
        key = (slots, window, dtype)
        if key not in self._masks:
            last = torch.zeros(slots, dtype=torch.long, device=self.device)
            last[self.rows[: self.singles]] = self.positions[: self.singles]
            places = torch.arange(self.longest, device=self.device)
            seen = places <= last.unsqueeze(1)
            if window is not None:
                seen &= places > last.unsqueeze(1) - window
            mask = torch.zeros(slots, self.longest, dtype=dtype, device=self.device)
            self._masks[key] = mask.masked_fill_(~seen, float("-inf"))[:, None, None]
        return self._masks[key]

    def band(self, start: int, stop: int, window: int | None) -> Tensor:
        """[stop − start, stop] bool: the token at place i of a row sees the places up to i, in its window."""
        key = (start, stop, window)
        if key not in self._masks:
            places = torch.arange(stop, device=self.device)
            distance = places[start:].unsqueeze(1) - places
            seen = distance >= 0
            self._masks[key] = seen if window is None else seen & (distance < window)
        return self._masks[key]


class RaggedCache(DynamicCache):
    """Keys and values of rows of different lengths: a layer is a slab [slots, heads, capacity, head_dim].

    The slab doubles when full. Slots are reused: what an earlier row left behind is masked. A mask cannot hide NaN and
    infinities, so `clear` the slot of a row that had any.

    Args:
        slots: rows that live at the same time.
    """

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.slots = slots
        self.batch: RaggedBatch | None = None  #: set it before every forward pass
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store [1, heads, N, head_dim] in the rows of `batch`; the slabs themselves are returned."""
        assert self.batch is not None, "the batch is set before the forward pass"
        if layer_idx == len(self._keys):
            self._keys.append(self._slab(key_states, 256))
            self._values.append(self._slab(value_states, 256))
        for slabs, new in ((self._keys, key_states), (self._values, value_states)):
            slab = slabs[layer_idx]
            if self.batch.longest > slab.shape[2]:
                grown = self._slab(new, self.batch.longest)
                grown[:, :, : slab.shape[2]] = slab
                slabs[layer_idx] = slab = grown
            slab[self.batch.rows, :, self.batch.positions] = new[0].transpose(0, 1)
        return self._keys[layer_idx], self._values[layer_idx]

    def _slab(self, like: Tensor, length: int) -> Tensor:
        """Zeros, not garbage: a masked place still enters the product, and 0 × NaN is NaN."""
        capacity = 256
        while capacity < length:
            capacity *= 2
        return like.new_zeros((self.slots, like.shape[1], capacity, like.shape[3]))

    def clear(self, slot: int) -> None:
        """Overwrite what a row left behind."""
        for slab in (*self._keys, *self._values):
            slab[slot] = 0

    def keep(self, slots: Sequence[int]) -> None:
        """Move the rows in `slots`, in that order, to the first slots and drop all others."""
        self.slots = len(slots)
        for slabs in (self._keys, self._values):
            if slabs:
                index = torch.tensor(slots, device=slabs[0].device)
                slabs[:] = [slab.index_select(0, index) for slab in slabs]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nothing may be derived from it: positions are given."""
        return 0


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    ragged: RaggedBatch | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Queries [1, heads, N, d] on slabs [slots, key heads, capacity, d] → [1, N, heads, d]."""
    if ragged is None:
        raise RuntimeError(f"{_NAME} attends over a RaggedBatch only")
    (_, heads, total, size), (slots, key_heads) = query.shape, key.shape[:2]
    out = query.new_empty(total, heads, value.shape[-1])
    if n := ragged.singles:
        # All slots at once, so that no slab is copied; the query heads that share a key head stand in the place of a
        # sequence, so that no key is repeated.
        asked = ragged.rows[:n]
        queries = query.new_zeros(slots, heads, size)
        queries[asked] = query[0, :, :n].transpose(0, 1)
        seen = scaled_dot_product_attention(
            queries.view(slots, key_heads, heads // key_heads, size),
            key[:, :, : ragged.longest],
            value[:, :, : ragged.longest],
            attn_mask=ragged.mask(slots, sliding_window, query.dtype).expand(-1, -1, heads // key_heads, -1),
            scale=scaling,
        )
        out[:n] = seen.reshape(slots, heads, -1)[asked]
    first = n
    entries = zip(ragged.slots[n:], ragged.starts[n:], ragged.counts[n:], strict=True)
    for slot, start, count in entries:
        stop = start + count
        plain = start == 0 and (sliding_window is None or stop <= sliding_window)
        chunk = scaled_dot_product_attention(
            query[:, :, first : first + count],
            key[slot : slot + 1, :, :stop],
            value[slot : slot + 1, :, :stop],
            attn_mask=None if plain else ragged.band(start, stop, sliding_window),
            scale=scaling,
            is_causal=plain,
            enable_gqa=heads != key_heads,
        )
        out[first : first + count] = chunk[0].transpose(0, 1)
        first += count
    return out.unsqueeze(0), None


@contextmanager
def ragged_attention(model: nn.Module) -> Iterator[None]:
    """Let `model` attend over a `RaggedBatch` inside the block; afterwards it attends as before."""
    base = base_model(model)
    before = base.config._attn_implementation
    base.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        base.set_attn_implementation(before)


def decodes_ragged(model: Any) -> bool:
    """True if `model` may decode rows of different lengths in one pass; tried once a model.

    Recurrent and convolutional layers cannot. A model that passes the test of its configuration is tried on two short
    rows, whose hidden states must come out as they do alone: a new kind of layer is slow, never silently wrong.
    """
    if not isinstance(model, nn.Module):
        return False
    base = base_model(model)
    if base not in _tried:
        _tried[base] = _try(model, base)
    return _tried[base]


def advance_one_by_one(model: nn.Module) -> None:
    """Decode all rows of `model` one position at a time from now on: it was found to differ otherwise."""
    _tried[base_model(model)] = False


def _try(model: nn.Module, base: Any) -> bool:
    if (reason := leaks_across_rows(base.config)) is not None:
        log.info("rollouts advance one position at a time: %s", reason)
        return False
    if not getattr(base, "_supports_attention_backend", False):
        return False
    tolerance = 1e-3 if next(base.parameters()).dtype.itemsize >= 4 else 5e-2
    try:
        error = _error(model)
    except Exception as fault:  # a model with its own idea of a cache or of attention arguments
        log.warning("rollouts advance one position at a time: %s: %s", type(fault).__name__, fault)
        return False
    if not error <= tolerance:
        log.warning(
            "rollouts advance one position at a time: %s differs by %.2g when ragged", type(base).__name__, error
        )
        return False
    return True


@torch.inference_mode()
def _error(model: Any) -> float:
    """Relative difference of the last logits of two rows, fed in chunks and single tokens, from those alone."""
    device = next(model.parameters()).device
    rows = [list(range(1, 9)), list(range(3, 9))]
    with evaluating(model):
        alone = [model(input_ids=torch.tensor([r], device=device), use_cache=False).logits[0, -1] for r in rows]
        cache = RaggedCache(3)
        with ragged_attention(model):
            for slots, starts, counts in (((2,), (0,), (3,)), ((0, 2), (0, 3), (1, 4)), ((2, 0), (7, 1), (1, 5))):
                batch = cache.batch = RaggedBatch(slots, starts, counts, device)
                tokens = [
                    token
                    for slot, start, n in zip(slots, starts, counts, strict=True)
                    for token in rows[0 if slot == 2 else 1][start : start + n]
                ]
                logits = model(
                    **batch.inputs(tokens), past_key_values=cache, use_cache=True, logits_to_keep=batch.ends
                ).logits[0]
    expected = torch.stack(alone).float()
    return float((logits.float() - expected).norm() / expected.norm())


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, sdpa_mask)
