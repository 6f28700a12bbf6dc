"""What an optional feature needs, as the installed package states it, and which versions fit.

The name spmdflow is not on PyPI, so advice names the packages that are needed and not an extra of
spmdflow: pip install 'vllm>=0.26,<0.34'.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module, metadata
from typing import Any

from spmdflow.errors import ConfigError

UNTESTED_VERSIONS = "SPMDFLOW_UNTESTED_VERSIONS"
"""Environment variable: 1 runs with versions outside the tested ranges, with a warning."""
_PROJECT = "spmdflow"
_RANGES = ("torch", "transformers")
"""Packages of the base installation whose range has an end. Of the others, pip keeps the lower
bound."""
_EXTRA = re.compile(r"""extra\s*==\s*["']([\w-]+)["']""")
_NAME = re.compile(r"[<>=!~ ]")
_PYTHON = re.compile(r"""python_version\s*>=\s*["'](\d+)\.(\d+)["']""")


def requirements_of(extra: str) -> list[str]:
    """Return the requirements of an extra on this Python, such as ["plotly>=7"].

    extra "": those of the base installation. [] if spmdflow is not installed, or has no such extra.
    """
    try:
        stated = metadata.requires(_PROJECT) or []
    except metadata.PackageNotFoundError:
        return []
    result = []
    for text in stated:
        requirement, _, marker = text.partition(";")
        match = _EXTRA.search(marker)
        if (match[1] if match else "") != extra:
            continue
        python = _PYTHON.search(marker)
        if python is not None and sys.version_info < (int(python[1]), int(python[2])):
            continue
        result.append(requirement.strip().replace(" ", ""))
    return result


def install_command(extra: str) -> str:
    """Return the command that installs what an extra needs: pip install 'plotly>=7'.

    Without an installed spmdflow it names the extra, whose packages are in setup.cfg.
    """
    requirements = requirements_of(extra)
    if not requirements:
        return f"pip install the packages of the extra {extra} in setup.cfg"
    return "pip install " + " ".join(f"'{each}'" for each in requirements)


def untested_versions(extras: Iterable[str]) -> list[str]:
    """Return a sentence for each installed package whose version is outside the tested range.

    The packages are torch, transformers and those of these extras. A package that is not installed
    is no matter here. [] if spmdflow is not installed.
    """
    texts = []
    for text in requirements_of(""):
        if _NAME.split(text)[0] in _RANGES:
            texts.append(text)
    for extra in extras:
        texts += requirements_of(extra)
    result = []
    for requirement in _parse(texts):
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            tested = ",".join(sorted(map(str, requirement.specifier), reverse=True))
            result.append(
                f"{requirement.name}: got {version}, expected {tested}, the range that was tested; "
                f"pip install '{requirement.name}{tested}'"
            )
    return sorted(set(result))


def _parse(texts: Iterable[str]) -> Iterator[Any]:
    parse: Any = import_module("packaging.requirements").Requirement
    for text in texts:
        yield parse(text)


def refuse_untested_versions(extras: Iterable[str]) -> None:
    """Raise one ConfigError with the sentences of `untested_versions`, if there are any.

    It ends with how to run nevertheless.
    """
    sentences = untested_versions(extras)
    if sentences:
        do = f"or set the environment variable {UNTESTED_VERSIONS}=1 to run anyway"
        raise ConfigError("\n".join([*sentences, do]))
