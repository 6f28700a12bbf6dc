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
COMMAND_LINE = "command line"
"""Name of the source of settings that words of the command line set."""
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
    """Read a YAML file of settings, or the bundled one of that name if the file does not exist.

    Its paths that exist only next to the file, or bundled, are replaced by where they are.
    ConfigError if there is no such file, or it is no YAML in UTF-8 with a map of settings, or has
    an invalid key or ${reference}.
    """
    path = find_file(path, ".yaml")
    if not path.is_file():
        raise ConfigError(
            f"config: no file {path} in {Path.cwd()}, expected a YAML file; give its path or "
            f"omit it for the defaults"
        )
    try:
        tree: Any = OmegaConf.to_container(OmegaConf.load(path))
    except yaml.YAMLError as err:
        raise _syntax_error(path, err) from err
    except UnicodeDecodeError as err:
        got = f"a byte that is not UTF-8 at position {err.start}"
        do = "save the file in that encoding"
        raise ConfigError.of(path, got, "text in UTF-8", do) from err
    except OmegaConfBaseException as err:  # some of them are ValueErrors
        raise _unreadable(path, err) from err
    except ValueError as err:
        raise _too_long(path, err) from err
    except OSError as err:
        if err.errno is None:  # omegaconf raises one for a file that is one number
            raise _not_settings(path, yaml.safe_load(path.read_text("utf-8"))) from err
        do = "correct its rights, or give another file"
        raise ConfigError.of(path, err.strerror, "a file that can be read", do) from err
    if not isinstance(tree, dict):
        raise _not_settings(path, tree)
    return Source(str(path), _locate_paths(tree, path.parent), path)


def _syntax_error(path: Path, err: yaml.YAMLError) -> ConfigError:
    """Return the ConfigError for a file that is no YAML, with the line and column of the problem.

    Lines and columns count from 1. An error of PyYAML without a position is quoted as it is.
    """
    why = " ".join(str(err).split())
    if isinstance(err, yaml.MarkedYAMLError) and err.problem and err.problem_mark:
        mark = err.problem_mark
        why = f"{err.problem}, line {mark.line + 1}, column {mark.column + 1}"
    got = f"invalid YAML ({why})"
    return ConfigError.of(path, got, "key: value lines", "correct that line")


def _not_settings(path: Path, tree: object) -> ConfigError:
    """Return the ConfigError for a YAML file that is a list or a single value, not a map."""
    got = "a list" if isinstance(tree, list) else f"the single value {tree!r}"
    do = "write lines such as total_steps: 10"
    return ConfigError.of(path, got, "settings as key: value lines", do)


def _too_long(where: object, err: ValueError) -> ConfigError:
    """The error for a number that Python does not read (sys.set_int_max_str_digits)."""
    return ConfigError.of(where, f"a number ({err})", "a shorter one", "shorten it")


def _unreadable(path: Path, err: OmegaConfBaseException) -> ConfigError:
    """Return the ConfigError for a file that is valid YAML but that omegaconf refuses.

    It names what is wrong: no map at the top, a key that is no name, or the setting whose
    ${reference} cannot be parsed.
    """
    key = str(err.full_key or "").partition("[")[0]
    tree = yaml.safe_load(path.read_text("utf-8"))
    if not isinstance(tree, dict):
        return _not_settings(path, tree)
    if isinstance(err, KeyValidationError):
        where = f"a key under {key}" if key else "a key"
        return ConfigError.of(path, f"{err.key!r} as {where}", "a name", "correct the key")
    return ConfigError(
        f"{path}: {key} got {flat(tree).get(key)!r}, expected a value, ${{key}} of a setting or "
        f"${{oc.env:NAME}}; correct what is in the braces"
    )


def _locate_paths(tree: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a copy of the settings with each path, at any depth, replaced by where it is found.

    Values of `path`, `*_path`, `train_path`, `eval_path`, and the files in `function` and
    `environment` are paths. Each is located as in `_locate`.
    """
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
    """Return a path unchanged if it exists from the current directory or contains "${".

    Otherwise return the same path in `folder` if that exists, then the bundled one, then the path
    unchanged.
    """
    if "${" in value or Path(value).exists():
        return value
    in_folder = folder / value  # of an absolute value: the value
    return str(in_folder if in_folder.exists() else find_bundled(value) or value)


def read_override(text: str) -> Source:
    """Read one word of the command line, `dotted.key=value` with the value in YAML, as a Source.

    A path that exists only among the bundled files is replaced by where it is. ConfigError for a
    word without "=" or key, with "[" in its key, that is not UTF-8, or whose value is no YAML.
    """
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
    settings = {str(name): value for name, value in tree.items()}
    return Source(COMMAND_LINE, _locate_paths(settings, Path()), key=key)


def sort_words(words: Sequence[str]) -> tuple[str | None, str | None, tuple[str, ...]]:
    """Split the words of a command line into SCRIPT, CONFIG.yaml (None if absent) and overrides.

    Words with "=" are overrides. Of the others the first is the script, and one more may be there
    if it ends in .yaml or .yml. ConfigError for any further word.
    """
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
    """Remove the section `assume` from every source in place; return its entries by dotted name.

    A later source wins. ConfigError if a section is no map.
    """
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
    """Return the folder of the bundled scripts: spmdflow/algos, or algos/ next to the package.

    The latter is where a checkout has it.
    """
    inside = PACKAGE / _FOLDER_NAME
    if inside.is_dir():
        return inside
    return PACKAGE.parent / _FOLDER_NAME


def bundled_scripts() -> list[str]:
    """Short names of the bundled scripts, such as ppo."""
    return sorted(path.stem for path in bundled_folder().glob("*.py"))


def find_bundled(name: str | Path, suffix: str = "") -> Path | None:
    """Return the bundled file or folder that `name` means; None if there is none.

    With the suffix .py, `ppo`, `ppo.py` and `algos/ppo.py` all mean the script of that name.
    Absolute paths and paths with ".." never mean a bundled one.
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
    """Return the path if it is a file, otherwise the bundled file of that name, otherwise the path.

    suffix: is appended to look for a bundled name without one, such as ".py".
    """
    path = Path(name)
    if path.is_file():
        return path
    return find_bundled(path, suffix) or path


def broken_installation(err: ImportError, script: Path) -> str | None:
    """Return a message if spmdflow, not the script, caused this ImportError; otherwise None.

    spmdflow caused it if the traceback passes through a file of spmdflow below the script's frame.
    The message tells a missing module of spmdflow from a missing dependency.
    """
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
