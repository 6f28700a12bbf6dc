"""Checks of data sections: whether their settings say how to read a row. Reads no row.

They need nothing of models, ranks or the evaluation, so a tool that only looks at rows uses them
too (`check_rows`). Messages say got, expected, do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from spmdflow.config.data_source import check_sources
from spmdflow.config.episode import EpisodeConfig
from spmdflow.config.leaf import Errors, check_bounds, leaves, parts_of
from spmdflow.config.offline import (
    PreferenceDataConfig,
    PreferenceLossConfig,
    check_preferences,
)
from spmdflow.config.schema import AUTO, DataSettings
from spmdflow.errors import ConfigError
from spmdflow.weights.own_code import refuse_own_code


def check_rows(cfg: Any) -> None:
    """Raise one ConfigError that lists what keeps the data sections' rows from being read.

    Checks bounds, files, columns, chats and tokenizers, but nothing of models, ranks or evaluation.
    """
    sections = dict(parts_of(cfg, DataSettings))
    rules: list[Callable[[], object]] = []
    for leaf in leaves(cfg):
        if leaf.key.rpartition(".")[0] in sections:
            rules.append(partial(check_bounds, leaf))
    rules += preference_rules(cfg)
    for key, data in sections.items():
        name, setting = data.shown_source
        rules.append(partial(check_sources, f"{key}.{name}", setting))
        rules.append(partial(check_form, cfg, key, data))
        rules.append(partial(check_tokenizer, key, data))
    errors = Errors()
    for rule in rules:
        with errors.collecting():
            rule()
    errors.raise_all()


def preference_rules(cfg: Any) -> Iterator[Callable[[], object]]:
    """Yield the rules that the loss of preferences and the kind of the rows fit together."""
    for key, loss in parts_of(cfg, PreferenceLossConfig):
        for _, preferences in parts_of(cfg, PreferenceDataConfig):
            yield partial(check_preferences, key, loss, preferences)


def check_form(cfg: Any, key: str, data: DataSettings) -> None:
    """Raise ConfigError if the settings of a data section do not say how to read a row.

    Rows with answers need answer columns or a chat template; see also `_check_chat`.
    """
    _check_chat(key, data, episodes=any(parts_of(cfg, EpisodeConfig)))
    if data.rows != "prompts" and not data.answer_columns and not data.chat_template:
        got = "none without a chat template"
        do = f"name the column, or set {key}.chat_template=true for conversations"
        raise ConfigError.of(f"{key}.response_column", got, "one or the other", do)


def _check_chat(key: str, data: DataSettings, *, episodes: bool) -> None:
    """Raise ConfigError for chat settings that have no use or no effect.

    chat_template_arguments need a chat template or episodes; tools_column and
    rows_per_conversation=answers need a chat template. The name of an argument is an identifier and
    none of `OWN_TEMPLATE_ARGUMENTS`, which a run sets itself. The date is one, or auto.
    """
    where = f"{key}.chat_template_arguments"
    if data.chat_template_arguments and not (data.chat_template or episodes):
        raise ConfigError(
            f"{where}: no chat template is used, as {key}.chat_template is false; set "
            f"{key}.chat_template=true or {where}={{}}"
        )
    if data.tools_column is not None and not data.chat_template:
        got = f"{data.tools_column!r} with {key}.chat_template=false"
        do = f"set {key}.chat_template=true or {key}.tools_column=null"
        raise ConfigError.of(f"{key}.tools_column", got, "a chat template to show tools", do)
    if data.rows_per_conversation == "answers" and not data.chat_template:
        got = f"answers with {key}.chat_template=false"
        do = f"set {key}.chat_template=true or {key}.rows_per_conversation=one"
        raise ConfigError.of(f"{key}.rows_per_conversation", got, "conversations", do)
    for name in data.chat_template_arguments:
        if not str(name).isidentifier() or name in OWN_TEMPLATE_ARGUMENTS:
            expected = "a variable that the template reads and the run does not set itself"
            raise ConfigError.of(where, repr(name), expected, f"remove it from {where}")
    if data.chat_template_date != AUTO:
        try:
            date.fromisoformat(data.chat_template_date)
        except ValueError as err:
            where = f"{key}.chat_template_date"
            got = repr(data.chat_template_date)
            expected = "a date such as 2026-11-28"
            raise ConfigError.of(where, got, expected, f"correct it, or set {where}=auto") from err


OWN_TEMPLATE_ARGUMENTS = frozenset(
    "conversation messages tools chat_template add_generation_prompt continue_final_message "
    "tokenize padding truncation max_length return_tensors return_dict "
    "return_assistant_tokens_mask tokenizer_kwargs processor_kwargs strftime_now".split()
)
"""Arguments of apply_chat_template that are no variables of a template, or that a run sets."""


def check_tokenizer(key: str, data: DataSettings) -> None:
    """Raise ConfigError if the tokenizer's folder has no file tokenizer*, or needs its own code."""
    folder = Path(data.tokenizer_path)
    if not any(folder.glob("tokenizer*")):
        raise ConfigError(
            f"{key}.tokenizer_path: no tokenizer in {folder}, expected a folder with "
            f"tokenizer.json; give the folder of the model it belongs to"
        )
    refuse_own_code(f"{key}.tokenizer_path", folder)
