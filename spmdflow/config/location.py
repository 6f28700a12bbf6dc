"""What paths of models, tokenizers and data mean: files, folders, checkpoints, names on the hub.

    a file or folder that is there          itself
    a RUN_DIR or one of its checkpoints     the model in it (model_folder.py)
    owner/name[@revision]                   a folder of the hub's cache
    owner/name:config/split[@revision]      the same of a data set

`resolve_paths` replaces every name by a folder. A run that resumes takes the revisions that it
began with from its latest checkpoint, otherwise from its config.yaml, where `to_yaml` wrote folders
of the cache as name@commit.

The only file that imports huggingface_hub; its cache (HF_HOME, HF_HUB_CACHE), HF_HUB_OFFLINE and
tokens apply. A name without a revision means the one in the cache, else the newest on the hub. One
process of a node downloads, the others wait for its lock in the cache. The README.md of a data set
names its configs and their files; only the files of the requested config are downloaded.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import re
import shlex
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from spmdflow.config.adapter import take_adapter_settings
from spmdflow.config.data_source import split_location, with_locations
from spmdflow.config.leaf import parts_of, plain_tree
from spmdflow.config.model_folder import Form, exported_folder, names_newest_step
from spmdflow.config.schema import DataSettings, LoRAConfig, ModelConfig, RunConfig
from spmdflow.errors import ConfigError


def resolve_paths(
    cfg: Any, *, download: bool, weights: bool = True, given: Collection[str] = ()
) -> None:
    """Replace every model, tokenizer and data set path of a settings object by a local folder.

    Changes `cfg` in place. A checkpoint or RUN_DIR becomes its model's folder, a name on the hub
    its folder in the cache. An adapter to start from also gives its settings. ConfigError for a
    name or a checkpoint that cannot be found, and for settings that contradict an adapter's; a
    missing path is left to `check`.
    download: whether a name that the hub's cache lacks may be downloaded (HF_HUB_OFFLINE forbids
    it); if not, a model's config.json is enough and data may be missing.
    weights: whether a model needs its weights. If not, its config.json is enough, and only that and
    its tokenizer are downloaded.
    given: keys of the settings that a file or a word has set.
    """
    model_files = MODEL if download and weights else SIZES
    find = _Finder(next((part for _, part in parts_of(cfg, RunConfig)), RunConfig()), download)
    for key, part in parts_of(cfg, ModelConfig):
        part.path = find.model(f"{key}.path", part.path, model_files)
    adapter_files = ADAPTER if download and weights else ADAPTER_SETTINGS
    for key, lora in parts_of(cfg, LoRAConfig):
        if lora.adapter is not None:
            lora.adapter = find.adapter(f"{key}.adapter", lora.adapter, adapter_files)
            take_adapter_settings(key, lora, given)
    sections: Iterable[tuple[str, Any]] = parts_of(cfg, object)
    for key, part in sections:  # after the models: a model's folder has its tokenizer
        if "tokenizer_path" in plain_tree(part):
            path = find.model(f"{key}.tokenizer_path", part.tokenizer_path, TOKENIZER)
            part.tokenizer_path = path
    for key, data in parts_of(cfg, DataSettings):
        for name in ("train_path", "eval_path"):
            if (setting := getattr(data, name)) is not None:
                change = partial(find.data, f"{key}.{name}")
                setattr(data, name, with_locations(setting, change))


def run_dir_of(run: RunConfig) -> Path:
    """RUN_DIR: run.dir, else runs/<run.name>."""
    return Path(run.dir or Path("runs") / run.name)


def to_yaml(cfg: Any) -> str:
    """A settings object as YAML; `load` with this file gives an equal object.

    Models and data sets of the hub's cache are named, with their commit.
    """
    return yaml.safe_dump(
        name_cached_folders(plain_tree(cfg)), sort_keys=False, default_flow_style=False
    )


def name_cached_folders(value: Any) -> Any:
    """Return plain settings with folders of the hub's cache replaced by owner/name@commit.

    Looks into nested maps; other values are unchanged.
    """
    if isinstance(value, dict):
        result = {}
        for key, part in value.items():
            result[key] = name_cached_folders(part)
        return result
    if isinstance(value, str) and "/snapshots/" in value:
        return with_locations(value, _hub_name_of)
    return value


def _hub_name_of(location: str) -> str:
    """Return owner/name[:split]@commit for a location in the hub's cache; others unchanged."""
    path, split = split_location(location)
    match = _SNAPSHOT.fullmatch(path)
    if match is None or Path(match["cache"]) != _cache():
        return location
    return f"{match['owner']}/{match['name']}{split}@{match['revision']}"


_WORD = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"(?P<repo>{_WORD}/{_WORD})(?:@(?P<revision>[\w./-]+))?")
_SNAPSHOT = re.compile(
    rf"(?P<cache>.+)/(?:model|dataset)s--(?P<owner>{_WORD}?)--(?P<name>{_WORD})"
    r"/snapshots/(?P<revision>[0-9a-f]{40})"
)
_IGNORED = ("*/*", "*.bin", "*.pth", "consolidated*")
"""Files that a model does not need: the weights in other formats, and subfolders."""
_SHOWN = 300  # characters of an error of the hub
_SHARD = re.compile(r"(.*)-\d+-of-(\d+)(\..*)?")


@dataclass(frozen=True)
class HubName:
    """A name on the hub, taken apart."""

    repo: str
    """owner/name."""
    revision: str | None = None
    """A branch, tag or commit; None: what the cache has, else the newest."""
    kind: str = "model"
    """model or dataset."""

    @property
    def cached(self) -> str:
        """Its folder in the cache."""
        return f"{self.kind}s--{self.repo.replace('/', '--')}"

    def __str__(self) -> str:
        return self.repo + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True)
class Wanted:
    """The files that are needed of a repository on the hub."""

    files: tuple[str, ...]
    """Patterns, alternatives joined by |; a folder is complete if each matches a file."""
    more: tuple[str, ...] = ()
    """Patterns of files that are downloaded too, but may be missing."""
    ignored: tuple[str, ...] = ()

    @property
    def patterns(self) -> list[str]:
        """Patterns of all files that are downloaded; an alternative with | becomes several."""
        result = []
        for pattern in (*self.files, *self.more):
            for part in pattern.split("|"):
                result.append(part)
        return result


TOKENIZER = Wanted(
    ("tokenizer*",), ("*.json", "*.model", "*.txt", "*.jinja"), (*_IGNORED, "*.safetensors*")
)
"""Files of a tokenizer, with the model's config.json."""
MODEL = Wanted(("config.json", "*.safetensors"), (*TOKENIZER.files, *TOKENIZER.more), _IGNORED)
"""Files of a model, its tokenizer's among them."""
SIZES = Wanted(("config.json",), TOKENIZER.more, TOKENIZER.ignored)
"""What is read of a model whose weights are not used, as in a plan."""

ADAPTER = Wanted(("adapter_config.json", "adapter_model.safetensors"), ignored=("*/*",))
"""Files of an adapter in peft's format."""
ADAPTER_SETTINGS = Wanted(("adapter_config.json",), ignored=("*/*",))
"""What a plan reads of it."""


def hub_name_of(text: str, kind: str = "model") -> HubName | None:
    """Return the name that a text owner/name[@revision] is; None for any other text.

    Also None if a file or folder of that path exists, as it wins. kind: "model" or "dataset".
    """
    match = _NAME.fullmatch(text)
    if match is None or os.path.exists(text):
        return None
    return HubName(match["repo"], match["revision"], kind)


@dataclass(frozen=True)
class _Finder:
    """Finds the models and data sets that settings name; ConfigError if one is not found."""

    run: RunConfig
    download: bool
    """Whether what the cache lacks may be downloaded."""
    steps: dict[str, str] = field(default_factory=dict)
    """The checkpoint that is read of each run that settings name, the same for all of them."""

    def model(self, key: str, path: str, wanted: Wanted) -> str:
        """Return the folder of a model or tokenizer; ConfigError if it is not found.

        A checkpoint or RUN_DIR gives the model's folder in it, a name on the hub its folder in the
        cache, downloaded if allowed; any other path is returned unchanged. A path that means the
        newest checkpoint of a run gives the same step for all settings; a run that resumes keeps
        the step that it began with.
        key: the setting, for messages.
        """
        return self._folder_of(key, path, wanted, form="model")

    def adapter(self, key: str, path: str, wanted: Wanted) -> str:
        """Return the folder of an adapter in peft's format, found as `model` finds a model's."""
        return self._folder_of(key, path, wanted, form="adapter")

    def _folder_of(self, key: str, path: str, wanted: Wanted, *, form: Form) -> str:
        """See `model` and `adapter`."""
        folder = exported_folder(key, path, form=form)
        if folder != path and names_newest_step(path):
            step = str(Path(folder).parents[1])
            if self.steps.setdefault(path, step) != step:  # the other run has saved meanwhile
                folder = exported_folder(key, self.steps[path], form=form)
            folder = self._step_as_before(key, folder)
        path = folder
        name = hub_name_of(path)
        if name is None:
            return path
        return str(self._folder(key, self._as_before(key, name), wanted))

    def data(self, key: str, location: str) -> str:
        """Return a location of rows with a name on the hub replaced by its folder in the cache.

        Downloads the README.md, then the files of the config that it names, both of one commit, if
        they are not in the cache. ConfigError if they are not found, but a plan (no download) gets
        the location unchanged. So is any location that is no name with a split.
        """
        path, split = split_location(location)
        split, _, revision = split.partition("@")
        name = hub_name_of(f"{path}@{revision}" if revision else path, "dataset")
        if name is None or not split:
            return location
        try:
            name = self._as_before(key, name)
            folder = self._folder(key, name, _README)
            config = split[1:].rpartition("/")[0]
            files = Wanted(_files_of(key, name, config, folder / _README.more[0]), _README.more)
            folder = self._folder(key, replace(name, revision=folder.name), files)  # one commit
        except ConfigError:
            if self.download:
                raise
            return location  # the plan reports what it assumes instead
        return f"{folder}{split}"

    def _as_before(self, key: str, name: HubName) -> HubName:
        """Return the name with the commit that the resumed run recorded for this setting.

        The name is unchanged if it has a revision of its own or no commit was recorded.
        """
        if name.revision is not None:
            return name
        before = _setting_of(_settings_before(run_dir_of(self.run)), key)
        match = re.search(rf"\b{re.escape(name.repo)}(?::[^@()]*)?@([0-9a-f]{{40}})", str(before))
        if match:
            return replace(name, revision=match[1])
        return name

    def _step_as_before(self, key: str, folder: str) -> str:
        """Return the model folder of the checkpoint step with which the resumed run began.

        folder: the model folder of the newest step. It is returned for a new run, if the recorded
        folder is gone, or if that is of another run or another role.
        """
        before = _setting_of(_settings_of_checkpoint(run_dir_of(self.run)), key)
        if not isinstance(before, str) or not Path(before).is_dir():
            return folder
        then = Path(before).absolute()
        now = Path(folder).absolute()
        is_same_run = then.parents[2] == now.parents[2] and then.parent.name == now.parent.name
        if is_same_run:
            return before
        return folder

    def _folder(self, key: str, name: HubName, wanted: Wanted) -> Path:
        """Return the folder of a name in the hub's cache; download it if files are missing there.

        One process of a node downloads at a time, the others wait. ConfigError, with the command to
        download it, if downloading is not allowed (a plan, HF_HUB_OFFLINE) or fails.
        """
        folder = _find_in_cache(name, wanted)
        if folder is not None:
            return folder
        why = "nothing is downloaded for a plan"
        if _hub().constants.is_offline_mode():
            why = "HF_HUB_OFFLINE is set"
        elif self.download:
            with _one_of_a_node(key, name, self.run.start_seconds):
                folder = _find_in_cache(name, wanted)  # another process may have downloaded it
                try:
                    return folder or _download(name, wanted)
                except (OSError, ValueError, RuntimeError, _hub().errors.HTTPError) as err:
                    why = textwrap.shorten(f"{type(err).__name__}: {err}", _SHOWN)
        raise ConfigError(
            f"{key}: got {name}, which is no path in {Path.cwd()} and not in the hub's cache "
            f"{_cache()} ({why}), expected one of them; change the path, or download it on a node "
            f"with a network: {_download_command(name, wanted)}"
        )


def _settings_before(run_dir: Path) -> Any:
    """Return a run's settings from its latest checkpoint, otherwise from its config.yaml.

    None for a new run. The checkpoint comes first, because a later start that was refused has
    written config.yaml too, but no checkpoint.
    """
    settings = _settings_of_checkpoint(run_dir)
    if settings is not None:
        return settings
    file = run_dir / "config.yaml"
    if file.is_file():
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    return None


def _settings_of_checkpoint(run_dir: Path) -> Any:
    """Return the settings in the manifest of a run's latest checkpoint; None if unreadable."""
    folder = run_dir / "checkpoints"
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        latest = folder / (folder / "latest").read_text(encoding="utf-8").strip()
        meta = json.loads((latest / "manifest.json").read_bytes())["meta"]
        return yaml.safe_load(meta["settings"])
    return None


def _setting_of(tree: Any, key: str) -> Any:
    """The value at a dotted key of plain settings; None if there is none."""
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def _download_command(name: HubName, wanted: Wanted) -> str:
    """Return the `hf download` shell command that puts the wanted files into the cache."""
    words = ["hf", "download", name.repo]
    words += ["--repo-type", "dataset"] if name.kind == "dataset" else []
    words += ["--revision", name.revision] if name.revision else []
    for pattern in wanted.patterns if name.kind == "dataset" and wanted.files else ():
        words += ["--include", pattern]
    for pattern in wanted.ignored:
        words += ["--exclude", pattern]
    return shlex.join(words)


def _find_in_cache(name: HubName, wanted: Wanted) -> Path | None:
    """Return the snapshot folder of a name in the hub's cache; None if it lacks a needed file.

    Every pattern of wanted.files must match a file, and numbered shards must be complete. A
    revision is looked up as a branch or tag, otherwise taken as a commit; None means main.
    """
    folder = _cache() / name.cached
    revision = name.revision or "main"
    reference = folder / "refs" / revision
    if reference.is_file():
        revision = reference.read_text(encoding="utf-8").strip()
    snapshot = folder / "snapshots" / revision
    if not snapshot.is_dir():
        return None
    files = []
    for path in snapshot.rglob("*"):
        if path.is_file():
            files.append(str(path.relative_to(snapshot)))
    for pattern in wanted.files:
        matches = [name for part in pattern.split("|") for name in fnmatch.filter(files, part)]
        if not matches or _lacks_shards(matches):
            return None
    return snapshot


def _lacks_shards(files: Sequence[str]) -> bool:
    """Return whether numbered files NAME-00001-of-00003.EXT are fewer than the number says."""
    shards = []
    for match in map(_SHARD.fullmatch, files):
        if match is not None:
            shards.append(match)
    have = Counter((match[1], match[2], match[3]) for match in shards)
    return any(count < int(total) for (_, total, _), count in have.items())


def _download(name: HubName, wanted: Wanted) -> Path:
    """Download the wanted files of a name into the hub's cache; return their snapshot folder.

    ValueError if the repository lacks a file that is needed. Errors of the hub pass through.
    """
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        name.repo,
        repo_type=name.kind,
        revision=name.revision,
        allow_patterns=wanted.patterns,
        ignore_patterns=list(wanted.ignored),
    )
    Path(folder).mkdir(parents=True, exist_ok=True)  # the hub creates none if no file fits
    snapshot = _find_in_cache(replace(name, revision=Path(folder).name), wanted)
    if snapshot is None:
        raise ValueError(f"the hub has no {' or no '.join(wanted.files)} of it")
    return snapshot


@contextlib.contextmanager
def _one_of_a_node(key: str, name: HubName, seconds: float) -> Iterator[None]:
    """Context manager: hold the lock file of a repository, which one process of a node can hold.

    The file is in .locks of the hub's cache. ConfigError if it is not free after `seconds`.
    """
    folder = _cache() / ".locks"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"spmdflow-{name.cached.replace('s--', '--', 1)}.lock"
    with contextlib.ExitStack() as locks:
        try:
            locks.enter_context(_hub().utils.WeakFileLock(path, timeout=seconds))
        except TimeoutError as err:
            got = f"{name}, which another process of this node still downloads after "
            got += f"{seconds:g} s"
            do = "raise run.start_seconds, or download it before the run"
            raise ConfigError.of(key, got, "it by then", do) from err
        yield  # the kernel releases the lock if this process dies


def _cache() -> Path:
    return Path(_hub().constants.HF_HUB_CACHE).expanduser().absolute()


def _hub() -> Any:  # the module; it is imported late
    """Import and return huggingface_hub, with the submodules that this file uses."""
    import huggingface_hub
    import huggingface_hub.constants
    import huggingface_hub.errors
    import huggingface_hub.utils

    return huggingface_hub


_DATA = "|".join(f"*.{ending}" for ending in ("parquet", "json*", "csv", "tsv", "txt", "arrow"))
_README = Wanted((), ("README.md",))


def _files_of(key: str, name: HubName, config: str, readme: Path) -> tuple[str, ...]:
    """Return the patterns of the data files of a data set's config, as its README.md names them.

    config: "" means the one marked as default, then the one named "default", then the first.
    Without configs in the README.md, or files of the config, any data file matches. ConfigError if
    there is no config of that name.
    """
    try:
        facts = _hub().metadata_load(readme) if readme.is_file() else None
    except (yaml.YAMLError, ValueError):
        facts = None  # the library that reads the rows says what is wrong
    configs = (facts or {}).get("configs", ())
    entries = {str(entry.get("config_name", "default")): entry for entry in configs}
    if not entries:
        return (_DATA,)
    wanted = config or next((n for n, entry in entries.items() if entry.get("default")), "default")
    entry = entries.get(wanted) or (None if config else next(iter(entries.values())))
    if entry is None:
        got = f"the config {config!r} of {name.repo}"
        do = f"write {name.repo}:{next(iter(entries))}/train"
        raise ConfigError.of(key, got, f"one of {', '.join(entries)}", do)
    patterns = _paths(entry.get("data_files", ()))
    return patterns or (f"{entry['data_dir']}/*" if entry.get("data_dir") else _DATA,)


def _paths(files: Any) -> tuple[str, ...]:
    """Return the paths in data_files without repeats, flattened to one tuple.

    data_files may be a text, a list, {split: paths} or {split, path}, nested in each other.
    """
    if isinstance(files, str):
        return (files,)
    if isinstance(files, dict):
        return _paths(files["path"] if "path" in files else list(files.values()))
    return tuple(dict.fromkeys(path for part in files for path in _paths(part)))
