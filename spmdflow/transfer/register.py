"""The place of `register` and `map_function` before 0.2.0.

They are in `spmdflow.worker_api.register` now. This module goes with 0.3.0.
"""

from __future__ import annotations

from spmdflow.renamed import moved_names

_MOVED = {
    "map_function": "spmdflow.worker_api.register",
    "register": "spmdflow.worker_api.register",
}
__getattr__ = moved_names(__name__, _MOVED)
