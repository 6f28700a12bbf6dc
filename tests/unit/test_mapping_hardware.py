"""Hardware files: all of them load, each value has a source, mistakes are named."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from spmdflow.errors import ConfigError
from spmdflow.mapping.machine import COEFFICIENTS, FOLDER, HARDWARE, load_hardware


@pytest.mark.parametrize("name", HARDWARE)
def test_packaged_file_loads_and_names_a_source_for_every_value(name: str) -> None:
    hardware = load_hardware(name)

    assert hardware.name == name
    assert [key for key, source in hardware.sources if len(source) < 5] == []
    assert [key for key, _ in hardware.sources] == list(COEFFICIENTS)
    assert 0 < hardware.usable_bytes < hardware.memory_bytes


def _changed(tmp_path: Path, **changes: object) -> Path:
    content = yaml.safe_load((FOLDER / "a100_80gb.yaml").read_text())
    for key, value in changes.items():
        if value is None:
            del content[key]
        else:
            content[key] = value
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step_seconds": None}, r"without \['step_seconds'\].*expected every coefficient once"),
        ({"speed": {"value": 1, "source": "x"}}, r"with unknown \['speed'\]"),
        ({"step_seconds": 3.0}, r"expected \{value: ..., source: ...\}; say where"),
        ({"step_seconds": {"value": 1.0, "source": ""}}, "say where the value is from"),
        ({"step_seconds": {"value": "fast", "source": "x"}}, "got step_seconds 'fast'"),
        ({"link_bandwidth": {"value": 0, "source": "x"}}, "expected a positive number"),
        ({"link_efficiency": {"value": 1.5, "source": "x"}}, "positive number of at most 1"),
    ],
)
def test_mistake_in_a_file_is_refused(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_hardware(_changed(tmp_path, **changes))


def test_numbers_that_yaml_reads_as_text_are_numbers(tmp_path: Path) -> None:
    path = _changed(tmp_path, network_bandwidth={"value": "25e9", "source": "x"})

    assert load_hardware(path).network_bandwidth == 25e9


def test_unknown_name_is_refused_with_the_names() -> None:
    with pytest.raises(ConfigError, match="got b100, expected one of a100_80gb, h100, h200, cpu"):
        load_hardware("b100")


def test_text_that_is_no_yaml_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("name: [")

    with pytest.raises(ConfigError, match="does not read as YAML"):
        load_hardware(path)


def test_a_scaled_coefficient_leaves_the_others() -> None:
    hardware = load_hardware("a100_80gb")

    twice = hardware.scaled("link_bandwidth", 2.0)

    changed = [k for k in COEFFICIENTS if twice.coefficients[k] != hardware.coefficients[k]]
    assert changed == ["link_bandwidth"] and twice.link_rate == 2 * hardware.link_rate
    with pytest.raises(ConfigError, match="got coefficient 'speed'"):
        hardware.scaled("speed", 1.0)


def test_a_node_has_at_least_one_device() -> None:
    assert load_hardware("a100_80gb").with_node(4).gpus_per_node == 4
    with pytest.raises(ConfigError, match="got 0 devices a node"):
        load_hardware("a100_80gb").with_node(0)
