"""A key/value cache that appends in place instead of copying the whole history at every token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

__all__ = ["slab_cache"]


class _SlabLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values in a preallocated slab [B, heads, capacity, head_dim] that doubles when full.

    `DynamicLayer` concatenates at every token, which costs O(T²) memory traffic over an episode of T tokens.
    """

    _length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._slab_keys = self._allocate(key_states, 256 + key_states.shape[-2])
            self._slab_values = self._allocate(value_states, 256 + value_states.shape[-2])
            self._length = 0
        stop = self._length + key_states.shape[-2]
        if stop > self._slab_keys.shape[-2]:
            self._slab_keys = self._grow(self._slab_keys, 2 * stop)
            self._slab_values = self._grow(self._slab_values, 2 * stop)
        self._slab_keys[..., self._length : stop, :] = key_states
        self._slab_values[..., self._length : stop, :] = value_states
        self._length = stop
        return self._expose()

    @staticmethod
    def _allocate(like: Tensor, capacity: int) -> Tensor:
        return like.new_empty((*like.shape[:-2], capacity, like.shape[-1]))

    def _grow(self, slab: Tensor, capacity: int) -> Tensor:
        grown = self._allocate(slab, capacity)
        grown[..., : self._length, :] = slab[..., : self._length, :]
        return grown

    def _expose(self) -> tuple[Tensor, Tensor]:
        keys, values = self._slab_keys[..., : self._length, :], self._slab_values[..., : self._length, :]
        self.keys, self.values = keys, values
        return keys, values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only some rows of the batch."""
        if self._length:
            self._slab_keys = self._slab_keys.index_select(0, indices)
            self._slab_values = self._slab_values.index_select(0, indices)
            self._expose()


def slab_cache(config: Any) -> Any:
    """A cache for `config`'s model whose plain attention layers append in place; other kinds of layer stay."""
    cache = DynamicCache(config=config)
    layers = getattr(cache, "layers", [])
    for i, layer in enumerate(layers):
        if type(layer) is DynamicLayer:
            layers[i] = _SlabLayer()  # type: ignore[no-untyped-call]
    if not layers and getattr(cache, "layer_class_to_replicate", None) is DynamicLayer:
        cache.layer_class_to_replicate = _SlabLayer
    return cache


def select_rows(cache: Any, rows: list[int], device: torch.device) -> None:
    """Drop every row of the batch but `rows`, in that order."""
    cache.batch_select_indices(torch.tensor(rows, device=device))
