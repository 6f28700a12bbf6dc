"""With this folder on PYTHONPATH and SIMCUDA=1, `import torch` brings the simulated device.

torch asks for CUDA's hooks once, while it is imported: the library must be loaded before that.
"""

import os
import sys
from importlib import util
from pathlib import Path


def _load(library: str, torch_folder: Path) -> None:
    """The compiled device, after the libraries of torch that it is linked with."""
    import ctypes

    for name in ("torch_global_deps", "c10", "torch_cpu", "torch", "torch_python"):
        ctypes.CDLL(str(torch_folder / "lib" / f"lib{name}.so"), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(library)


class _AfterTorch:
    """Finds torch as ever, and installs the device when torch has been imported."""

    _is_looking = False

    def find_spec(self, name, path, target=None):  # type: ignore[no-untyped-def]
        if name != "torch" or self._is_looking:
            return None
        self._is_looking = True
        spec = util.find_spec("torch")
        self._is_looking = False
        assert spec is not None and spec.loader is not None and spec.origin is not None
        stock = spec.loader.exec_module
        library = os.environ["SIMCUDA_LIBRARY"]

        def exec_module(module):  # type: ignore[no-untyped-def]
            sys.meta_path.remove(self)  # not before: others may look for torch without importing it
            _load(library, Path(spec.origin).parent)
            stock(module)
            sys.path.insert(0, str(Path(__file__).parents[1]))
            import surface

            surface.install(library)

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("SIMCUDA") == "1":
    sys.meta_path.insert(0, _AfterTorch())
