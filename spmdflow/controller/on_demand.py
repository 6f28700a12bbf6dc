"""Calls that wait until something reads what they compute, such as the reference's log-probs.

A method with `on_demand=True` (`@register`) is called as any other. If the settings say that
something reads its columns, it runs at once. Otherwise the call is postponed, and its model is not
even built. The first call that needs one of its columns, or the first script line that looks at
one, makes both. A method of this package that reads a column only if it is there (`optional`) does
not need it: what it does with it would be a setting that counts as a reader here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from spmdflow.config.guard import DEFAULT_GUARDS, guard_of
from spmdflow.config.leaf import parts_of
from spmdflow.config.objective import AdvantageConfig, PolicyLossConfig
from spmdflow.config.schema import ALWAYS, ReferenceConfig
from spmdflow.controller.assignment import Target
from spmdflow.controller.batch import Batch
from spmdflow.controller.planning import Method, columns_read
from spmdflow.controller.result import ColumnRef, PostponedRef, PostponedRows, Ref, SourceRows
from spmdflow.data.row_id import Ids
from spmdflow.objectives.estimator import ESTIMATORS
from spmdflow.worker_api.register import MethodSpec, registered_methods
from spmdflow.worker_api.worker import Worker

logger = logging.getLogger(__name__)

REF_LOG_PROBS = "ref_log_probs"
KL_METRICS = ("actor/reference_kl", "actor/reference_kl_per_response")
"""Metrics that an update or the advantages report if there are ref_log_probs."""


def readers_of_ref_log_probs(cfg: Any) -> list[str]:
    """Return the settings that make something read ref_log_probs; empty: none does.

    These are the weights of a KL, an estimator of advantages that reads the column, a guard of the
    user's own or run.keep_best on a metric that needs it, and reference.compute=always. The default
    guards do not count.
    """
    readers = []
    for key, loss in parts_of(cfg, PolicyLossConfig):
        if loss.kl_coef:
            readers.append(f"{key}.kl_coef")
    for key, advantage in parts_of(cfg, AdvantageConfig):
        if advantage.kl_coef:
            readers.append(f"{key}.kl_coef")
        if REF_LOG_PROBS in ESTIMATORS.find(advantage.estimator, key=f"{key}.estimator").reads:
            readers.append(f"{key}.estimator")
    for key, reference in parts_of(cfg, ReferenceConfig):
        if reference.compute == ALWAYS:
            readers.append(f"{key}.compute")
    for text in cfg.run.guards:
        if text not in DEFAULT_GUARDS and guard_of(text).name in KL_METRICS:
            readers.append("run.guards")
    if (cfg.run.keep_best or "").removeprefix("-") in KL_METRICS:
        readers.append("run.keep_best")
    return readers


def can_wait(worker_class: type[Worker], cfg: Any) -> bool:
    """Whether a model of this class need not be built before something reads its columns.

    All its methods must be on demand, and no setting of `cfg` (the script's) may need the columns.
    """
    methods = registered_methods(worker_class).values()
    if not methods or not all(spec.on_demand for spec in methods):
        return False
    return not readers_of_ref_log_probs(cfg)


class OnDemand:
    """The models of a run that are not built yet."""

    def __init__(self) -> None:
        self._unbuilt: dict[str, Callable[[], None]] = {}
        """Name of a model -> what builds it."""

    def add(self, name: str, build: Callable[[], None]) -> None:
        """Note a model that `build` builds once something needs it, and log that it waits."""
        self._unbuilt[name] = build
        logger.info(
            "%s: not built before something reads its log-probs, because no setting needs them "
            "(%s.compute=%s: build it for the metric actor/reference_kl)",
            name,
            name,
            ALWAYS,
        )

    def build(self, name: str) -> None:
        """Build a model if it is one that is not built yet."""
        if name in self._unbuilt:
            self._unbuilt.pop(name)()

    def postpones(self, target: Target, method: Method) -> bool:
        """Whether a call of this method waits until something reads its columns."""
        return target.name in self._unbuilt and method.spec.on_demand

    def postpone(
        self,
        number: int,
        target: Target,
        method: Method,
        batch: Batch,
        call: Callable[[], Any],
    ) -> Batch:
        """Return the answer of a call that is made when something first reads one of its columns.

        number: of the answer. call: makes the call, and returns its batch. The model is built
        before it, if it was not built yet. ColumnError if the batch lacks a column that the method
        reads, as where it runs.
        """

        def make() -> Mapping[str, Ref]:
            self.build(target.name)
            answer: Batch = call()
            return answer.refs

        label = f"{target.name}.{method.name}"
        refs = [batch.refs[name] for name in columns_read(method.spec, batch, label)]
        rows = PostponedRows(number, label, batch.ids, _lineage(refs), make)
        columns = {}
        for name in method.spec.writes:
            columns[name] = PostponedRef(rows, batch.ids, name)
        return Batch(batch.caller, batch.ids, batch.parents, columns, batch.shares)

    def omitted_metrics(self) -> dict[str, str]:
        """Return metric that is missing because of models that are not built -> what to change."""
        if not self._unbuilt:
            return {}
        name = next(iter(self._unbuilt))
        advice = f"nothing needs {REF_LOG_PROBS}, so {name} was not built; "
        advice += f"set {name}.compute={ALWAYS}"
        return dict.fromkeys(KL_METRICS, advice)


def make_postponed(batch: Batch, spec: MethodSpec, function: Callable[..., Any]) -> None:
    """Make the postponed calls whose columns a method or map function needs.

    spec: of the function. It needs the columns that it reads. Those that it uses if they are there
    (`optional`) count only for a user's function.
    """
    names = list(spec.reads)
    if not function.__module__.startswith("spmdflow."):
        names += spec.optional
    for name in names:
        if name in batch.refs:
            batch.refs[name].resolve()


def join_or_postpone(
    columns: Mapping[str, Sequence[Ref]],
    ids: Ids,
    join: Callable[[Mapping[str, Sequence[ColumnRef]], Ids], dict[str, ColumnRef]],
    next_number: Callable[[], int],
) -> dict[str, Ref]:
    """Join the parts of columns, but postpone it for a column with a postponed part.

    columns: name -> its parts in order. ids: of the rows of all parts in the result. join: joins
    columns of which no part is postponed. next_number: of the caller.
    """
    refs: dict[str, Ref] = {}
    there = {}
    for name, parts in columns.items():
        if not any(part.is_postponed for part in parts):
            there[name] = [part.resolve() for part in parts]
            continue

        def make(name: str = name, parts: Sequence[Ref] = parts) -> Mapping[str, Ref]:
            return join({name: [part.resolve() for part in parts]}, ids)

        rows = PostponedRows(next_number(), parts[0].result.label, ids, _lineage(parts), make)
        refs[name] = PostponedRef(rows, ids, name)
    return refs | join(there, ids)


def _lineage(refs: Iterable[Ref]) -> frozenset[int]:
    """Return the numbers of all results that these columns were made from."""
    lineage: frozenset[int] = frozenset()
    for ref in refs:
        if not isinstance(ref.result, SourceRows):
            lineage |= ref.result.lineage
    return lineage
