"""Models and data sets by name: `Qwen/Qwen3-0.6B[@revision]` -> a folder of the hub's cache.

The seam to huggingface_hub: its cache (HF_HOME, HF_HUB_CACHE), its HF_HUB_OFFLINE, its tokens. A
name without a revision means what the cache has; the newest revision if it has none. One process
of a node downloads while the others wait at a lock beside the cache. Knows no settings.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import os
import re
import shlex
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdflow.errors import ConfigError

_WORD = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"(?P<repo>{_WORD}/{_WORD})(?:@(?P<revision>[\w./-]+))?")
_SNAPSHOT = re.compile(
    rf"(?P<cache>.+)/(?P<kind>model|dataset)s--(?P<owner>{_WORD}?)--(?P<name>{_WORD})"
    r"/snapshots/(?P<revision>[0-9a-f]{40})"
)
_IGNORED = ("*/*", "*.bin", "*.pth", "consolidated*")
"""Of a model: the same weights in other forms, and what lies in folders."""
_SHOWN = 300  # characters of an error of the hub
_SHARD = re.compile(r"(.*)-\d+-of-(\d+)(\..*)?")
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class HubName:
    """What a name asks for."""

    repo: str
    """owner/name."""
    revision: str | None = None
    """A branch, tag or commit; none: what the cache has, else the newest."""
    kind: str = "model"
    """model or dataset."""

    def __str__(self) -> str:
        return self.repo + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True)
class Wanted:
    """The files that are needed of a name."""

    files: tuple[str, ...]
    """Patterns, or several with | between; a folder is complete if every one has a file."""
    more: tuple[str, ...] = ()
    """Patterns of files that are downloaded too, if there are any."""
    ignored: tuple[str, ...] = ()


TOKENIZER = Wanted(
    ("tokenizer*",), ("*.json", "*.model", "*.txt", "*.jinja"), (*_IGNORED, "*.safetensors*")
)
"""Files of a tokenizer, with the model's config.json."""
MODEL = Wanted(("config.json", "*.safetensors"), (*TOKENIZER.files, *TOKENIZER.more), _IGNORED)
"""Files of a model, its tokenizer's among them."""
SIZES = Wanted(("config.json",), TOKENIZER.more, TOKENIZER.ignored)
"""What a plan reads of a model."""


def hub_name_of(text: str, kind: str = "model") -> HubName | None:
    """The name in owner/name[@revision]; None for any other text and for a path that is there."""
    match = _NAME.fullmatch(text)
    if match is None or os.path.exists(text):
        return None
    return HubName(match["repo"], match["revision"], kind)


def hub_name_of_folder(path: str) -> HubName | None:
    """The name, with its commit, of a folder of this machine's cache; None for other folders."""
    match = _SNAPSHOT.fullmatch(path)
    if match is None or Path(match["cache"]) != _cache():
        return None
    return HubName(f"{match['owner']}/{match['name']}", match["revision"], match["kind"])


def hub_folder(
    key: str, name: HubName, wanted: Wanted, *, download: bool, wait_seconds: float
) -> Path:
    """The name's folder in the cache, downloaded if it is not there; ConfigError if it cannot be.

    key: the setting, for messages. download: false: the cache alone. wait_seconds: limit for
    another process of this node that downloads.
    """
    found = _cached(name, wanted)
    if found is not None:
        return found
    why = "nothing is downloaded for a plan"
    if download and not _is_offline():
        with _one_of_a_node(key, name, wait_seconds):
            found = _cached(name, wanted)
            try:
                return found or _download(name, wanted)
            except (OSError, ValueError, RuntimeError, _hub().errors.HTTPError) as err:
                why = textwrap.shorten(f"{type(err).__name__}: {err}", _SHOWN)
    elif _is_offline():
        why = "HF_HUB_OFFLINE is set"
    raise ConfigError(
        f"{key}: got {name}, which is no path in {Path.cwd()} and not in the hub's cache "
        f"{_cache()} ({why}), expected one of both; correct the path, or download it where there "
        f"is a network: {download_command(name, wanted)}"
    )


def download_command(name: HubName, wanted: Wanted) -> str:
    """The shell command that puts the files into the cache."""
    words = ["hf", "download", name.repo]
    words += ["--repo-type", "dataset"] if name.kind == "dataset" else []
    words += ["--revision", name.revision] if name.revision else []
    for pattern in _patterns(wanted) if name.kind == "dataset" and wanted.files else ():
        words += ["--include", pattern]
    for pattern in wanted.ignored:
        words += ["--exclude", pattern]
    return shlex.join(words)


def _cached(name: HubName, wanted: Wanted) -> Path | None:
    """The name's folder if the cache has every file that is needed."""
    folder = _cache() / f"{name.kind}s--{name.repo.replace('/', '--')}"
    revision = name.revision or "main"
    reference = folder / "refs" / revision
    if reference.is_file():
        revision = reference.read_text(encoding="utf-8").strip()
    snapshot = folder / "snapshots" / revision
    if not snapshot.is_dir():
        return None
    files = [str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()]
    for pattern in wanted.files:
        found = [name for part in pattern.split("|") for name in fnmatch.filter(files, part)]
        if not found or _lacks_shards(found):
            return None
    return snapshot


def _lacks_shards(files: Sequence[str]) -> bool:
    """Whether a file says -00001-of-00003 and not all three are there."""
    shards = [match for match in map(_SHARD.fullmatch, files) if match is not None]
    have = Counter((match[1], match[2], match[3]) for match in shards)
    return any(count < int(total) for (_, total, _), count in have.items())


def _download(name: HubName, wanted: Wanted) -> Path:
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        name.repo,
        repo_type=name.kind,
        revision=name.revision,
        allow_patterns=_patterns(wanted),
        ignore_patterns=list(wanted.ignored),
    )
    Path(folder).mkdir(parents=True, exist_ok=True)  # not made if no file fits
    found = _cached(HubName(name.repo, Path(folder).name, name.kind), wanted)
    if found is None:
        raise ValueError(f"the hub has no {' or no '.join(wanted.files)} of it")
    return found


def _patterns(wanted: Wanted) -> list[str]:
    """Of every file that is downloaded."""
    return [part for pattern in (*wanted.files, *wanted.more) for part in pattern.split("|")]


@contextlib.contextmanager
def _one_of_a_node(key: str, name: HubName, seconds: float) -> Iterator[None]:
    """Hold the name's lock; ConfigError if another process has it for that long."""
    folder = _cache() / ".locks"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"spmdflow-{name.kind}--{name.repo.replace('/', '--')}.lock"
    until = time.monotonic() + seconds
    with path.open("w") as file:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > until:
                raise ConfigError(
                    f"{key}: got {name}, which another process of this node still downloads after "
                    f"{seconds:g} s, expected it by then; raise run.start_seconds, or download it "
                    f"before the run"
                )
            time.sleep(_POLL_SECONDS)
        yield  # the lock goes with the file, also if this process dies


def _cache() -> Path:
    return Path(_hub().constants.HF_HUB_CACHE).expanduser().absolute()


def _is_offline() -> bool:
    return bool(_hub().constants.is_offline_mode())


def _hub() -> Any:  # the module; it is imported late
    import huggingface_hub
    import huggingface_hub.constants
    import huggingface_hub.errors

    return huggingface_hub
