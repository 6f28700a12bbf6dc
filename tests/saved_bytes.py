"""Memory of the tensors that a forward saves for its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def record_saved_bytes(counts: Callable[[Tensor], bool]) -> Iterator[dict[int, int]]:
    """Yield a table that is filled inside the block: address of a storage -> its bytes.

    counts: whether a saved tensor counts. A storage that several tensors share is there once.
    """
    num_bytes: dict[int, int] = {}

    def save(tensor: Tensor) -> Tensor:
        if counts(tensor):
            storage = tensor.untyped_storage()
            num_bytes[storage.data_ptr()] = storage.nbytes()
        return tensor

    def load(tensor: Tensor) -> Tensor:
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, load):
        yield num_bytes
