"""Device memory of tensors that can be given back and taken again while views stay valid.

The storage behind the tensors is resized to nothing, so parameters, buffers and optimizer shards
that look into it need no repair. Knows no models.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Storages:
    """The distinct storages behind some tensors; resident at first."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        found = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
        self._bytes = [_bytes_of(tensor) for tensor in found.values()]
        self._sizes = [len(view) for view in self._bytes]
        self._host: list[Tensor] | None = None
        self._resident = True

    def to_host(self) -> None:
        """Copy the contents to host memory and free the device's."""
        if self._resident:
            self._host = [view.to("cpu", copy=True) for view in self._bytes]
            self.drop()

    def drop(self) -> None:
        """Free the memory without keeping the contents."""
        if self._resident:
            self._resident = False
            for view in self._bytes:
                view.untyped_storage().resize_(0)

    def to_device(self) -> None:
        """Take the memory again: with the contents kept on the host, else zeros."""
        if self._resident:
            return
        self._resident = True
        for number, (view, size) in enumerate(zip(self._bytes, self._sizes, strict=True)):
            view.untyped_storage().resize_(size)
            if self._host is None:
                view.zero_()
            else:
                view.copy_(self._host[number])
        self._host = None


def _bytes_of(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor as bytes."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
