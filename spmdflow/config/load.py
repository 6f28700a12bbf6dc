"""Script + YAML + overrides -> one typed object. With `source`, the only user of omegaconf.

Every error names the key, the source it came from and the nearest key; all are told together.
"""

from __future__ import annotations

import difflib
import importlib.util
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from spmdflow.config.leaf import (
    NOT_GIVEN,
    REQUIRED,
    Errors,
    Leaf,
    defaults,
    follow,
    leaves,
    parts,
    type_name,
)
from spmdflow.config.location import resolve_paths, to_yaml
from spmdflow.config.schema import PPOConfig
from spmdflow.config.source import (
    ASSUME,
    Source,
    broken_installation,
    bundled_scripts,
    find_file,
    read_override,
    read_yaml,
    take_examples,
)
from spmdflow.errors import ConfigError

SCRIPT_MODULE = "spmdflow_script"
"""Name under which every rank imports the script: its functions are `spmdflow_script:name`."""

_EXAMPLES = {"int": "8", "float": "0.5", "bool": "true", "str": "text"}


@dataclass(frozen=True)
class Loaded:
    """What a run starts from."""

    cfg: Any  # an object of the script's settings class
    script: ModuleType
    yaml_text: str
    """Every setting, resolved, as YAML: what RUN_DIR/config.yaml holds."""
    assume: Mapping[str, Any] = field(default_factory=dict)
    """Examples by name, from the section `assume`: a run takes no notice, a plan reads them."""


def load(
    script_path: str | Path,
    yaml_path: str | Path | None,
    overrides: Sequence[str],
    *,
    download: bool = True,
) -> Loaded:
    """Import the script and build its settings; one ConfigError for all that does not fit.

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
    sources = _read(yaml_path, overrides)
    if yaml_path is not None and hasattr(schema, "take_over"):
        tree = schema.take_over(sources[0].tree, find_file(yaml_path, ".yaml"))
        sources[0] = Source(sources[0].name, tree)
    assume = {} if ASSUME in {part.name for part in fields(schema)} else take_examples(sources)
    cfg = _build(schema, sources)
    resolve_paths(cfg, download=download)
    follow(cfg)
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
    """The settings class: that of `cfg` in `main(flow: Flow, cfg: GRPOConfig)`, else `PPOConfig`.

    ConfigError if it is no dataclass or cannot be read.
    """
    try:
        hints, names = get_type_hints(script.main), list(signature(script.main).parameters)
    except (NameError, TypeError, ValueError) as err:
        raise ConfigError.of(
            "script", f"{err} in the annotations of main", "classes", "import them in the script"
        ) from err
    schema = hints.get(names[1], Any) if len(names) > 1 else Any
    if schema is Any and not hasattr(script, "Config"):
        return PPOConfig
    if not (isinstance(schema, type) and is_dataclass(schema)):
        got = "main(flow, cfg) beside a class Config" if schema is Any else f"cfg: {schema!r}"
        raise ConfigError.of(
            "script", got, "a dataclass of settings", "write main(flow: Flow, cfg: PPOConfig)"
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


def _read(yaml_path: str | Path | None, overrides: Sequence[str]) -> list[Source]:
    """The file, then each word of the command line; ConfigError for all that cannot be read."""
    errors, sources = Errors(), []
    if yaml_path is not None:
        with errors.noted():
            sources.append(read_yaml(Path(yaml_path)))
    for text in overrides:
        with errors.noted():
            sources.append(read_override(text))
    errors.raise_all()
    return sources


def _build(schema: type, sources: Iterable[Source]) -> Any:
    OmegaConf.register_resolver("first_of", _first_of, replace=True)
    known = {leaf.key: leaf for leaf in leaves(defaults(schema))}
    tree = OmegaConf.structured(schema)
    errors = Errors()
    for source in sources:
        _check_keys(source.tree, schema, "", source.name, known, errors)
        tree = _merge(tree, source, known, errors)
    return _resolve(tree, known, errors)


def complete(cfg: Any, *, download: bool = True) -> Any:
    """A copy of settings made in Python: references filled in, paths located, as `load` does it.

    cfg: of a script's settings class. ConfigError names what is missing or of a wrong type.
    """
    if not is_dataclass(cfg) or isinstance(cfg, type):
        raise ConfigError(
            f"settings: got {cfg!r}, expected an object of the script's settings class; make "
            f"one with spmdflow.load_settings or as PPOConfig()"
        )
    OmegaConf.register_resolver("first_of", _first_of, replace=True)
    known = {leaf.key: leaf for leaf in leaves(defaults(type(cfg)))}
    try:
        tree = OmegaConf.structured(cfg)
    except OmegaConfBaseException as err:
        key = str(err.full_key or "").partition("[")[0]
        raise _wrong_type(key, Source("settings", asdict(cfg)), known) from err
    found = _resolve(tree, known, Errors())
    resolve_paths(found, download=download)
    follow(found)
    return found


def _resolve(tree: Any, known: dict[str, Leaf], errors: Errors) -> Any:
    """The typed object of a tree: nothing missing, every `${...}` filled in."""
    assert isinstance(tree, DictConfig), tree
    plain = OmegaConf.to_container(tree, resolve=False)
    written = {key: _lookup(plain, key) for key in known}
    missing = [key for key, value in written.items() if value == REQUIRED]
    for key in missing:
        OmegaConf.update(tree, key, NOT_GIVEN)
    if missing:
        errors.add(_missing(missing, known))
    references = {key: value for key, value in written.items() if "${" in str(value)}
    broken = [_unresolved(tree, key, value) for key, value in references.items()]
    for error in filter(None, broken):
        errors.add(error)
    if any(broken):
        errors.raise_all()
    cfg = OmegaConf.to_object(tree)
    errors.raise_all(cfg)
    return cfg


def _merge(tree: Any, source: Source, known: dict[str, Leaf], errors: Errors) -> Any:
    """The tree with a source's settings; what has a wrong type is noted and left out."""
    while True:
        try:
            return OmegaConf.merge(tree, source.tree)
        except OmegaConfBaseException as err:
            key = str(err.full_key or "").partition("[")[0]
            errors.add(_wrong_type(key, source, known))
            if not _remove(source.tree, key):
                return tree


def _remove(tree: Any, key: str) -> bool:
    """Take the value at a dotted key out of a tree; False if there is none."""
    *groups, name = key.split(".")
    group = _lookup(tree, ".".join(groups)) if groups else tree
    return isinstance(group, dict) and group.pop(name, group) is not group


def _unresolved(tree: DictConfig, key: str, written: Any) -> ConfigError | None:
    """What is wrong with the ${reference} that was written for a key; None: nothing. Any: it."""
    group, _, name = key.rpartition(".")
    try:
        part = OmegaConf.select(tree, group) if group else tree
        value = part[name]
        if OmegaConf.is_config(value):
            OmegaConf.resolve(value)
        return None
    except (OmegaConfBaseException, KeyError) as err:
        return ConfigError(
            f"{key}: got {written}, expected ${{key}} of a setting "
            f"with a fitting value or ${{oc.env:NAME}} of a variable that is set; correct it "
            f"({str(err).splitlines()[0]})"
        )


def _first_of(*keys: str, _root_: DictConfig) -> Any:
    """`${first_of:a,b}`: the first of the named settings that has a value."""
    for key in keys:
        value = OmegaConf.select(_root_, key, default=None)
        if value is not None:
            return value
    return REQUIRED


def _check_keys(
    tree: dict[str, Any],
    schema: type,
    prefix: str,
    source: str,
    known: dict[str, Leaf],
    errors: Errors,
) -> None:
    """Every key is a field of its group, every group a map (or null); others are taken out."""
    groups = parts(schema)
    names = {
        field.key.removeprefix(prefix).split(".")[0]
        for field in known.values()
        if field.key.startswith(prefix)
    }
    for name, value in list(tree.items()):
        key = f"{prefix}{name}"
        if name in groups and isinstance(value, dict):
            _check_keys(value, groups[name], key + ".", source, known, errors)
            continue
        error = None
        if name not in names:
            error = f"unknown key {key}{_nearest(key, [*known, ASSUME])}; --help lists every key"
        elif name in groups and value is not None:
            example = next(leaf for leaf in known if leaf.startswith(key + "."))
            error = (
                f"{key} got {value!r} ({type(value).__name__}), expected a group of settings; "
                f"set its keys, such as {example}"
            )
        elif isinstance(value, dict) and "list of" in type_name(known[key].hint):
            error = _of_type(value, known[key])
        if error is not None:
            errors.add(ConfigError(f"{source}: {error}"))
            del tree[name]


def _nearest(key: str, known: Iterable[str]) -> str:
    candidates = list(known)
    candidates += sorted({leaf.rpartition(".")[0] for leaf in candidates} - {""})
    root, name = key.split(".")[0], key.split(".")[-1]
    same_name = [leaf for leaf in candidates if leaf.split(".")[-1] == name]
    same_group = [leaf for leaf in same_name if leaf.startswith(root + ".")]
    near = same_group or difflib.get_close_matches(key, candidates, 1) or same_name
    return f", nearest is {near[0]}" if near else ""


def _wrong_type(key: str, source: Source, known: dict[str, Leaf]) -> ConfigError:
    leaf = known.get(key)
    value = _lookup(source.tree, key)
    if leaf is None:
        return ConfigError(
            f"{source.name}: {key} got {value!r}, expected a group of settings; leave it out for "
            f"its defaults"
        )
    return ConfigError(f"{source.name}: {_of_type(value, leaf)}")


def _of_type(value: Any, leaf: Leaf) -> str:
    """What to say of a value of the wrong type. Any: the value."""
    return (
        f"{leaf.key} got {value!r} ({type(value).__name__}), expected {type_name(leaf.hint)}; "
        f"give one, such as {leaf.key}={_example(leaf)}"
    )


def _example(leaf: Leaf) -> str:
    if leaf.value in (None, REQUIRED) or "${" in str(leaf.value):
        return _EXAMPLES.get(type_name(leaf.hint).split(" ")[0], "value")
    return str(leaf.value).lower() if isinstance(leaf.value, bool) else str(leaf.value)


def _missing(missing: Sequence[str], known: dict[str, Leaf]) -> ConfigError:
    sentences = "".join(f"\n  {key}: {known[key].doc}" for key in missing)
    return ConfigError(
        f"missing {', '.join(missing)}, expected a value for each; set them in the YAML or as "
        f"{missing[0]}=VALUE{sentences}"
    )


def _lookup(tree: Any, key: str) -> Any:
    """The value at a dotted key; None where a group on the way is None."""
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree
