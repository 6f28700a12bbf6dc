"""`TracedCaller`: the controller's own caller, with what a dry run must know of its calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from spmdflow.controller.batch import Batch
from spmdflow.controller.call import Target
from spmdflow.controller.caller import Caller, CallSettings
from spmdflow.controller.frame import Frame
from spmdflow.controller.result import Result
from spmdflow.controller.transfers import Transfers
from spmdflow.data.row_id import Ids
from spmdflow.plan.example import Examples
from spmdflow.plan.transport import TraceTransport
from spmdflow.transfer.register import method_spec


class UnknownMetric(KeyError):
    """A metric that the script reads and nobody has declared."""


class TracedCaller(Caller):
    """Writes down the rows of updates and the metrics that are read; `Caller` does all the work."""

    def __init__(
        self,
        transport: TraceTransport,
        transfers: Transfers,
        settings: CallSettings,
        examples: Examples,
    ) -> None:
        super().__init__(transport, transfers, settings)
        self._trace, self._examples = transport, examples
        self.batches: dict[int, tuple[Ids, Ids]] = {}
        """Row ids of the batch that each update was given, and their parents, by place."""

    def invoke(
        self, target: Target, method: str, batch: Batch | None, arguments: Mapping[str, Any]
    ) -> Batch | Result:
        """As `Caller.invoke`."""
        made = super().invoke(target, method, batch, arguments)
        if batch is not None and method_spec(target.worker_class, method).minibatches:
            label = f"{target.name}.{method}"
            order = next(o for o in reversed(self._trace.orders) if o.label == label)
            self.batches[order.place] = batch.ids, batch.parents
        return made if isinstance(made, Batch) else self._watched(made)

    def invoke_each(
        self, target: Target, method: str, items: Sequence[Any], arguments: Mapping[str, Any]
    ) -> Result:
        """As `Caller.invoke_each`."""
        return self._watched(super().invoke_each(target, method, items, arguments))

    def metrics_of(self, frames: Iterable[Frame]) -> Mapping[str, float]:
        """As `Caller.metrics_of`; the numbers are examples."""
        super().metrics_of(frames)
        return _WatchedMetrics(self._trace, self._examples)

    def _watched(self, result: Result) -> Result:
        return _WatchedResult(result, self._trace, self._examples)


class _WatchedMetrics(Mapping[str, float]):
    """Metrics that calls would have reported; those that the script reads count as used."""

    def __init__(self, transport: TraceTransport, examples: Examples) -> None:
        self._transport, self._examples = transport, examples
        self._metrics = examples.metrics()

    def __getitem__(self, key: str) -> float:
        if key not in self._metrics:
            raise UnknownMetric(key)
        if self._transport.is_looking:
            self._examples.use([key])
        return self._metrics[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._metrics)

    def __len__(self) -> int:
        return len(self._metrics)


class _WatchedResult(Result):
    """Metrics of a call; those that the script reads count as used examples."""

    def __init__(self, result: Result, transport: TraceTransport, examples: Examples) -> None:
        super().__init__(result._label, result._pending, result._ranks)
        self._transport, self._examples = transport, examples

    def metrics(self) -> dict[str, float]:
        """As `Result.metrics`."""
        metrics = super().metrics()
        self._note(*metrics)
        return metrics

    def __getitem__(self, key: str) -> float:
        metrics = super().metrics()
        if key not in metrics:
            raise UnknownMetric(key)
        self._note(key)
        return metrics[key]

    def _note(self, *names: str) -> None:
        if self._transport.is_looking:
            self._examples.use(names)
