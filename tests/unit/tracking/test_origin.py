"""What a run's numbers come from: versions, and the state of git."""

from __future__ import annotations

import subprocess
import sys

from spmdflow.tracking.origin import git_state, versions


def test_git_state_is_the_commit_and_whether_a_tracked_file_differs(tmp_path, monkeypatch):
    for variable in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(variable, raising=False)
    assert git_state(tmp_path) == {}
    folder = tmp_path / "repository" / "algos"
    folder.mkdir(parents=True)
    (folder / "own.py").write_text("x = 1\n")
    git(folder, "init", "-q")
    git(folder, "add", "own.py")
    git(folder, "-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "first")
    commit = git(folder, "rev-parse", "HEAD").strip()
    (folder / "untracked").touch()

    assert git_state(folder) == {"commit": commit, "dirty": False}
    (folder / "own.py").write_text("x = 2\n")
    assert git_state(folder) == {"commit": commit, "dirty": True}
    assert git_state(folder / "none") == {}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(folder) == {}, "no git"


def test_versions_are_of_this_python_and_of_installed_packages():
    found = versions()

    assert found["python"] == sys.version.split()[0]
    assert {"torch", "numpy", "transformers"} <= set(found)


def git(folder, *words):
    command = ["git", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
