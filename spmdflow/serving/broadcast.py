"""`BroadcastGroup`: rank 0 of a gloo group that the workers of a server join with torch's own call.

They call `torch.distributed` with an address, a size and the group's name, as SGLang does; this end
is made by hand, so that it is reached at the address on the route to the server, and so that it is
no part of the run's own groups. Host memory only. Knows no server and no weights.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from spmdflow.errors import WeightSyncError


class BroadcastGroup:
    """A group of this process and some workers, to which it sends."""

    def __init__(self, address: str, *, size: int, name: str, seconds: float) -> None:
        """address: this host's, as the workers reach it. size: with this process.

        seconds: limit of each wait.
        """
        self._address = address
        self._size = size
        self._name = name
        self._seconds = seconds
        limit = timedelta(seconds=seconds)
        self._store = dist.TCPStore(address, 0, None, True, limit, wait_for_workers=False)
        self._group: Any = None

    @property
    def port(self) -> int:
        """Port at which the workers find the group."""
        return self._store.port

    def connect(self) -> None:
        """Connect to the workers, which connect at the same time; WeightSyncError if they don't."""
        # the keys that torch's new group has: once as its store's prefix, once as its own, then
        # the first device that gloo has
        store: dist.Store = dist.PrefixStore(self._name, self._store)
        store = dist.PrefixStore(f"{self._name}/", store)
        store = dist.PrefixStore("cpu/", store)
        gloo: Any = dist.ProcessGroupGloo  # its methods are in no stub
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=self._address)]
        options._timeout = timedelta(seconds=self._seconds)
        try:
            self._group = gloo(store, 0, self._size, options)
        except RuntimeError as err:
            raise _connection_error(f"no connection within {self._seconds:g} s") from err

    def broadcast(self, data: Tensor) -> None:
        """Send a tensor in host memory to all workers. WeightSyncError if they do not take it."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        try:
            work = self._group.broadcast([data], options)
            work.wait(timedelta(seconds=self._seconds))
        except RuntimeError as err:
            text = str(err).strip() or "no reason given"
            raise _connection_error(f"a broadcast that ended with: {text[:200]}") from err

    def close(self) -> None:
        """Close the connections."""
        self._group = None
        del self._store


def _connection_error(got: str) -> WeightSyncError:
    expected = "all workers connected and on time"
    do = "look at the server's log, or raise actor.rollout.server.transfer_seconds"
    return WeightSyncError.of("weights of a generation server", got, expected, do)
