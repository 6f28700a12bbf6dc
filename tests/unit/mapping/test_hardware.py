"""Hardware files: all of them load, each value has a source, mistakes are named."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml
from bench._cells import scaled

from spmdflow.errors import ConfigError
from spmdflow.mapping.hardware import COEFFICIENTS, FOLDER, HARDWARE, OPTIONAL, load_hardware
from spmdflow.plan import workload
from spmdflow.plan.workload import hardware_of
from tests.policy.house import REPOSITORY


@pytest.mark.parametrize("name", HARDWARE)
def test_packaged_file_loads_and_names_a_source_for_every_value(name: str) -> None:
    hardware = load_hardware(name)

    assert hardware.name == name
    assert [key for key, source in hardware.sources if len(source) < 5] == []
    named = [key for key, _ in hardware.sources]
    assert named == [*COEFFICIENTS, *(key for key in OPTIONAL if key in named)]
    assert named[len(COEFFICIENTS) :] == [key for key in OPTIONAL if getattr(hardware, key)]
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

    with pytest.raises(ConfigError, match="is not valid YAML"):
        load_hardware(path)


def test_a_scaled_coefficient_leaves_the_others() -> None:
    hardware = load_hardware("a100_80gb")

    twice = scaled(hardware, "link_bandwidth", 2.0)

    changed = [k for k in COEFFICIENTS if getattr(twice, k) != getattr(hardware, k)]
    assert changed == ["link_bandwidth"] and twice.link_rate == 2 * hardware.link_rate
    with pytest.raises(AttributeError, match="speed"):
        scaled(hardware, "speed", 1.0)


def test_a_node_has_at_least_one_device() -> None:
    assert load_hardware("a100_80gb").with_node(4).gpus_per_node == 4
    with pytest.raises(ConfigError, match="got 0 devices a node"):
        load_hardware("a100_80gb").with_node(0)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100_80gb"),
        ("NVIDIA A100 80GB PCIe", "a100_80gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
    ],
)
def test_device_that_a_packaged_file_describes_is_found_by_what_cuda_calls_it(
    device: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload, "own_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: device)

    assert hardware_of(None).name == name


@pytest.mark.parametrize(
    "device",
    [
        "NVIDIA A100-SXM4-40GB",
        "NVIDIA A100-PCIE-40GB",
        "NVIDIA H100 PCIe",
        "NVIDIA H100 NVL",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GH200 480GB",
        "NVIDIA L4",
        "AMD Instinct MI300X",
    ],
)
def test_other_device_is_refused_with_how_to_measure_and_name_it(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload, "own_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: device)

    with pytest.raises(
        ConfigError, match=rf"got {device}, .* scripts/calibrate\.py .* run\.hardware .*--hardware"
    ):
        hardware_of(None)
    assert hardware_of("h100").name == "h100"


def test_more_ranks_of_a_machine_than_were_measured_share_its_memory() -> None:
    whole = load_hardware("cpu")
    measured = int(whole.gpus_per_node)

    memory = {
        ranks: hardware_of("cpu", ranks).memory_bytes
        for ranks in (1, measured, 2 * measured, 4 * measured)
    }

    assert memory[1] == memory[measured] == whole.memory_bytes
    assert memory[2 * measured] == whole.memory_bytes / 2
    assert memory[4 * measured] == whole.memory_bytes / 4
    assert hardware_of("cpu", world_size=2 * measured).memory_bytes == whole.memory_bytes / 2
    assert hardware_of("cpu", measured, world_size=64).memory_bytes == whole.memory_bytes
    assert hardware_of("h100", 64).memory_bytes == load_hardware("h100").memory_bytes
    with pytest.raises(ConfigError, match="got 0 devices a node"):
        hardware_of("cpu", 0)


@pytest.fixture
def calibrate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/calibrate.py."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    return importlib.import_module("calibrate")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("", "cpu_here"),
        ("--name mine", "cpu_mine"),
        ("--name cpu7", "cpu7"),
        ("--device cuda", "gpu_here"),
        ("--device cuda --name mine", "mine"),
        ("--device cuda --processes 1", "gpu_here"),
    ],
)
def test_calibrated_file_is_taken_for_the_device_that_was_measured(
    words: str,
    name: str,
    calibrate: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["calibrate.py", *words.split()])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA L4")

    arguments = calibrate._arguments()
    cpu = load_hardware("cpu")
    measured = {name: getattr(cpu, name) for name in COEFFICIENTS}
    text = calibrate.file_text(arguments, measured)
    (tmp_path / "mine.yaml").write_text(text)

    assert arguments.name == name
    assert ("h100.yaml: one process has no peer" in text) == (arguments.processes == 1)
    assert load_hardware(tmp_path / "mine.yaml").is_cpu == (arguments.device == "cpu")
    renamed = "named cpu_mine, as files of processors begin with cpu"
    assert (renamed in capsys.readouterr().err) == (name == "cpu_mine")


def test_name_of_processors_for_a_file_of_gpus_is_refused(
    calibrate: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["calibrate.py", "--device", "cuda", "--name", "cpu7"])

    with pytest.raises(SystemExit) as refused:
        calibrate._arguments()

    assert refused.value.code == 2
    assert "got --name cpu7, expected none with cpu for GPUs" in capsys.readouterr().err
