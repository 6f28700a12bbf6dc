"""Where settings come from: YAML files, words of the command line, and the bundled scripts.

The bundled scripts, their settings and data lie in spmdflow/algos (in a checkout in algos/, next
to the package) and are found by name. A path that exists in the current directory wins.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import KeyValidationError, OmegaConfBaseException

from spmdflow.config.data_source import split_location, with_locations
from spmdflow.config.leaf import flat
from spmdflow.config.reward import with_located_files
from spmdflow.errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[1]
_FOLDER_NAME = "algos"
ASSUME = "assume"
"""Section of examples that only a plan reads; a settings class may have a field of that name."""


@dataclass(frozen=True)
class Source:
    """Settings of one file or of one word of the command line, not yet checked."""

    name: str
    tree: dict[str, Any]
    file: Path | None = None
    """None: the command line."""
    key: str = ""
    """What a word of the command line gives a value to."""


def read_yaml(path: Path) -> Source:
    """The settings of a file, bundled ones by name; ConfigError for what is no YAML of settings."""
    path = find_file(path, ".yaml")
    if not path.is_file():
        raise ConfigError(
            f"config: no file {path} in {Path.cwd()}, expected a YAML file; give its path or "
            f"omit it for the defaults"
        )
    try:
        tree: Any = OmegaConf.to_container(OmegaConf.load(path))
    except yaml.YAMLError as err:
        raise ConfigError.of(path, " ".join(str(err).split()), "YAML", "correct that line") from err
    except UnicodeDecodeError as err:
        got = f"a byte that is not UTF-8 at position {err.start}"
        do = "save the file in that encoding"
        raise ConfigError.of(path, got, "text in UTF-8", do) from err
    except OmegaConfBaseException as err:  # some of them are ValueErrors
        raise _unreadable(path, err) from err
    except ValueError as err:
        raise _too_long(path, err) from err
    except OSError as err:  # also of a file that is one number
        raise ConfigError.of(path, err, "a file of key: value lines", "fix the file") from err
    if not isinstance(tree, dict):
        raise ConfigError.of(path, type(tree).__name__, "key: value lines", "write settings there")
    return Source(str(path), _locate_paths(tree, path.parent), path)


def _too_long(where: object, err: ValueError) -> ConfigError:
    """The error for a number that Python does not read (sys.set_int_max_str_digits)."""
    return ConfigError.of(where, f"a number ({err})", "a shorter one", "shorten it")


def _unreadable(path: Path, err: OmegaConfBaseException) -> ConfigError:
    """The error for a file that is YAML but has an invalid key or ${reference}."""
    key = str(err.full_key or "").partition("[")[0]
    tree = yaml.safe_load(path.read_text("utf-8"))
    if not isinstance(tree, dict):
        return ConfigError.of(path, type(tree).__name__, "key: value lines", "write settings there")
    if isinstance(err, KeyValidationError):
        where = f"a key under {key}" if key else "a key"
        return ConfigError.of(path, f"{err.key!r} as {where}", "a name", "correct the key")
    return ConfigError(
        f"{path}: {key} got {flat(tree).get(key)!r}, expected a value, ${{key}} of a setting or "
        f"${{oc.env:NAME}}; correct what is in the braces"
    )


def _locate_paths(tree: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Replace paths that exist next to the YAML, or bundled, but not in the current directory."""
    located = {}
    for name, value in tree.items():
        if name in ("function", "environment"):
            value = with_located_files(value, lambda file: _locate(file, folder))
        elif name in ("train_path", "eval_path"):
            value = with_locations(value, partial(_locate_source, folder=folder))
        elif isinstance(value, dict):
            value = _locate_paths(value, folder)
        elif isinstance(value, str) and (name == "path" or str(name).endswith("_path")):
            value = _locate(value, folder)
        located[name] = value
    return located


def _locate_source(location: str, folder: Path) -> str:
    """The same as `_locate` for a source of rows, which may have a split behind its path."""
    path, split = split_location(location)
    return _locate(path, folder) + split


def _locate(value: str, folder: Path) -> str:
    """A path, replaced by the same one in the folder or bundled, if only that exists."""
    if "${" in value or Path(value).exists():
        return value
    in_folder = folder / value  # of an absolute value: the value
    return str(in_folder if in_folder.exists() else find_bundled(value) or value)


def read_override(text: str) -> Source:
    """The setting of one word of the command line; ConfigError for what is no key=value."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):  # how Python keeps such bytes
        raise ConfigError.of(
            "command line", f"{text!a}", "text in UTF-8", "write it again in that encoding"
        )
    key, equals, _ = text.partition("=")
    if not equals or not key or "[" in key:
        got = repr(text)
        do = "give lists whole, as in actor.optimizer.betas=[0.9,0.95]"
        raise ConfigError.of("command line", got, "key=value with a dotted key", do)
    try:
        tree = OmegaConf.to_container(OmegaConf.from_dotlist([text]))
    except (yaml.YAMLError, OmegaConfBaseException) as err:
        raise ConfigError.of(
            "command line", repr(text), "a value in YAML", "quote it or close its brackets"
        ) from err
    except ValueError as err:
        raise _too_long(f"command line: {key}", err) from err
    assert isinstance(tree, dict), tree
    return Source("command line", {str(name): value for name, value in tree.items()}, key=key)


def sort_words(words: Sequence[str]) -> tuple[str | None, str | None, tuple[str, ...]]:
    """SCRIPT, CONFIG.yaml and overrides of a command line; ConfigError for any other word."""
    names = []
    for word in words:
        if "=" not in word:
            names.append(word)
    configs = []
    for name in names[1:]:
        if name.endswith((".yaml", ".yml")):
            configs.append(name)
    surplus = [name for name in names[1:] if name not in configs] + configs[1:]
    if surplus:
        expected = "SCRIPT [CONFIG.yaml] [key=value ...]"
        do = "write settings as key=value"
        raise ConfigError.of("command line", repr(surplus[0]), expected, do)
    overrides = tuple(word for word in words if "=" in word)
    return next(iter(names), None), next(iter(configs), None), overrides


def take_examples(sources: Sequence[Source]) -> dict[str, Any]:
    """Take the section `assume` out of every source; a later source wins."""
    examples: dict[str, Any] = {}
    for source in sources:
        section = source.tree.pop(ASSUME, None)
        if section is not None and not isinstance(section, dict):
            raise ConfigError(
                f"{source.name}: {ASSUME} got {section!r}, expected examples by name; write "
                f"{ASSUME}: {{scores: [0, 1]}} or {ASSUME}.scores=0.5"
            )
        examples |= flat(section or {})
    return examples


def bundled_folder() -> Path:
    """The folder of the bundled scripts."""
    inside = PACKAGE / _FOLDER_NAME
    if inside.is_dir():
        return inside
    return PACKAGE.parent / _FOLDER_NAME


def bundled_scripts() -> list[str]:
    """Short names of the bundled scripts, such as ppo."""
    return sorted(path.stem for path in bundled_folder().glob("*.py"))


def find_bundled(name: str | Path, suffix: str = "") -> Path | None:
    """The bundled file or folder that `name` means, if there is one.

    With the suffix .py, `ppo`, `ppo.py` and `algos/ppo.py` all mean the script of that name.
    """
    path = Path(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        return None
    parts = path.parts[1:] if path.parts[0] == _FOLDER_NAME else path.parts
    bundled = bundled_folder().joinpath(*parts)
    if suffix and not bundled.suffix:
        bundled = bundled.with_suffix(suffix)
    if parts and bundled.exists():
        return bundled
    return None


def find_file(name: str | Path, suffix: str) -> Path:
    """The file of that name in the current directory, or the bundled one, or just the name."""
    path = Path(name)
    if path.is_file():
        return path
    return find_bundled(path, suffix) or path


def broken_installation(err: ImportError, script: Path) -> str | None:
    """The message if a module of spmdflow failed to import; None if the script itself did."""
    files = []
    for frame in traceback.extract_tb(err.__traceback__):
        files.append(Path(frame.filename).resolve())
    script = script.resolve()
    below = files[files.index(script) + 1 :] if script in files else []
    ours = []
    for file in below:
        if PACKAGE in file.parents:
            ours.append(file)
    if not ours:
        return None
    missing = err.name or "it"
    if missing.split(".")[0] == PACKAGE.name:
        return (
            f"installation: {PACKAGE} is incomplete ({err}), expected every module of spmdflow; "
            f"install spmdflow again"
        )
    return (
        f"installation: {ours[-1]} cannot import what it needs ({err}), expected {missing} next to "
        f"spmdflow; install it (`spmdflow doctor` lists what is missing)"
    )
