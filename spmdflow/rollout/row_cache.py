"""Rows of a KV cache of transformers: selects rows, joins those of two caches, drops unused slots.
A row can also be copied to a cache of its own, and truncated to its first tokens.

All rows end at the same slot: a row's tokens are the last ones of its slots, and padding precedes
them. A family's own masks then see the same distances as for a row alone, also those of sliding
windows. Layers of linear attention have no slots but one state for each row. Layers of other kinds
than those of `_KNOWN_LAYERS` may store what this module does not know: `can_join` is then false.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_SLOTS = {"keys": -2, "values": -2, "indexer_keys": -2}
"""Attributes of a layer with one entry for each slot -> their dimension of slots; rows are 0."""
_STATES = ("conv_states", "recurrent_states")
"""Attributes of a layer of linear attention: number of the state -> its values, rows first."""
_KNOWN_LAYERS = frozenset(
    {
        "DynamicLayer",
        "DynamicSlidingWindowLayer",
        "DynamicIndexedLayer",
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
    }
)


_WITH_ALL_SLOTS = frozenset({"DynamicLayer", "DynamicIndexedLayer"})
"""Layers that store every token of a row: no window, no state."""


def can_join(cache: Any) -> bool:
    """Whether rows of caches like this one can be joined: all its layers are known here."""
    return all(type(layer).__name__ in _KNOWN_LAYERS for layer in cache.layers)


def can_truncate(cache: Any) -> bool:
    """Whether rows of caches like this one can be truncated to fewer tokens.

    Sliding windows have dropped what would then be inside of the window, and a state of linear
    attention cannot be reversed.
    """
    return all(type(layer).__name__ in _WITH_ALL_SLOTS for layer in cache.layers)


def has_states(cache: Any) -> bool:
    """Whether a layer keeps one state for each row, as linear attention does."""
    return any(hasattr(layer, name) for layer in cache.layers for name in _STATES)


def take_row(cache: Any, row: Tensor, num_slots: int, num_tokens: int) -> Any:
    """Return a cache with a copy of one row alone, without the slots before its tokens.

    row: (1,) int64, its index. num_slots: slots of the cache. num_tokens: tokens of the row, which
    end at the last slot.
    """
    result = copy(cache)
    result.layers = [copy(layer) for layer in cache.layers]
    for layer in result.layers:
        for name in _STATES:
            if hasattr(layer, name):
                setattr(layer, name, dict(getattr(layer, name)))
    select_rows(result, row)
    drop_slots(result, num_slots, num_tokens)
    return result


def truncate_row(cache: Any, num_tokens: int) -> None:
    """Keep the first tokens of a cache that `take_row` returned. See `can_truncate`."""
    for layer in cache.layers:
        for name in _slot_names(layer):
            values = getattr(layer, name)
            setattr(layer, name, values.narrow(_SLOTS[name], 0, num_tokens))


def select_rows(cache: Any, rows: Tensor) -> None:
    """Keep these rows, in this order; a row may occur several times. rows: (n,) int64."""
    for layer in cache.layers:
        for name in _slot_names(layer):
            setattr(layer, name, getattr(layer, name).index_select(0, rows))
        for states in _state_tables(layer):
            for number, values in states.items():
                states[number] = values.index_select(0, rows)


def drop_slots(cache: Any, num_slots: int, num_remaining: int) -> None:
    """Drop the first slots of all rows, so that the last `num_remaining` of `num_slots` remain.

    A layer with a sliding window stores fewer slots, but counts all of them; its count shrinks by
    as many.
    """
    for layer in cache.layers:
        for name in _slot_names(layer):
            values = getattr(layer, name)
            stored = values.shape[_SLOTS[name]]
            unused = max(0, stored - num_remaining)
            if unused:
                last = values.narrow(_SLOTS[name], unused, stored - unused)
                setattr(layer, name, last.contiguous())
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length -= num_slots - num_remaining


def join(cache: Any, other: Any) -> None:
    """Append the rows of `other`, whose layers are the same. Fewer slots are padded with zeros."""
    for layer, added in zip(cache.layers, other.layers, strict=True):
        for name in _slot_names(layer):
            pair = (getattr(layer, name), getattr(added, name))
            num_slots = max(values.shape[_SLOTS[name]] for values in pair)
            padded = []
            for values in pair:
                missing = num_slots - values.shape[_SLOTS[name]]
                padded.append(functional.pad(values, (0, 0, missing, 0)))
            setattr(layer, name, torch.cat(padded))
        for states, more in zip(_state_tables(layer), _state_tables(added), strict=True):
            for number, values in states.items():
                states[number] = torch.cat([values, more[number]])
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = max(layer.cumulative_length, added.cumulative_length)


def _slot_names(layer: Any) -> list[str]:
    """Names of the layer's tensors with slots. Layers that have seen no token have none."""
    return [name for name in _SLOTS if isinstance(getattr(layer, name, None), Tensor)]


def _state_tables(layer: Any) -> list[dict[int, Tensor]]:
    """The layer's tables of states that have values."""
    tables = []
    for name in _STATES:
        states = getattr(layer, name, None)
        if states and all(isinstance(values, Tensor) for values in states.values()):
            tables.append(states)
    return tables
