"""The receiving end in a worker of another program's vLLM, and its registration with vLLM.

`register` is an entry point of the package (vllm.general_plugins): a vLLM with spmdflow installed
beside it takes `--weight-transfer-config '{"backend": "spmdflow"}'`. It loads whole tensors as a
checkpoint is loaded, then hashes what its forward reads, and tells both sides.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from spmdflow.errors import ConfigError
from spmdflow.hybrid_engine.sync import compare_hashes
from spmdflow.serving.backend import ServedModel, check_reload, register_backend
from spmdflow.serving.connection import (
    BACKEND,
    DTYPES,
    Connection,
    check_model,
    header_of,
    packed_hashes,
    unpacked_hashes,
    verdict_of,
)

logger = logging.getLogger(__name__)


def register() -> None:
    """Make the backend known to vLLM in this process.

    A vLLM without the interface is warned about and otherwise left alone: it may serve something
    that never updates.
    """
    try:
        register_backend(BACKEND, OutsideReceiver)
    except ConfigError as err:
        logger.warning("no weight-transfer backend %s: %s", BACKEND, err)


class OutsideReceiver:
    """One worker's end; see serving.backend.Receiver."""

    def __init__(self, facts: Mapping[str, Any], target: ServedModel) -> None:
        """facts: a Connection's. Waits for the trainer; ConfigError if the models differ."""
        check_reload()
        self._target = target
        self._connection = Connection(**facts)
        check_model(self._connection, target.architecture())
        if target.dtype not in DTYPES:
            got = f"a vLLM model in {target.dtype}"
            do = "serve it with --dtype bfloat16"
            raise ConfigError.of("weight transfer", got, f"one of {DTYPES}", do)
        self._rank = self._connection.workers[target.place]
        self._wire = self._connection.join(self._rank)
        precision = torch.tensor([DTYPES.index(target.dtype)])
        self._wire.share(precision, self._connection.workers[0])
        self._tensors = self._connection.tensors(self._rank, self._wire, target.dtype)
        self._header = header_of(self._connection)

    def start(self) -> None:
        """An update begins."""
        self._target.start_reload()

    def receive(self, facts: Mapping[str, Any]) -> None:
        """Load what the trainer sends; receives all of it even if loading fails."""
        self._wire.share(self._header, self._connection.training.ranks[0])
        tensors = self._tensors.run(())
        try:
            self._target.load_chunk(tensors)
        finally:
            for _ in tensors:
                pass

    def finish(self) -> None:
        """Use the weights. WeightSyncError names the first tensor that is not the trainer's."""
        connection = self._connection
        verdict = verdict_of(self._connection)
        version, verify = self._header[:2].tolist()
        found: dict[str, int] = {}
        try:
            self._target.finish_reload()
            if verify:
                found = self._target.hashes(connection.model)
                verdict[1:] = packed_hashes(connection, found)
            verdict[0] = 1
        finally:  # the trainer waits for it
            self._wire.share(verdict.clone(), connection.workers[0])
        if verify:
            compare_hashes(unpacked_hashes(connection, self._header[2:]), found, version)

    def close(self) -> None:
        """Close the connection to the trainer."""
        del self._wire, self._tensors
