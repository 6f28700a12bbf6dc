"""Bytes that passed so far: rows between ranks, and values that came to the controller."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from spmdflow.controller.caller import Caller


@dataclass(frozen=True)
class Counters:
    """Byte counters at one moment."""

    bytes: int = 0
    planned_bytes: int = 0
    header_bytes: int = 0
    tensor_bytes: int = 0
    fetched_bytes: int = 0

    @classmethod
    def read(cls, caller: Caller) -> Counters:
        """The counters now."""
        edges, fetched = caller.transfers.bytes, caller.fetched_bytes
        script = fetched.get("script", 0)
        shown = sum(fetched.values()) - script
        moved, planned = edges.total("moved"), edges.total("planned")
        return cls(moved, planned, edges.header_bytes, script, shown)

    def since(self, before: Counters) -> dict[str, float]:
        """What was added, as metrics."""
        prefix = dict.fromkeys(("bytes", "planned_bytes", "header_bytes"), "transfer")
        old = asdict(before)
        return {
            f"{prefix.get(name, 'controller')}/{name}": float(value - old[name])
            for name, value in asdict(self).items()
        }
