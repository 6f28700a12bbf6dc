"""Imports Python files that users edit, always from their source.

Python keeps compiled code by the file's size and the second of its last change. A script that a
program rewrites twice within a second, or a reward function that changes between two attempts,
could run as it was before.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType


class _UncachedLoader(SourceFileLoader):
    """Compiles the source at each import, and writes no compiled file."""

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of the source as it is now."""
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


def import_file(name: str, path: Path) -> ModuleType:
    """Execute a Python file as the module `name` and return it.

    It is registered in sys.modules before it runs, because its dataclasses and pickle look it up
    there. An exception of the file passes through; the module stays registered.
    """
    # absolute, as __file__ is: a plan finds the script's lines by the name of its code
    loader = _UncachedLoader(name, str(path.absolute()))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    loader.exec_module(module)
    return module
