"""Every error a user can meet, as one tree. Each message: what it got and expected, what to do.

`ConfigError.of(key, got, expected, do)` writes a message of the usual form; where one of the parts
needs a sentence of its own, the message is written out in full.

SpmdflowError
|-- ConfigError       a setting, size or placement that cannot work
|-- DataError         an input file or row that cannot be read
|-- ColumnError       a column is missing, there twice, or of the wrong shape
|-- RowError          row ids or row counts that do not fit together
|-- PlanError         a script or a transfer that cannot be planned, or a plan that is wrong
|-- ProtocolError     a worker method or transfer protocol is used wrongly
|-- TransferError     bytes that did not arrive as planned
|-- MessageError      a command or reply that is too large or not plain data
|-- RewardError       a reward function raised, hung or returned an invalid value
|-- WeightSyncError   rollout weights differ from the trainer's
|-- GuardError        a condition of run.guards that ends the run
|-- CheckpointError   a checkpoint that is missing, damaged or from another layout or program
|   `-- ReadError     a file that the file system does not give now (EIO, ESTALE, rights)
|-- DeadlineError     a wait that reached its limit
`-- RunFailed         a rank failed; carries the first cause
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self


class SpmdflowError(Exception):
    """Root of the tree: `except SpmdflowError` catches every error that spmdflow raises."""

    @classmethod
    def of(cls, where: object, got: object, expected: object, do: str) -> Self:
        """The error "where: got ..., expected ...; do".

            raise ConfigError.of(key, repr(text), "a number above 0", f"set {key}=1")

        where: the setting, file or call, as the user writes it. got: shown as it is; write
        repr(text) for what a user typed. do: what to change, as an order.
        """
        return cls(f"{where}: got {got}, expected {expected}; {do}")


class ConfigError(SpmdflowError):
    """A setting, size or placement that cannot work."""


class DataError(SpmdflowError):
    """An input file or row that cannot be read; names file and line."""


class ColumnError(SpmdflowError):
    """A column of a batch is missing, there twice, or of the wrong shape."""


class RowError(SpmdflowError):
    """Row ids or row counts that do not fit together; names both numbers."""


class PlanError(SpmdflowError):
    """A script or a transfer that cannot be planned, or a plan that fails its checks."""


class ProtocolError(SpmdflowError):
    """A worker method or a transfer protocol is used wrongly."""


class TransferError(SpmdflowError):
    """Bytes that did not arrive as planned; names the edge and both numbers."""


class MessageError(SpmdflowError):
    """A command or reply that is too large, or not plain data."""


class RewardError(SpmdflowError):
    """A reward function raised, hung or returned an invalid value; names the sample."""


class WeightSyncError(SpmdflowError):
    """Rollout weights differ from the trainer's; names the tensor."""


class GuardError(SpmdflowError):
    """A condition of run.guards that ends the run; names the metric, its limit, what to look at."""


class CheckpointError(SpmdflowError):
    """A checkpoint that is missing, damaged, or written by another layout or program."""


class ReadError(CheckpointError):
    """A file that the file system does not give now (EIO, ESTALE, rights): it may be whole."""


class DeadlineError(SpmdflowError):
    """A wait that reached its limit; names what was waited for and the setting."""


class RunFailed(SpmdflowError):
    """A rank failed and the run ends; names rank, role, method and cause, as failure.json does."""

    def __init__(self, message: str, record: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.record = dict(record or {})
        """The content of failure.json: rank, role, method, call, kind, cause, traceback, time."""
