"""Models by name: folders of the hub's cache, offline, of another revision, half downloaded."""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants

from spmdflow.checkpoint.manifest import FileFacts, RankReport
from spmdflow.checkpoint.run_dir import Checkpoints, open_run_dir
from spmdflow.config.check import check
from spmdflow.config.load import load
from spmdflow.config.location import to_yaml
from spmdflow.errors import ConfigError
from spmdflow.plan import __main__ as plan
from tests.hub import COMMIT, PATIENT, files_of, serve, write_cached
from tests.unit.config_folder import ACTOR, write_model

OTHER = "f" * 40
NAME = "actor.model.path=org/tiny"


def model_files(**config: Any) -> dict[str, bytes]:
    """A model folder that a check accepts."""
    write_model(Path("made"), {**ACTOR, **config})
    files = files_of(Path("made"))
    shutil.rmtree("made")
    return files


def settings(*words: str) -> Any:
    return load("ppo.py", None, words).cfg


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as refused:
        settings(*words)
    return str(refused.value)


def test_name_becomes_its_folder_of_the_cache_for_every_model_and_tokenizer(cache: Path) -> None:
    folder = write_cached(cache, "models/org/tiny", model_files())

    cfg = settings(NAME)

    check(cfg, 4)
    paths = (cfg.actor.model.path, cfg.critic.model.path, cfg.reference.model.path)
    assert {*paths, cfg.data.tokenizer_path} == {str(folder)}


@pytest.mark.parametrize("revision", [OTHER, "v2"])
def test_revision_is_a_commit_or_a_branch(cache: Path, revision: str) -> None:
    write_cached(cache, "models/org/tiny", model_files())
    other = write_cached(cache, "models/org/tiny", model_files(vocab_size=9), commit=OTHER)
    (other.parents[1] / "refs" / "v2").write_text(OTHER)
    (other.parents[1] / "refs" / "main").write_text(COMMIT)

    assert settings(f"{NAME}@{revision}").actor.model.path == str(other)
    assert settings(NAME).actor.model.path == str(other.with_name(COMMIT))


def test_folder_that_is_there_wins_over_a_name(cache: Path) -> None:
    write_cached(cache, "models/org/tiny", model_files())
    Path("org").mkdir()
    write_model(Path("org/tiny"), ACTOR)

    assert settings(NAME).actor.model.path == "org/tiny"


def test_name_that_offline_is_not_in_the_cache_is_refused_with_the_command(cache: Path) -> None:
    assert refusal(f"{NAME}@v2") == (
        f"actor.model.path: got org/tiny@v2, which is no path in {Path.cwd()} and not in the hub's "
        f"cache {cache} (HF_HUB_OFFLINE is set), expected one of them; change the path, or "
        f"download it on a node with a network: hf download org/tiny --revision v2 "
        f"--exclude '*/*' --exclude '*.bin' --exclude '*.pth' --exclude 'consolidated*'"
    )


@pytest.mark.parametrize("missing", ["2-of-00002.safetensors", "config.json", "tokenizer.json"])
def test_folder_that_was_not_downloaded_to_its_end_is_not_taken(cache: Path, missing: str) -> None:
    files = model_files()
    del files["model.safetensors"]
    files |= {f"model-0000{number}-of-00002.safetensors": b"" for number in (1, 2)}
    write_cached(cache, "models/org/whole", files)
    del files[next(name for name in files if name.endswith(missing))]
    write_cached(cache, "models/org/tiny", files)

    assert "(HF_HUB_OFFLINE is set)" in refusal(NAME)
    settings("actor.model.path=org/whole")


def test_run_that_resumes_takes_the_revision_that_it_began_with(cache: Path) -> None:
    first = write_cached(cache, "models/org/tiny", model_files())
    cfg = settings(NAME)
    run = open_run_dir(cfg.run, to_yaml(cfg))
    run.lock.release()
    written = yaml.safe_load((run.path / "config.yaml").read_text())
    other = write_cached(cache, "models/org/tiny", model_files(vocab_size=9), commit=OTHER)

    assert written["actor"]["model"]["path"] == f"org/tiny@{COMMIT}"
    assert settings(NAME).actor.model.path == str(first)
    assert settings(f"{NAME}@main").actor.model.path == str(other)
    assert settings(NAME, "run.name=another").actor.model.path == str(other)
    assert load("ppo.py", run.path / "config.yaml", []).cfg == cfg


def test_revision_of_the_checkpoint_wins_over_that_of_a_later_start_that_was_refused(
    cache: Path,
) -> None:
    first = write_cached(cache, "models/org/tiny", model_files())
    cfg = settings(NAME)
    run = open_run_dir(cfg.run, to_yaml(cfg))
    points = Checkpoints(run.path, keep=1)
    (points.begin(1) / "actor").touch()
    files = {"actor": FileFacts(0, "")}
    points.seal(1, {"settings": to_yaml(cfg)}, [RankReport(0, "node", files)])
    run.lock.release()
    write_cached(cache, "models/org/tiny", model_files(vocab_size=9), commit=OTHER)
    later = settings(f"{NAME}@{OTHER}")

    open_run_dir(later.run, to_yaml(later)).lock.release()

    assert settings(NAME).actor.model.path == str(first)


def test_plan_needs_the_sizes_alone_and_downloads_nothing(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(Path(__file__).parents[3] / "algos" / "grpo.py"), NAME, "--no-data", "--world=2"]
    with serve({"models/org/tiny": model_files()}) as hub:
        code = "import sys; from spmdflow.plan.__main__ import main; sys.exit(main(sys.argv[1:]))"
        variables = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_CACHE": str(cache)}
        refused = python(code, *words, **variables)
        assert hub.asked == {}

    assert refused.returncode == 2
    assert "(nothing is downloaded for a plan)" in refused.stderr
    assert "hf download org/tiny" in refused.stderr
    model = Path(__file__).parents[3] / "algos" / "arithmetic" / "model"
    files = {name: content for name, content in files_of(model).items() if "safe" not in name}
    write_cached(cache, "models/org/tiny", files)
    assert plan.main(words) == 0
    assert f"{cache}/models--org--tiny" not in capsys.readouterr().err


def test_tool_that_needs_no_weights_downloads_all_of_a_model_but_them(cache: Path) -> None:
    files = model_files() | {"model.safetensors": b"weights"}
    code = "from spmdflow.config.load import load; load('ppo.py', None, ['actor.model.path=org/x']"
    weights = "GET models/org/x/model.safetensors"
    with serve({"models/org/x": files}) as hub:
        variables = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_CACHE": str(cache)}
        shown = python(f"{code}, weights=False)", **variables)
        fetched = {name for name in hub.asked if name.startswith("GET")}
        trained = python(f"{code})", **variables)

    assert (shown.returncode, trained.returncode) == (0, 0), shown.stderr + trained.stderr
    assert fetched == {f"GET models/org/x/{name}" for name in files} - {weights}
    assert hub.asked[weights] == 1


def test_first_download_is_the_only_one_and_the_printed_command_does_the_same(
    cache: Path, tmp_path: Path
) -> None:
    needed = model_files() | {"model.safetensors": b"weights"}
    files = needed | {"pytorch_model.bin": b"b", "original/consolidated.pth": b"c"}
    code = "from spmdflow.config.load import load; load('ppo.py', None, ['actor.model.path=org/x'])"
    with serve({"models/org/x": files}) as hub:
        variables = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_CACHE": str(cache)}
        for _ in range(2):
            made = python(code, **variables)
            assert made.returncode == 0, made.stderr
        fetched = sorted(name for name in hub.asked if name.startswith("GET"))
        counts = set(hub.asked.values())
        unknown = python(code.replace("org/x", "org/y"), **variables)
        command = unknown.stderr.strip().rpartition("network: ")[2].replace("org/y", "org/x")
        variables["HF_HUB_CACHE"] = str(tmp_path / "other")
        hf = [str(Path(sys.executable).with_name("hf")), *shlex.split(command)[1:]]
        subprocess.run(hf, env={**online(), **variables}, check=True, capture_output=True)

    assert fetched == [f"GET models/org/x/{name}" for name in sorted(needed)]
    assert counts == {1}
    assert "404" in unknown.stderr and "expected one of them" in unknown.stderr
    snapshots = [folder / "models--org--x" / "snapshots" for folder in (cache, tmp_path / "other")]
    assert files_of(snapshots[0]) == files_of(snapshots[1])


def test_wait_for_another_process_that_downloads_has_a_limit(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    lock = cache / ".locks" / "spmdflow-model--org--tiny.lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        said = refusal(NAME, "run.start_seconds=0.3")

    assert said == (
        "actor.model.path: got org/tiny, which another process of this node still downloads after "
        "0.3 s, expected it by then; raise run.start_seconds, or download it before the run"
    )


def online() -> dict[str, str]:
    """The environment without HF_HUB_OFFLINE."""
    own = {"PYTHONPATH": str(Path(__file__).parents[3]), "HF_HUB_DISABLE_TELEMETRY": "1"}
    return {**{k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}, **own, **PATIENT}


def python(code: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Another process, as huggingface_hub reads its variables once."""
    line = [sys.executable, "-c", code, *words]
    return subprocess.run(line, env={**online(), **variables}, capture_output=True, text=True)
