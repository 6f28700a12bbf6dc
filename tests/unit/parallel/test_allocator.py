"""Which variable configures torch's allocator: ours agrees with the installed torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from spmdflow.parallel.allocator import (
    EXPANDABLE_SEGMENTS,
    VARIABLE,
    allocator_settings,
    has_expandable_segments,
)

OLDER = "PYTORCH_CUDA_ALLOC_CONF"
OFF = "expandable_segments:False"


def settings_of_torch(variables: dict[str, str]) -> str:
    """What torch reads if these variables are set after its import and before the first use."""
    program = (
        "import os, torch\n"
        f"os.environ.update({variables!r})\n"
        "print(torch._C._accelerator_getAllocatorSettings())"
    )
    clean = {name: text for name, text in os.environ.items() if "ALLOC_CONF" not in name}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=clean,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return done.stdout.strip()


def test_torch_reads_the_variables_after_its_import_and_in_the_same_order() -> None:
    alone = {VARIABLE: EXPANDABLE_SEGMENTS}
    hidden = {VARIABLE: EXPANDABLE_SEGMENTS, OLDER: OFF}

    assert settings_of_torch(alone) == allocator_settings(alone) == EXPANDABLE_SEGMENTS
    assert settings_of_torch(hidden) == allocator_settings(hidden) == OFF


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, False),
        ({VARIABLE: EXPANDABLE_SEGMENTS}, True),
        ({OLDER: "max_split_size_mb:512, expandable_segments:True"}, True),
        ({VARIABLE: EXPANDABLE_SEGMENTS, OLDER: "max_split_size_mb:512"}, False),
        ({VARIABLE: OFF}, False),
    ],
)
def test_expandable_segments_are_found_among_other_settings(
    variables: dict[str, str], expected: bool
) -> None:
    assert has_expandable_segments(variables) is expected
