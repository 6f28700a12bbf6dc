"""Advice to install something names what PyPI has, as setup.cfg states it."""

from __future__ import annotations

from configparser import ConfigParser
from importlib import metadata
from pathlib import Path

import pytest

from spmdflow.errors import ConfigError
from spmdflow.program import check_versions, load_settings
from spmdflow.requirement import UNTESTED_VERSIONS, install_command, requirements_of

ROOT = Path(__file__).parents[2]


def extras_of_setup() -> dict[str, list[str]]:
    parser = ConfigParser()
    parser.read(ROOT / "setup.cfg")
    extras = {}
    for name, text in parser["options.extras_require"].items():
        lines = [line for line in text.split("\n") if line and not line.startswith("#")]
        extras[name] = [line.partition(";")[0] for line in lines if ";" not in line]
    return extras


@pytest.mark.parametrize("extra", [*extras_of_setup()])
def test_requirements_are_those_of_setup(extra: str) -> None:
    found = requirements_of(extra)

    def sorted_parts(texts: list[str]) -> list[tuple[str, ...]]:
        return sorted(
            tuple(sorted(text.replace("<", ",<").replace(">", ",>").split(","))) for text in texts
        )

    plain = [text for text in found if not text.startswith("triton")]
    assert sorted_parts(plain) == sorted_parts(extras_of_setup()[extra])


def test_command_quotes_each_requirement() -> None:
    command = install_command("view")

    assert command == "pip install " + " ".join(f"'{each}'" for each in requirements_of("view"))
    assert "plotly" in command and "spmdflow" not in command


def test_without_an_installation_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", absent)

    assert "the extra vllm in setup.cfg" in install_command("vllm")


def test_no_page_and_no_message_says_to_install_an_extra_by_a_name_that_pypi_lacks() -> None:
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "spmdflow").rglob("*.py")]
    for path in files:
        if path.name not in ("STATUS.md", "CHANGELOG.md"):
            assert "spmdflow[" not in path.read_text(encoding="utf-8"), path


def install(folder: Path, name: str, version: str) -> None:
    """What pip leaves of an installed package, in a folder that Python searches first."""
    record = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("name", "version", "settings"),
    [
        ("torch", "99.0.0", ()),
        ("torch", "2.10.0+cu128", ()),
        ("transformers", "4.57.0", ()),
        ("megatron-core", "0.15.0", ("actor.engine.kind=megatron",)),
        ("vllm", "0.99.0", ("actor.rollout.engine=vllm",)),
    ],
)
def test_version_that_was_never_tested_is_refused_with_its_range_and_the_way_around(
    name: str,
    version: str,
    settings: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cfg = load_settings("ppo", None, settings)
    install(tmp_path, name, version)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv(UNTESTED_VERSIONS, raising=False)

    with pytest.raises(ConfigError) as caught:
        check_versions(cfg)

    (sentence, way_around) = str(caught.value).splitlines()
    assert sentence.startswith(f"{name}: got {version}, expected ")
    assert f"pip install '{name}" in sentence
    assert (
        way_around == "or set the environment variable SPMDFLOW_UNTESTED_VERSIONS=1 to run anyway"
    )

    monkeypatch.setenv(UNTESTED_VERSIONS, "1")
    assert check_versions(cfg) == [f"warning: {sentence}"]


def test_version_of_a_package_that_the_run_does_not_use_is_no_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "megatron-core", "0.15.0")
    install(tmp_path, "vllm", "0.99.0")
    monkeypatch.syspath_prepend(tmp_path)

    assert check_versions(load_settings("ppo", None, ("actor.rollout.engine=builtin",))) == []


def test_builds_of_tested_versions_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "torch", "2.13.0a0+0123abc.nv26.10")
    monkeypatch.syspath_prepend(tmp_path)

    assert check_versions(load_settings("ppo")) == []
