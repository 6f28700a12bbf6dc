"""Settings made ready for a run: loaded, completed, placed, checked. Starts nothing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from spmdflow.config.check import check
from spmdflow.config.installed import find_file
from spmdflow.config.load import SCRIPT_MODULE, Loaded, complete, load, load_script
from spmdflow.config.location import to_yaml
from spmdflow.errors import ConfigError


def load_settings(
    script: str | Path,
    config: str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    num_ranks: int | None = None,
) -> Any:
    """The settings of a script as `spmdflow.run` would load them: an object of its settings class.

    script and config are paths or bundled names; without config, the script's own YAML counts.
    overrides are "dotted.key=value". num_ranks: also check them for a run on so many ranks, and
    place it if placement=auto. Changes made afterwards are checked by `spmdflow.launch`.
    ConfigError for anything that does not fit.
    """
    loaded = load(script, config, overrides)
    return loaded.cfg if num_ranks is None else prepare(loaded, num_ranks)[0].cfg


def load_for_launch(script: ModuleType | str | Path, cfg: Any, settings: Sequence[str]) -> Loaded:
    """What `spmdflow.launch` was given, loaded and completed; ConfigError if it does not fit."""
    if cfg is None:
        if isinstance(script, ModuleType):
            raise ConfigError(
                f"launch: got module {script.__name__} without settings, expected cfg; pass "
                f"its settings as an object, or the script's path and settings"
            )
        return load(script, None, settings)
    if settings:
        raise ConfigError.of(
            "launch", f"cfg and settings {list(settings)}", "one of them", "set them in cfg"
        )
    cfg = complete(cfg)
    return Loaded(cfg, _module_of(script), to_yaml(cfg))


def prepare(
    loaded: Loaded, world_size: int, *, node_size: int | None = None
) -> tuple[Loaded, str | None]:
    """Place and check settings for a run on world_size ranks, node_size on each machine.

    Also the text that says where placement=auto put the models. Every rank searches by itself and
    finds the same. ConfigError if something does not fit.
    """
    from spmdflow.mapping.hardware import load_hardware

    hardware_name, text = loaded.cfg.run.hardware, None
    if hardware_name is not None:
        load_hardware(hardware_name)
    if getattr(loaded.cfg, "placement", None) == "auto":
        from spmdflow.plan.auto import placed_text, resolve
        from spmdflow.plan.workload import hardware_of

        hardware = hardware_of(hardware_name, node_size or world_size, world_size=world_size)
        found = resolve(loaded.script, loaded.cfg, world_size, hardware, examples=loaded.assume)
        loaded = replace(loaded, cfg=found.cfg, yaml_text=to_yaml(found.cfg))
        text = placed_text(found)
    check(loaded.cfg, world_size)
    return loaded, text


def _module_of(script: ModuleType | str | Path) -> ModuleType:
    """The script's module; a script that is imported already is not executed again."""
    if isinstance(script, ModuleType):
        if script.__name__ == SCRIPT_MODULE:
            sys.modules[SCRIPT_MODULE] = script  # ranks find its functions by that name
        return script
    known = sys.modules.get(SCRIPT_MODULE)
    path = find_file(script, ".py").resolve()
    if known is not None and known.__file__ and Path(known.__file__).resolve() == path:
        return known
    return load_script(script)
