"""`Hardware`: the rates, latencies and host costs of one kind of node, each with its source.

`hardware/` has one YAML file per kind of device. `scripts/calibrate.py` measures this node and
writes such a file. Knows no model and no placement.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from spmdflow.errors import ConfigError

FOLDER = Path(__file__).parent / "hardware"

HARDWARE = ("a100_80gb", "h100", "h200", "cpu")
"""Names of the packaged files."""
BY_DEVICE = {
    r"\bA100\b.*\b80GB\b": "a100_80gb",
    r"\bH100\b(?!.*\b(PCIe|NVL|MIG)\b)": "h100",
    r"\bH200\b(?!.*\b(NVL|MIG)\b)": "h200",
}
"""Packaged files by CUDA's device name. Variants with other memory or links do not match."""
EAGER_LAUNCH = 4.0
"""Ratio of a kernel's launch times outside and inside a CUDA graph: 10 to 15 us over 3.4. An
estimate."""
_LAYER_KERNELS = 10
"""Kernels of a decoder layer in a graph, which `layer_floor_seconds` counts."""


@dataclass(frozen=True)
class Hardware:
    """Coefficients of one kind of node. Bytes, seconds, FLOP/s; bandwidths of one direction."""

    name: str
    gpus_per_node: float
    memory_bytes: float
    usable_memory_fraction: float
    """Part of the memory that a plan may fill."""
    reserved_bytes: float
    """Memory used by the device context and the communication library."""
    peak_flops_bfloat16: float
    peak_flops_float32: float
    compute_efficiency: float
    """Part of the peak that a layer's matrix products reach, without the time of reads and writes.
    The value that calibrate.py measures includes norms and activation functions."""
    memory_bandwidth: float
    memory_efficiency: float
    kv_read_efficiency: float
    """Part of the bandwidth with which attention reads a paged KV cache."""
    link_bandwidth: float
    """Of each device, between two devices of a node."""
    link_efficiency: float
    network_bandwidth: float
    """Of a whole node; its devices share it."""
    network_efficiency: float
    collective_base_seconds: float
    link_hop_seconds: float
    network_hop_seconds: float
    host_bandwidth: float
    """Between a device and its host's memory."""
    layer_floor_seconds: float
    """Least seconds of a decoder layer: the launch overhead of its kernels in a CUDA graph."""
    step_seconds: float
    """Host time of one generation step of vLLM, independent of the batch size."""
    sequence_step_seconds: float
    """Host time of each sequence in such a step."""
    update_seconds: float
    """Host time of one optimizer step."""
    call_seconds: float
    """Host time of one call of a worker group."""
    step_gap_seconds: float = 0.0
    """Time between two generation steps in which the device waits although the host works ahead.
    Files may omit it."""
    sources: tuple[tuple[str, str], ...] = ()
    """(coefficient, where its value is from)."""
    cores: float = math.inf
    """CPU cores of a node. So many ranks reach these rates, more ranks share them; inf for GPUs."""

    @property
    def eager_layer_seconds(self) -> float:
        """`layer_floor_seconds` outside CUDA graphs; on a CPU the same."""
        return self.layer_floor_seconds * (EAGER_LAUNCH if self.cores == math.inf else 1)

    @property
    def operator_seconds(self) -> float:
        """Seconds in which Python calls one torch operator that launches a kernel."""
        return self.eager_layer_seconds / _LAYER_KERNELS

    @property
    def is_cpu(self) -> bool:
        """Whether ranks compute on CPU cores."""
        return self.name.startswith("cpu")

    @property
    def usable_bytes(self) -> float:
        """Bytes of one device that a plan may fill."""
        return self.memory_bytes * self.usable_memory_fraction - self.reserved_bytes

    def flops(self, dtype: str) -> float:
        """FLOP/s of large matrix products of this dtype on one device."""
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
        """Return the same hardware with another number of devices per node.

        Raises ConfigError if it is below 1.
        """
        if gpus_per_node < 1:
            got = f"{gpus_per_node} devices a node"
            do = "give the number of processes of a node"
            raise ConfigError.of("hardware", got, "at least 1", do)
        return replace(self, gpus_per_node=float(gpus_per_node))


OPTIONAL = ("step_gap_seconds",)
"""Names of the values that a hardware file may omit."""
_OTHERS = ("name", "sources", "cores", *OPTIONAL)
COEFFICIENTS = tuple(f.name for f in fields(Hardware) if f.name not in _OTHERS)
"""Names of the values that a hardware file must have."""

_AT_MOST_ONE = ("_efficiency", "_fraction")
_ENTRY = "{value: ..., source: ...}"


def packaged_hardware(device: str) -> str | None:
    """Return the packaged file for a device name as its driver gives it; None: there is none."""
    for pattern, name in BY_DEVICE.items():
        if re.search(pattern, device):
            return name
    return None


def load_hardware(name: str | Path) -> Hardware:
    """Return the hardware of a packaged file (a100_80gb, h100, h200, cpu) or of a file path.

    Raises ConfigError if there is no such file, if it is not YAML, if a coefficient is missing or
    unknown, or if a value is out of range.
    """
    path = FOLDER / f"{name}.yaml" if str(name) in HARDWARE else Path(name)
    if not path.is_file():
        expected = f"one of {', '.join(HARDWARE)} or a YAML file"
        do = "write one for this node with scripts/calibrate.py"
        raise ConfigError.of("hardware", name, expected, do)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as err:
        got = f"{path}, which is not valid YAML ({err})"
        do = "fix it, or write it again with scripts/calibrate.py"
        raise ConfigError.of("hardware", got, "name and coefficients", do) from err
    keys = set(content) if isinstance(content, Mapping) else set()
    missing = {"name", *COEFFICIENTS} - keys
    unknown = keys - {"name", *COEFFICIENTS, *OPTIONAL}
    if missing or unknown:
        got = f"{path} without {sorted(missing) or 'nothing'} and with unknown "
        got += f"{sorted(map(str, unknown)) or 'nothing'}"
        do = f"take {FOLDER / 'a100_80gb.yaml'} as the pattern"
        raise ConfigError.of("hardware", got, "every coefficient once", do)
    names = (*COEFFICIENTS, *(key for key in OPTIONAL if key in keys))
    values = {}
    for key in names:
        values[key] = _read_coefficient(key, content[key], path)
    sources = tuple((key, str(content[key]["source"])) for key in names)
    return Hardware(name=str(content["name"]), sources=sources, **values)


def _read_coefficient(key: str, entry: Any, path: Path) -> float:
    """Return the value of a coefficient as a float; text such as 312e12 is converted.

    Raises ConfigError unless `entry` is {value, source} with a source, and the value is a finite
    positive number: at most 1 for *_efficiency and *_fraction, and 0 only for reserved_bytes and
    *_seconds.
    """
    if not isinstance(entry, Mapping) or set(entry) != {"value", "source"} or not entry["source"]:
        got = f"{key} {entry!r} in {path}"
        raise ConfigError.of("hardware", got, _ENTRY, "say where the value is from")
    try:
        if isinstance(entry["value"], bool):
            value = math.nan
        else:
            value = float(entry["value"])
    except (TypeError, ValueError):
        value = math.nan
    most = 1.0 if key.endswith(_AT_MOST_ONE) else sys.float_info.max
    may_be_zero = key == "reserved_bytes" or key.endswith("_seconds")
    if not 0 <= value <= most or (value == 0 and not may_be_zero):
        got = f"{key} {entry['value']!r} in {path}"
        expected = f"a positive number{' of at most 1' * (most == 1)}"
        raise ConfigError.of("hardware", got, expected, "correct the value in that file")
    return value
