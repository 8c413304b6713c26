"""A key/value cache that appends in place instead of copying the whole history at every token."""

from __future__ import annotations

from typing import Any

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

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep only some rows of the batch. Layers of every kind have this method; not all can select otherwise."""
        if self._length:
            self._slab_keys = self._slab_keys.index_select(0, beam_idx)
            self._slab_values = self._slab_values.index_select(0, beam_idx)
            self._expose()


def slab_cache(config: Any) -> Any:
    """A cache for `config`'s model whose plain attention layers append in place; other kinds of layer stay."""
    cache = DynamicCache(config=config)
    cache.layers = [_SlabLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]  # type: ignore[no-untyped-call]
    return cache
