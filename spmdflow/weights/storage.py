"""Memory of tensors that is given back for a while. Knows no models.

A storage that is resized to nothing keeps its tensors: views, addresses in Python and aliases stay
valid, and reading them is an error until the storage has its size back.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage


class Storages:
    """The storages below some tensors, each once; freed and given back together."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        found = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
        self._storages = [(storage, storage.nbytes()) for storage in found.values()]
        self._host: list[Tensor] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes held now."""
        return sum(storage.nbytes() for storage, _ in self._storages)

    def to_host(self) -> None:
        """Free the memory and keep the values in host memory."""
        if self._host is None:
            self._host = [_bytes_of(storage).to("cpu", copy=True) for storage, _ in self._storages]
            self.free()

    def free(self) -> None:
        """Give the memory back; the values are lost, unless they are on the host."""
        for storage, _ in self._storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Take the memory again: with the values kept on the host, else filled with zeros (NaN in
        unused slots would spread)."""
        for number, (storage, num_bytes) in enumerate(self._storages):
            if storage.nbytes() == num_bytes:
                continue
            storage.resize_(num_bytes)
            if self._host is None:
                _bytes_of(storage).zero_()
            else:
                _bytes_of(storage).copy_(self._host[number])
        self._host = None


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.tensor([], dtype=torch.uint8, device=storage.device).set_(storage)
