"""The place of `Worker`, `WorkerContext`, `any_layout` and the metrics before 0.2.0.

They are in `spmdflow.worker_api` now. This module goes with 0.3.0.
"""

from __future__ import annotations

from spmdflow.renamed import moved_names

_MOVED = {
    "Max": "spmdflow.worker_api.metric",
    "Mean": "spmdflow.worker_api.metric",
    "Min": "spmdflow.worker_api.metric",
    "Sum": "spmdflow.worker_api.metric",
    "Worker": "spmdflow.worker_api.worker",
    "WorkerContext": "spmdflow.worker_api.worker",
    "any_layout": "spmdflow.worker_api.worker",
}
__getattr__ = moved_names(__name__, _MOVED)
