"""No prints, no stray environment, no forbidden words, ASCII, late imports only where heavy."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.policy.house import REPOSITORY, files, functions_of, imported_names, text_of, tree_of

CODE = files("spmdflow", "algos")
SHELL = [".ci/run", "launch/local.sh", "launch/multinode.sh", "launch/slurm.sbatch"]
SHELL += [f"scripts/{name}.sh" for name in ("setup", "quickstart", "test", "check")]

ENVIRONMENT = {
    "spmdflow/run.py": "reads what torchrun set, and configures torch's allocator",
    "spmdflow/start.py": "reads whether torchrun started it, and what configures torchrun",
    "spmdflow/torchrun.py": "sets the number of threads that torchrun would set with six lines",
    "spmdflow/program.py": "reads how many ranks a node has, and whether any version may run",
    "spmdflow/config/load.py": "resolves settings",
    "spmdflow/config/episode_models.py": "reads the keys of servers that episodes call",
    "spmdflow/rewards/process.py": "starts worker processes without the run's secret",
    "spmdflow/episodes/child.py": "tells environments the endpoint's certificate",
    "spmdflow/episodes/isolated.py": "tells environments the endpoint's certificate",
    "spmdflow/envs/verifiers.py": "verifiers reads keys from variables",
    "spmdflow/envs/client.py": "finds the endpoint's certificate",
    "spmdflow/serving/settings.py": "a generation server is told by variables what it is",
    "spmdflow/serving/start.py": "vLLM is configured by variables",
    "spmdflow/serving/supervisor.py": "starts servers without the run's secret, on its devices",
    "spmdflow/doctor/__main__.py": "reports the variables that a run would see",
    "spmdflow/rollout/table_cache.py": "finds the user's cache",
    "spmdflow/rollout/vllm_contract.py": "vLLM is configured by variables only",
    "spmdflow/rollout/vllm_process.py": "puts back what vLLM changes, and moves its cache",
}
"""The files that may touch os.environ, and why."""

HEAVY = {"vllm", "megatron", "transformers", "pyarrow", "tensorboard", "wandb", "matplotlib"}
HEAVY |= {"mlflow", "trackio", "swanlab", "plotly", "math_verify", "huggingface_hub", "datasets"}
HEAVY |= {"prometheus_client"}
"""Libraries that are imported inside functions, where they are needed."""
LATE_IMPORTERS = {
    "spmdflow/start.py": "a refusal needs no torch",
    "spmdflow/run.py": "a refusal needs no torch",
    "spmdflow/program.py": "a refusal needs no torch",
    "spmdflow/workers/fsdp.py": "torch.distributed.optim scripts eight optimizers, 0.2 s a rank",
}
"""Files that may import other things late, and why."""

CUDA_ALONE = {
    "spmdflow/doctor/node.py": (2, "says what torch was built for"),
    "spmdflow/plan/__main__.py": (2, "hardware files describe CUDA devices"),
    "spmdflow/serving/publisher.py": (1, "names vLLM's own backend"),
    "spmdflow/workers/attention.py": (4, "asks which of PyTorch's kernels takes packed rows"),
}
"""File -> how often it names CUDA or NCCL, and why. Others ask `spmdflow.parallel.device`."""
CUDA_LIBRARIES = ("spmdflow/workers/megatron", "spmdflow/rollout/vllm", "spmdflow/serving/nccl.py")
"""Files that speak with a library which knows CUDA or the CPU."""

SEAMS = {
    "omegaconf": {"spmdflow/config/load.py", "spmdflow/config/source.py"},
    "huggingface_hub": {"spmdflow/config/location.py", "spmdflow/checkpoint/hub.py"},
    "datasets": {"spmdflow/datasets/line_file.py"},
    "msgpack": 1,
    "math_verify": 1,
    "zmq": 1,
    "pyarrow": 1,
    "tensorboard": 1,
    "wandb": 1,
    "mlflow": 1,
    "trackio": 1,
    "swanlab": 1,
    "matplotlib": 1,
    "plotly": 1,
    "prometheus_client": 1,
}
"""Library -> the files, or the number of files, that import it."""

UNPICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
"""Modules that nothing may import: reading what they wrote runs what it says."""
OBJECT_COLLECTIVES = re.compile(r"(gather|scatter|broadcast|send|recv)_object(_list)?$")
"""torch.distributed's functions that unpickle; `parallel.group.all_gather_plain` does not."""
UNPICKLING = {
    "spmdflow/workers/megatron_runtime.py": "puts all_gather_plain in the place of Megatron's call",
    "spmdflow/weights/dcp.py": "reads torch's checkpoints with an unpickler that knows few classes",
}
BY_NAME = {"message.py", "runtime", "failure", "parallel", "worker_api", "transfer", "data"}
BY_NAME |= {"controller"}
"""Packages and files that read messages: none of them imports what a text names."""
NAMED_IMPORTS = {
    "spmdflow/message.py": "one of HOMES, a list written out",
}

FORBIDDEN_WORDS = ("master", "slave", "manager", "handler", "service", "driver", "util", "helper")
FORBIDDEN_FILES = ("utils", "util", "common", "helpers", "misc")


def test_nothing_prints_outside_scripts() -> None:
    prints = [
        f"{file}:{node.lineno}"
        for file in CODE
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"
    ]

    assert prints == []


def test_cuda_is_named_only_where_the_table_says() -> None:
    found = {}
    for file in (each for each in CODE if not each.startswith(CUDA_LIBRARIES)):
        nodes = list(ast.walk(tree_of(file)))
        words = [str(node.value) for node in nodes if isinstance(node, ast.Constant)]
        words += [
            node.attr.removeprefix("is_") for node in nodes if isinstance(node, ast.Attribute)
        ]
        if named := sum(word.partition(":")[0] in ("cuda", "nccl") for word in words):
            found[file] = named

    assert found == {file: number for file, (number, _) in CUDA_ALONE.items()}


def test_environment_is_touched_only_where_the_table_says() -> None:
    touched = [
        f"{file}:{node.lineno}"
        for file in CODE
        if file not in ENVIRONMENT
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv")
    ]
    touched += [
        f"{file}:{line}"
        for file in CODE
        if file not in ENVIRONMENT
        for line, module, name in imported_names(tree_of(file))
        if module == "os" and name in ("environ", "getenv", "putenv")
    ]

    assert touched == []


def test_simulated_devices_set_no_variable_of_vllm_that_a_run_does_not_set() -> None:
    """Otherwise they would hide what a real device needs."""

    def variables(folder: str) -> set[str]:
        texts = [path.read_text() for path in (REPOSITORY / folder).rglob("*.py")]
        return set(re.findall(r"VLLM_[A-Z0-9_]+", "".join(texts)))

    assert variables("spmdflow")
    assert variables("tests/simcuda") <= variables("spmdflow")


def test_nothing_is_unpickled() -> None:
    found = []
    for file in (each for each in CODE if each not in UNPICKLING):
        found += [f"{file}:{n} {m}" for n, m, _ in imported_names(tree_of(file)) if m in UNPICKLES]
        for node in ast.walk(tree_of(file)):
            name = getattr(node, "attr", getattr(node, "id", ""))
            if OBJECT_COLLECTIVES.search(name) or _is_torch_load(node):
                found.append(f"{file}:{node.lineno} {name}")

    assert found == []


def _is_torch_load(node: ast.AST) -> bool:
    """Whether it is torch.load, which may unpickle."""
    owner = getattr(node, "value", None)
    return getattr(node, "attr", "") == "load" and getattr(owner, "id", "") == "torch"


def test_packages_that_read_messages_import_nothing_by_name() -> None:
    found = [
        f"{file}:{node.lineno}"
        for file in CODE
        if file.split("/")[1] in BY_NAME and file not in NAMED_IMPORTS
        for node in ast.walk(tree_of(file))
        if getattr(node, "attr", getattr(node, "id", ""))
        in ("import_module", "__import__", "importlib", "eval", "exec")
    ]

    assert found == []


def test_classes_avoid_the_forbidden_words() -> None:
    found = [
        f"{file}:{node.lineno} {node.name}"
        for file in CODE
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.ClassDef)
        if any(word in node.name.lower() for word in FORBIDDEN_WORDS)
    ]

    assert found == []


def test_files_are_named_after_what_they_hold() -> None:
    names = {file: Path(file).with_suffix("").parts for file in CODE}

    assert [file for file, parts in names.items() if set(parts) & set(FORBIDDEN_FILES)] == []
    repeated = [
        file
        for file, (*_, room, name) in names.items()
        if name != "__init__" and name.split("_")[0] == room
    ]
    assert repeated == [], "the room's name is not repeated in the file's"


def test_code_is_ascii() -> None:
    odd = [
        f"{file}:{number} {sorted({c for c in line if not c.isascii()})}"
        for file in files("spmdflow", "algos", "scripts", "tests")
        for number, line in enumerate(text_of(file).splitlines(), 1)
        if not line.isascii()
    ]

    assert odd == []


def test_imports_inside_functions_are_of_heavy_libraries_only() -> None:
    late = {
        f"{file}:{line} {module}"
        for file in CODE
        if file not in LATE_IMPORTERS
        for function in functions_of(tree_of(file))
        for line, module, _ in imported_names(function)
        if module.startswith("spmdflow.") or not HEAVY & set(module.split("."))
    }

    assert sorted(late) == []


@pytest.mark.parametrize("library", SEAMS)
def test_library_has_one_seam(library: str) -> None:
    importers = {
        file
        for file in files("spmdflow")
        for _, module, _ in imported_names(tree_of(file))
        if library in module.split(".") and not module.startswith("spmdflow.")
    }
    allowed = SEAMS[library]

    if isinstance(allowed, set):
        assert importers == allowed
    else:
        assert len(importers) <= allowed, sorted(importers)


@pytest.mark.parametrize("file", SHELL)
def test_shell_script_parses_stops_at_errors_and_says_its_usage(file: str) -> None:
    text = text_of(file)

    parsed = subprocess.run(["bash", "-n", file], cwd=REPOSITORY, capture_output=True, text=True)

    assert parsed.returncode == 0, parsed.stderr
    assert "set -euo pipefail" in text
    assert "Usage: " in text
