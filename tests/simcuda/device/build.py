"""Compiles the simulated device (the .cpp files beside this one) with g++, once for each torch.

    python tests/simcuda/device/build.py        prints the library's path; half a minute of one core

The library lies in build/simcuda/, under a name that holds torch's version and a hash of the
sources. BuildError says what a machine lacks.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
from filelock import FileLock
from torch.utils.cpp_extension import include_paths

HERE = Path(__file__).parent
FOLDER = HERE.parents[2] / "build" / "simcuda"
NAME = "simulated_cuda.so"
SECONDS = 1400
"""Half a minute of a core, on a machine that may have others to do."""


class BuildError(RuntimeError):
    """Why the simulated device cannot be compiled on this machine."""


def library() -> Path:
    """The compiled library; compiles it where it is not there yet."""
    sources = sorted(HERE.glob("*.cpp"))
    texts = b"".join(path.read_bytes() for path in [*sources, HERE / "simulated.h"])
    tag = hashlib.sha256(texts + sys.version.encode()).hexdigest()[:12]
    folder = FOLDER / f"{torch.__version__}-{tag}"
    if not (folder / NAME).exists():
        _check_tools()
        FOLDER.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock"), timeout=SECONDS):  # tests start two at a time
            if not (folder / NAME).exists():
                _compile(sources, folder)
    return folder / NAME


def _check_tools() -> None:
    if torch.version.cuda is not None:
        raise BuildError(f"torch {torch.__version__} has CUDA of its own; the CPU build is needed")
    if shutil.which("g++") is None:
        raise BuildError("g++ is not installed (Debian: apt install g++)")
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        raise BuildError("Python.h is not installed (Debian: apt install python3-dev)")


def _compile(sources: list[Path], folder: Path) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=FOLDER))
    scratch.chmod(0o755)
    includes = [*include_paths(), sysconfig.get_paths()["include"]]
    flags = ["-std=c++20", "-O1", "-fPIC", "-w", f"-I{HERE}"]
    flags += [part for path in includes for part in ("-isystem", path)]
    # one compiler for all of them: it reads torch's headers once, which takes most of its time
    joined = scratch / "joined.cpp"
    joined.write_text("".join(f'#include "{path}"\n' for path in sources))
    made = scratch / "joined.o"
    command = ["g++", *flags, "-c", joined, "-o", made]
    compiler = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=SECONDS)
    if compiler.returncode:
        error = compiler.stderr[-3000:]
        raise BuildError(f"g++ does not compile the simulated device:\n{error}")
    libraries = Path(torch.__file__).parent / "lib"
    torch_libraries = ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    link = ["g++", "-shared", made, "-o", scratch / NAME, f"-L{libraries}", *torch_libraries]
    subprocess.run(link, check=True, timeout=SECONDS)
    scratch.rename(folder)


if __name__ == "__main__":
    sys.stdout.write(f"{library()}\n")
