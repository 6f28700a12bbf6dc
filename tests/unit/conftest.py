"""What tests of several packages start from."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.unit.config_folder import write_config_folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; the current folder has a configuration and nothing may be downloaded."""
    (tmp_path / "work").mkdir()
    write_config_folder(tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"
