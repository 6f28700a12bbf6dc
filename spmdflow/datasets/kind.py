"""Which encoder reads which kind of row (`rows` of the data settings)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmdflow.datasets.encode import PromptEncoder, RowEncoder
from spmdflow.datasets.examples import ExampleEncoder
from spmdflow.datasets.preference import LabelEncoder, PairEncoder


def encoder_of(
    tokenizer: Any,
    *,
    rows: str,
    column: str | None,
    answers: Sequence[str],
    chat_template: bool,
    prompt_end: str = "",
) -> RowEncoder:
    """The encoder of prompts, examples, pairs or labels. Any: a transformers tokenizer.

    column: of the prompt; none where pairs and labels have it in the answers, up to the last
    prompt_end.
    """
    if rows in ("pairs", "labels"):
        judged = PairEncoder if rows == "pairs" else LabelEncoder
        return judged(
            tokenizer,
            column=column,
            answers=answers,
            chat_template=chat_template,
            prompt_end=prompt_end,
        )
    assert column is not None, rows
    if rows == "examples":
        return ExampleEncoder(
            tokenizer, column=column, answers=answers, chat_template=chat_template
        )
    return PromptEncoder(tokenizer, column=column, chat_template=chat_template)
