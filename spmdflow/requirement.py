"""What to install for an optional feature, as the installed package states it.

The name spmdflow is not on PyPI, so advice names the packages that are needed and not an extra of
spmdflow: pip install 'vllm>=0.27,<0.34'.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata

_PROJECT = "spmdflow"
_EXTRA = re.compile(r"""extra\s*==\s*["']([\w-]+)["']""")
_PYTHON = re.compile(r"""python_version\s*>=\s*["'](\d+)\.(\d+)["']""")


def requirements_of(extra: str) -> list[str]:
    """Return the requirements of an extra on this Python, such as ["plotly>=7"].

    [] if spmdflow is not installed, or has no such extra.
    """
    try:
        stated = metadata.requires(_PROJECT) or []
    except metadata.PackageNotFoundError:
        return []
    result = []
    for text in stated:
        requirement, _, marker = text.partition(";")
        match = _EXTRA.search(marker)
        if match is None or match[1] != extra:
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
