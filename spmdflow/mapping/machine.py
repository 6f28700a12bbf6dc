"""`Hardware`: the rates, latencies and host costs of one kind of machine, each with its source.

One YAML file per kind of device lies in `hardware/`; `scripts/calibrate.py` writes such a file for
the machine at hand. Knows no model and no placement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from spmdflow.errors import ConfigError

FOLDER = Path(__file__).parent / "hardware"

HARDWARE = ("a100_80gb", "h100", "h200", "cpu")
"""Packaged files."""


@dataclass(frozen=True)
class Hardware:
    """Coefficients of one kind of machine. Bytes, seconds, FLOP/s; bandwidths of one direction."""

    name: str
    gpus_per_node: float
    memory_bytes: float
    usable_memory_fraction: float
    """Part of the memory that a plan may fill."""
    reserved_bytes: float
    """What the context and the communication library take from it."""
    peak_flops_bfloat16: float
    peak_flops_float32: float
    compute_efficiency: float
    """Part of the peak that a layer's matrices reach, their reads and writes counted apart; what
    calibrate.py measures includes norms and activation functions."""
    memory_bandwidth: float
    memory_efficiency: float
    kv_read_efficiency: float
    """Part of the bandwidth with which attention reads a paged KV cache."""
    link_bandwidth: float
    """Between two devices of a node, of each device."""
    link_efficiency: float
    network_bandwidth: float
    """Of a whole node: its devices share it."""
    network_efficiency: float
    collective_base_seconds: float
    link_hop_seconds: float
    network_hop_seconds: float
    host_bandwidth: float
    """Between a device and its host's memory."""
    layer_floor_seconds: float
    """The least that a decoder layer takes: its kernels' launches."""
    step_seconds: float
    """Host time of one generation step, whatever its batch."""
    sequence_step_seconds: float
    """Host time of each sequence in a generation step."""
    update_seconds: float
    """Host time of one optimizer step."""
    call_seconds: float
    """Host time of one call of a worker group."""
    sources: tuple[tuple[str, str], ...] = ()
    """(coefficient, where its value is from)."""
    cores: float = math.inf
    """Ranks of a machine that reach these rates at once; more share them. inf: devices."""

    @property
    def usable_bytes(self) -> float:
        """Bytes of one device that a plan may fill."""
        return self.memory_bytes * self.usable_memory_fraction - self.reserved_bytes

    def flops(self, dtype: str) -> float:
        """FLOP/s that large matrices of a dtype reach on one device."""
        return getattr(self, f"peak_flops_{dtype}") * self.compute_efficiency

    @property
    def memory_rate(self) -> float:
        """Bytes/s that one device reads or writes."""
        return self.memory_bandwidth * self.memory_efficiency

    @property
    def kv_rate(self) -> float:
        """Bytes/s with which one device reads its KV cache."""
        return self.memory_bandwidth * self.kv_read_efficiency

    @property
    def link_rate(self) -> float:
        """Bytes/s that one device sends inside its node."""
        return self.link_bandwidth * self.link_efficiency

    @property
    def network_rate(self) -> float:
        """Bytes/s that a node sends to other nodes."""
        return self.network_bandwidth * self.network_efficiency

    def with_node(self, gpus_per_node: int) -> Hardware:
        """The same with another number of devices a node."""
        if gpus_per_node < 1:
            raise ConfigError(
                f"hardware: got {gpus_per_node} devices a node, expected at least 1; "
                f"give the number of processes that share a machine"
            )
        return replace(self, gpus_per_node=float(gpus_per_node))


COEFFICIENTS = tuple(f.name for f in fields(Hardware) if f.name not in ("name", "sources", "cores"))
"""Names of the values of a file."""

_FRACTIONS = tuple(n for n in COEFFICIENTS if n.endswith(("_efficiency", "_fraction")))
_MAY_BE_ZERO = ("reserved_bytes", *(n for n in COEFFICIENTS if n.endswith("_seconds")))


def load_hardware(name: str | Path) -> Hardware:
    """A packaged file by name, or the file at a path. ConfigError if it cannot be used."""
    path = FOLDER / f"{name}.yaml" if str(name) in HARDWARE else Path(name)
    if not path.is_file():
        raise ConfigError(
            f"hardware: got {name}, expected one of {', '.join(HARDWARE)} or a YAML file; "
            f"write one for this machine with scripts/calibrate.py"
        )
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as err:
        raise ConfigError(
            f"hardware: got {path}, which does not read as YAML ({err}), expected name and "
            f"coefficients; fix it or write it anew with scripts/calibrate.py"
        ) from err
    return _from_content(content, path)


def _from_content(content: Any, path: Path) -> Hardware:
    keys = set(content) if isinstance(content, Mapping) else set()
    wanted = {"name", *COEFFICIENTS}
    if keys != wanted:
        raise ConfigError(
            f"hardware: got {path} without {sorted(wanted - keys) or 'nothing'} and with unknown "
            f"{sorted(map(str, keys - wanted)) or 'nothing'}, expected every coefficient once; "
            f"take {FOLDER / 'a100_80gb.yaml'} as the pattern"
        )
    for key in COEFFICIENTS:
        _check(key, content[key], path)
    values = {key: _number(content[key]["value"]) for key in COEFFICIENTS}
    sources = tuple((key, str(content[key]["source"])) for key in COEFFICIENTS)
    return Hardware(name=str(content["name"]), sources=sources, **values)


def _check(key: str, entry: Any, path: Path) -> None:
    if not isinstance(entry, Mapping) or set(entry) != {"value", "source"} or not entry["source"]:
        raise ConfigError(
            f"hardware: got {key} {entry!r} in {path}, expected {{value: ..., source: ...}}; "
            f"say where the value is from"
        )
    value = _number(entry["value"])
    too_large = key in _FRACTIONS and value > 1
    if not 0 <= value < math.inf or too_large or (value == 0 and key not in _MAY_BE_ZERO):
        raise ConfigError(
            f"hardware: got {key} {entry['value']!r} in {path}, expected a positive number"
            f"{' of at most 1' * (key in _FRACTIONS)}; correct it"
        )


def _number(value: Any) -> float:
    """A number, also one like 312e12, which YAML reads as text; nan for what is none."""
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return math.nan
