"""The receiving side in a worker of another program's vLLM, and its registration with vLLM.

`register` is an entry point of the package (vllm.general_plugins): a vLLM in whose environment
spmdflow is installed takes `--weight-transfer-config '{"backend": "spmdflow"}'`. A worker loads
whole tensors as from a checkpoint, hashes what its forward reads, and sends the hashes to the
trainer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from spmdflow.errors import ConfigError
from spmdflow.hybrid_engine.sync import compare_hashes
from spmdflow.serving import row_noise
from spmdflow.serving.backend import ServedModel, check_reload, register_backend
from spmdflow.serving.connection import (
    BACKEND,
    DTYPES,
    Connection,
    check_model,
    empty_header,
    empty_verdict,
    pack_hashes,
    unpack_hashes,
)
from spmdflow.serving.settings import is_served

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the backend with vLLM in this process, and row noise in a server of this package.

    A vLLM without the interface gets only a warning, because it may serve a model that is never
    updated.
    """
    if is_served():
        row_noise.install()
    try:
        register_backend(BACKEND, ConnectionReceiver)
    except ConfigError as err:
        logger.warning("warning: no weight-transfer backend %s: %s", BACKEND, err)


class ConnectionReceiver:
    """A worker's side of a `Connection`; see serving.backend.Receiver."""

    def __init__(self, facts: Mapping[str, Any], target: ServedModel) -> None:
        """Connect to the trainer. facts: those of a `Connection`.

        ConfigError if the two models differ, or if vLLM's dtype cannot be sent.
        """
        check_reload()
        self._target = target
        self._connection = Connection(**facts)
        check_model(self._connection, target.architecture())
        if target.dtype not in DTYPES:
            got = f"a vLLM model in {target.dtype}"
            do = "serve it with --dtype bfloat16"
            raise ConfigError.of("weight transfer", got, f"one of {DTYPES}", do)
        self._rank = self._connection.workers[target.worker_index]
        self._wire = self._connection.join(self._rank)
        precision = torch.tensor([DTYPES.index(target.dtype)])
        self._wire.share(precision, self._connection.workers[0])
        self._tensors = self._connection.tensors(self._rank, self._wire, target.dtype)
        self._header = empty_header(self._connection)

    def start(self) -> None:
        """Prepare the model for an update."""
        self._target.start_reload()

    def receive(self, facts: Mapping[str, Any]) -> None:
        """Receive the header and all tensors from the trainer, and load the tensors into the model.

        If loading fails, the remaining tensors are received all the same, then the error is raised.
        """
        self._wire.share(self._header, self._connection.training.ranks[0])
        tensors = self._tensors.run(())
        try:
            self._target.load_chunk(tensors)
        finally:
            for _ in tensors:
                pass

    def finish(self) -> None:
        """Put the weights into use, and send the verdict and the hashes to the trainer.

        The first worker's verdict counts: 1 if the weights are in use, otherwise 0. It is sent even
        after an error. If the header asks for it, the model's hashes are compared with the
        trainer's; WeightSyncError with the first tensor that differs.
        """
        connection = self._connection
        verdict = empty_verdict(self._connection)
        version, verify = self._header[:2].tolist()
        hashes: dict[str, int] = {}
        try:
            self._target.finish_reload()
            if verify:
                hashes = self._target.hashes(connection.model)
                verdict[1:] = pack_hashes(connection, hashes)
            verdict[0] = 1
        finally:  # the trainer waits for the verdict
            self._wire.share(verdict.clone(), connection.workers[0])
        if verify:
            compare_hashes(unpack_hashes(connection, self._header[2:]), hashes, version)

    def close(self) -> None:
        """Close the connection to the trainer."""
        del self._wire, self._tensors
