"""Giving the memory of tensors back for a while. Knows no generators.

A storage that is resized to nothing keeps its tensors: views, addresses in Python and aliases stay
valid, and reading them is an error until the storage has its size back.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Storages:
    """The storages below some tensors, each once; freed and given back together."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        found = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
        self._storages = [(storage, storage.nbytes()) for storage in found.values()]

    @property
    def num_bytes(self) -> int:
        """Bytes held now."""
        return sum(storage.nbytes() for storage, _ in self._storages)

    def free(self) -> None:
        """Give the memory back; the values are lost."""
        for storage, _ in self._storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Have the memory again, filled with zeros (NaN in unused slots would spread)."""
        for storage, num_bytes in self._storages:
            if storage.nbytes() == num_bytes:
                continue
            storage.resize_(num_bytes)
            torch.tensor([], dtype=torch.uint8, device=storage.device).set_(storage).zero_()
