"""Python code in a model folder (`auto_map`): it is never run; folders that need it are refused.

transformers would fetch and run it, or ask for permission on the terminal. Here every call passes
`trust_remote_code=False`, and a folder that needs its code is refused before ranks connect.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from spmdflow.errors import ConfigError
from spmdflow.weights.architecture import read_json

_CONFIG = "config.json"
_TOKENIZER = "tokenizer_config.json"


def refuse_own_code(key: str, folder: Path) -> None:
    """Raise ConfigError if a folder's model or tokenizer needs Python code of the folder.

    That is: config.json has an auto_map and transformers does not know its model_type, or
    tokenizer_config.json has one and transformers does not know the tokenizer. Code that is only an
    alternative is no error, and so is a missing file. key: the setting that has the folder.
    """
    config = _read_or_empty(key, folder / _CONFIG)
    if config.get("auto_map") and not _knows_model(config):
        raise _code_error(key, folder / _CONFIG, config, f"model_type {config.get('model_type')!r}")
    tokenizer = _read_or_empty(key, folder / _TOKENIZER)
    if tokenizer.get("auto_map") and not _knows_tokenizer(config, tokenizer):
        what = f"tokenizer_class {tokenizer.get('tokenizer_class')!r}"
        raise _code_error(key, folder / _TOKENIZER, tokenizer, what)


def unused_code_text(folders: Iterable[str]) -> str:
    """Return one line for each file of these folders that refers to code of the folder.

    The files are config.json and tokenizer_config.json with an auto_map. "" if there are none.
    """
    lines = []
    for folder in dict.fromkeys(folders):
        for name in (_CONFIG, _TOKENIZER):
            file = Path(folder) / name
            if _read_or_empty("model", file).get("auto_map"):
                lines.append(f"code   {file}: its auto_map is not used, transformers has a class")
    return "\n".join(lines)


def _read_or_empty(key: str, file: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if there is no such file."""
    if not file.is_file():
        return {}
    content: dict[str, Any] = read_json(file, key=key)
    return content


def _knows_model(config: dict[str, Any]) -> bool:
    from transformers import CONFIG_MAPPING

    return config.get("model_type") in CONFIG_MAPPING


def _knows_tokenizer(config: dict[str, Any], tokenizer: dict[str, Any]) -> bool:
    """Return whether AutoTokenizer finds a class of transformers or of the script for a tokenizer.

    It looks for the config's model_type, then for tokenizer_class with or without "Fast" at its
    end.
    """
    from transformers import CONFIG_MAPPING, TOKENIZER_MAPPING
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    model_type = config.get("model_type")
    if model_type in CONFIG_MAPPING and CONFIG_MAPPING[model_type] in TOKENIZER_MAPPING:
        return True
    name = str(tokenizer.get("tokenizer_class") or "").removesuffix("Fast")
    names = (name, f"{name}Fast") if name else ()
    return any(tokenizer_class_from_name(each) is not None for each in names)


def _code_error(key: str, file: Path, facts: dict[str, Any], what: str) -> ConfigError:
    return ConfigError(
        f"{key}: got {file}, whose auto_map {facts['auto_map']} names code of the folder, expected "
        f"a {what} that transformers has; code of a model folder is never run: use a model that "
        f"transformers knows, or register its classes in the script (AutoConfig.register)"
    )
