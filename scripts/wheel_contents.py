"""Compare a wheel with the tree: every module and data file of spmdflow/ and algos/, nothing else.

Usage: python scripts/wheel_contents.py WHEEL [TREE]      exit code 1 and one line per difference
"""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

FOLDERS = {"spmdflow": "spmdflow", "algos": "spmdflow/algos"}
"""Folder of the tree -> where it lies in a wheel."""
_RELATIVE_LINK = re.compile(r"\]\((?!https?://)[^)]*\)")


def files_of_tree(tree: Path) -> set[str]:
    """What a wheel of the tree must hold, by the names that the wheel gives it."""
    return {
        f"{inside}/{path.relative_to(tree / folder)}"
        for folder, inside in FOLDERS.items()
        for path in (tree / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def differences(found: set[str], tree: Path) -> list[str]:
    """What the wheel lacks and what it has too much, one line each."""
    wanted = files_of_tree(tree)
    lacks = [f"the wheel lacks {name}" for name in sorted(wanted - found)]
    return lacks + [f"the tree lacks {name}" for name in sorted(found - wanted)]


def rooms_without_init(tree: Path) -> list[str]:
    """Folders with Python modules that are no real packages."""
    folders = {path.parent for path in (tree / "spmdflow").rglob("*.py")}
    return sorted(
        str(folder.relative_to(tree))
        for folder in folders
        if not (folder / "__init__.py").is_file()
    )


def check_wheel(wheel: Path, tree: Path) -> list[str]:
    """Everything that is wrong with a wheel, one line each."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        description = archive.read(metadata).decode()
    found = {name for name in names if ".dist-info/" not in name}
    wrong = [f"{room} has no __init__.py" for room in rooms_without_init(tree)]
    links = [match[0] for match in _RELATIVE_LINK.finditer(description)]
    wrong += [f"the description has a relative link: {link[1:]}" for link in links]
    return wrong + differences(found, tree)


def main() -> int:
    """Print what is wrong; returns the exit code."""
    wheel = Path(sys.argv[1])
    tree = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).parents[1]
    wrong = check_wheel(wheel, tree)
    print("\n".join(wrong) or f"{wheel.name} holds all {len(files_of_tree(tree))} files")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
