"""CUDA without a GPU: the tests here run programs on simulated devices (docs/lab/GPU.md)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.simcuda.device.build import BuildError, library

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
Simulated = Callable[..., str]
SECONDS = 1500
"""Only ends what hangs: a busy machine needs minutes to compile, and for some of the programs."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test of this folder is marked; the first of a file waits for the compiler too."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.simcuda)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(2 * SECONDS))


def planned_peak(script: str, settings: Sequence[str], *, num_ranks: int) -> float:
    """The most bytes of a rank in any phase, by spmdflow.plan."""
    words = [sys.executable, "-m", "spmdflow.plan", script, *settings, "--world", str(num_ranks)]
    done = subprocess.run(
        [*words, "--hardware", "h100", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    return float(max(phase["total"] for phase in json.loads(done.stdout)["memory"]))


@pytest.fixture(scope="session")
def simulated() -> Simulated:
    """Runs a Python program on simulated devices: (*words, log=folder, seconds=limit) -> stdout.

    transformer_engine=True: with stand-ins for TransformerEngine.
    """
    try:
        compiled = library()
    except BuildError as err:
        pytest.skip(f"no simulated CUDA device: {err}")

    def run(
        *words: str | Path,
        log: Path | None = None,
        seconds: float = SECONDS,
        transformer_engine: bool = False,
    ) -> str:
        paths = [str(HERE / "device" / "site"), str(ROOT)]
        if transformer_engine:
            paths.append(str(HERE / "device" / "te"))
        variables = {
            "TORCHDYNAMO_DISABLE": "1",  # compiled code needs CUDA's compilers: it runs as it is
            "SIMCUDA": "1",
            "SIMCUDA_LIBRARY": str(compiled),
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
        }
        if log is not None:
            variables["SIMCUDA_LOG"] = str(log)
        state = tempfile.mkdtemp(prefix="simcuda-")
        variables["SIMCUDA_STATE"] = state
        process = subprocess.Popen(
            [sys.executable, *map(str, words)],
            env={**os.environ, **variables},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            output, errors = process.communicate(timeout=seconds)
        except BaseException:
            os.killpg(process.pid, 9)
            raise
        finally:
            shutil.rmtree(state, ignore_errors=True)
        assert process.returncode == 0, f"{output[-3000:]}\n{errors[-6000:]}"
        return output

    return run
