"""Script + YAML + overrides -> one typed object. The only user of omegaconf.

Every refusal is a `ConfigError` that names the key, the source it came from and the nearest key.
"""

from __future__ import annotations

import difflib
import importlib.util
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from spmdflow.config.data_source import split_place, with_places
from spmdflow.config.describe import to_yaml
from spmdflow.config.installed import (
    broken_installation,
    bundled_scripts,
    find_bundled,
    find_file,
)
from spmdflow.config.leaf import Leaf, defaults, leaves, parts, type_name
from spmdflow.config.location import resolve_paths
from spmdflow.config.reward_terms import with_located_files
from spmdflow.config.schema import REQUIRED, PPOConfig
from spmdflow.errors import ConfigError

SCRIPT_MODULE = "spmdflow_script"
"""Name under which every rank imports the script: its functions are `spmdflow_script:name`."""

ASSUME = "assume"
"""Section of examples that only a plan reads; a script's Config may have a field of that name."""
_EXAMPLES = {"int": "8", "float": "0.5", "bool": "true", "str": "text"}


@dataclass(frozen=True)
class Loaded:
    """What a run starts from."""

    cfg: Any  # an object of the script's Config class
    script: ModuleType
    yaml_text: str
    """Every setting, resolved, as YAML: what RUN_DIR/config.yaml holds."""
    assume: Mapping[str, Any] = field(default_factory=dict)
    """Examples by name, from the section `assume`: a run takes no notice, a plan reads them."""


@dataclass(frozen=True)
class _Source:
    """Settings of one origin, not yet checked."""

    name: str
    tree: dict[str, Any]


def load(
    script_path: str | Path,
    yaml_path: str | Path | None,
    overrides: Sequence[str],
    *,
    download: bool = True,
) -> Loaded:
    """Import the script and build its settings; ConfigError for anything that does not fit.

    Without `yaml_path`, the script's name with `.yaml` is read if it is there. An override is
    `dotted.key=value`, the value in YAML. Script and YAML may be bundled ones, given by name.
    download: whether models that are named and not in the hub's cache may be downloaded.
    """
    script_path = find_file(script_path, ".py")
    script = load_script(script_path)
    schema = schema_of(script)
    beside = script_path.with_suffix(".yaml")
    if yaml_path is None and beside.is_file():
        yaml_path = beside
    sources = [] if yaml_path is None else [_read_yaml(Path(yaml_path))]
    sources += [_read_override(text) for text in overrides]
    assume = {} if ASSUME in {part.name for part in fields(schema)} else _take_examples(sources)
    cfg = _build(schema, sources)
    resolve_paths(cfg, download=download)
    return Loaded(cfg, script, to_yaml(cfg), assume)


def load_script(path: str | Path) -> ModuleType:
    """The algorithm's module, imported as `spmdflow_script`; it must define main(flow, cfg)."""
    path = find_file(path, ".py")
    if not path.is_file():
        bundled = bundled_scripts()
        known = [*map(str, path.parent.glob("*.py")), *bundled]
        near = difflib.get_close_matches(str(path), known, 1)
        hint = f"; nearest is {near[0]}" if near else ""
        raise ConfigError(
            f"script: no file {path} in {Path.cwd()}, expected a Python file with main(flow, cfg) "
            f"or a bundled script ({', '.join(bundled)}){hint}; give its path or that name"
        )
    if str(path.parent.resolve()) not in sys.path:
        sys.path.append(str(path.parent.resolve()))
    module = _execute(path)
    if not callable(getattr(module, "main", None)):
        raise ConfigError(f"script: {path} has no main, expected main(flow, cfg); define it")
    return module


def schema_of(script: ModuleType) -> type:
    """The script's settings class: its `Config` if it defines one, else `PPOConfig`."""
    schema = getattr(script, "Config", PPOConfig)
    if not (isinstance(schema, type) and is_dataclass(schema)):
        raise ConfigError(
            f"script: Config is {schema!r}, expected a dataclass; "
            f"derive it from spmdflow.PPOConfig or add @dataclass"
        )
    return schema


def _execute(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(SCRIPT_MODULE, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[SCRIPT_MODULE] = module  # before it runs: its dataclasses look themselves up
    try:
        spec.loader.exec_module(module)
    except (ImportError, SyntaxError) as err:
        del sys.modules[SCRIPT_MODULE]
        ours = broken_installation(err, path) if isinstance(err, ImportError) else None
        raise ConfigError(
            ours
            or f"script: {path} cannot be imported: {type(err).__name__}: {err}; "
            f"expected a Python file that imports; correct it or install what it needs"
        ) from err
    return module


def _read_yaml(path: Path) -> _Source:
    path = find_file(path, ".yaml")
    if not path.is_file():
        raise ConfigError(
            f"config: no file {path} in {Path.cwd()}, expected a YAML file; give its path or "
            f"leave it out for the defaults"
        )
    try:
        tree: Any = OmegaConf.to_container(OmegaConf.load(path))
    except yaml.YAMLError as err:
        raise ConfigError(
            f"{path}: got {' '.join(str(err).split())}, expected YAML; mend that line"
        ) from err
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: got {type(tree).__name__}, expected key: value lines; mend it")
    return _Source(str(path), _locate_paths(tree, path.parent))


def _locate_paths(tree: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Paths that are not in the current directory but in the YAML's, or bundled, become those."""
    located = {}
    for name, value in tree.items():
        if name == "function":
            value = with_located_files(value, lambda file: _locate(file, folder))
        elif name in ("train_path", "eval_path"):
            value = with_places(value, lambda place: _locate_place(place, folder))
        elif isinstance(value, dict):
            value = _locate_paths(value, folder)
        elif isinstance(value, str) and (name == "path" or str(name).endswith("_path")):
            value = _locate(value, folder)
        located[name] = value
    return located


def _locate_place(place: str, folder: Path) -> str:
    path, split = split_place(place)
    return _locate(path, folder) + split


def _locate(value: str, folder: Path) -> str:
    if "${" in value or Path(value).exists():
        return value
    beside = folder / value  # of an absolute value: the value
    return str(beside if beside.exists() else find_bundled(value) or value)


def _read_override(text: str) -> _Source:
    key, equals, _ = text.partition("=")
    if not equals or not key or "[" in key:
        raise ConfigError(
            f"command line: got {text!r}, expected key=value with a dotted key; "
            f"give lists whole, as in actor.optimizer.betas=[0.9,0.95]"
        )
    try:
        tree = OmegaConf.to_container(OmegaConf.from_dotlist([text]))
    except (yaml.YAMLError, OmegaConfBaseException) as err:
        raise ConfigError(
            f"command line: got {text!r}, expected a value in YAML; quote it or close its brackets"
        ) from err
    assert isinstance(tree, dict), tree
    return _Source("command line", {str(name): value for name, value in tree.items()})


def _take_examples(sources: Sequence[_Source]) -> dict[str, Any]:
    """Take the section `assume` out of every source; the last word on a name counts."""
    found: dict[str, Any] = {}
    for source in sources:
        section = source.tree.pop(ASSUME, None)
        if section is not None and not isinstance(section, dict):
            raise ConfigError(
                f"{source.name}: {ASSUME} got {section!r}, expected examples by name; write "
                f"{ASSUME}: {{scores: [0, 1]}} or {ASSUME}.scores=0.5"
            )
        found |= _flat(section or {})
    return found


def _flat(tree: dict[Any, Any], prefix: str = "") -> dict[str, Any]:
    """{"judge": {"describe": x}} -> {"judge.describe": x}."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        found |= _flat(value, f"{key}.") if isinstance(value, dict) else {key: value}
    return found


def _build(schema: type, sources: Iterable[_Source]) -> Any:
    OmegaConf.register_resolver("first_of", _first_of, replace=True)
    known = {leaf.key: leaf for leaf in leaves(defaults(schema))}
    tree = OmegaConf.structured(schema)
    for source in sources:
        _check_keys(source.tree, schema, "", source.name, known)
        try:
            tree = OmegaConf.merge(tree, source.tree)
        except OmegaConfBaseException as err:
            raise _wrong_type(err, source, known) from err
    assert isinstance(tree, DictConfig), tree
    _check_required(tree, known)
    raw = OmegaConf.to_container(tree, resolve=False)
    try:
        OmegaConf.resolve(tree)
        return OmegaConf.to_object(tree)
    except OmegaConfBaseException as err:
        value = _lookup(raw, str(err.full_key))
        raise ConfigError(
            f"{err.full_key}: got {value}, expected ${{key}} of a setting "
            f"with a fitting value or ${{oc.env:NAME}} of a variable that is set; correct it "
            f"({str(err).splitlines()[0]})"
        ) from err


def _first_of(*keys: str, _root_: DictConfig) -> Any:
    """`${first_of:a,b}`: the first of the named settings that has a value."""
    for key in keys:
        value = OmegaConf.select(_root_, key, default=None)
        if value is not None:
            return value
    return REQUIRED


def _check_keys(
    tree: dict[str, Any], schema: type, prefix: str, source: str, known: dict[str, Leaf]
) -> None:
    """Every key is a field of its group, every group a map (or null)."""
    groups = parts(schema)
    names = {
        field.key.removeprefix(prefix).split(".")[0]
        for field in known.values()
        if field.key.startswith(prefix)
    }
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if name not in names:
            raise ConfigError(
                f"{source}: unknown key {key}{_nearest(key, [*known, ASSUME])}; "
                f"--help lists every key"
            )
        if name in groups and isinstance(value, dict):
            _check_keys(value, groups[name], key + ".", source, known)
        elif name in groups and value is not None:
            example = next(leaf for leaf in known if leaf.startswith(key + "."))
            raise ConfigError(
                f"{source}: {key} got {value!r} ({type(value).__name__}), expected a group of "
                f"settings; set its keys, such as {example}"
            )


def _nearest(key: str, known: Iterable[str]) -> str:
    candidates = list(known)
    candidates += sorted({leaf.rpartition(".")[0] for leaf in candidates} - {""})
    root, name = key.split(".")[0], key.split(".")[-1]
    same_name = [leaf for leaf in candidates if leaf.split(".")[-1] == name]
    same_group = [leaf for leaf in same_name if leaf.startswith(root + ".")]
    near = same_group or difflib.get_close_matches(key, candidates, 1) or same_name
    return f", nearest is {near[0]}" if near else ""


def _wrong_type(
    err: OmegaConfBaseException, source: _Source, known: dict[str, Leaf]
) -> ConfigError:
    key = str(err.full_key or "").partition("[")[0]
    leaf = known.get(key)
    value = _lookup(source.tree, key)
    if leaf is None:
        return ConfigError(
            f"{source.name}: {key} got {value!r}, expected a group of settings; leave it out for "
            f"its defaults"
        )
    return ConfigError(
        f"{source.name}: {key} got {value!r} ({type(value).__name__}), expected "
        f"{type_name(leaf.hint)}; give one, such as {key}={_example(leaf)}"
    )


def _example(leaf: Leaf) -> str:
    if leaf.value in (None, REQUIRED) or "${" in str(leaf.value):
        return _EXAMPLES.get(type_name(leaf.hint).split(" ")[0], "value")
    return str(leaf.value).lower() if isinstance(leaf.value, bool) else str(leaf.value)


def _check_required(tree: DictConfig, known: dict[str, Leaf]) -> None:
    raw = OmegaConf.to_container(tree, resolve=False)
    missing = [key for key in known if _lookup(raw, key) == REQUIRED]
    if missing:
        sentences = "".join(f"\n  {key}: {known[key].doc}" for key in missing)
        raise ConfigError(
            f"missing {', '.join(missing)}, expected a value for each; set them in the YAML or as "
            f"{missing[0]}=VALUE{sentences}"
        )


def _lookup(tree: Any, key: str) -> Any:
    """The value at a dotted key; None where a group on the way is None."""
    for name in key.split("."):
        tree = tree[name] if isinstance(tree, dict) else None
    return tree
