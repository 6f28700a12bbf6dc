"""Which variable configures torch's allocator: ours agrees with the installed torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from spmdflow.parallel.allocator import (
    EXPANDABLE_SEGMENTS,
    VARIABLE,
    allocator_settings,
    has_expandable_segments,
    settings_for,
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


@pytest.mark.parametrize("expandable", [True, False])
def test_settings_of_a_run_are_settings_of_the_installed_torch(expandable: bool) -> None:
    settings = settings_for(torch.__version__, expandable=expandable)

    assert settings_of_torch({VARIABLE: settings}) == settings
    assert "pinned_max_round_threshold_mb:1" in settings
    assert has_expandable_segments({VARIABLE: settings}) == expandable


def test_torch_without_exact_pinned_memory_is_not_told_of_it() -> None:
    assert settings_for("2.11.0+cu130", expandable=True) == EXPANDABLE_SEGMENTS
    assert settings_for("2.12.1", expandable=False) == ""


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
