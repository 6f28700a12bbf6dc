"""What columns look like: kind, dtype and whose length their rows have. No values.

The table names the columns of the built-in roles (`data` lists them). A column that is not in it
is declared by `flow.assume(name="float32 like responses")`, else taken as one float32 a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spmdflow.data.column import ColumnSpec
from spmdflow.plan.refusal import Refusal

PROMPTS, RESPONSES = "prompts", "responses"
TEXT_BYTES_PER_TOKEN = 4
"""Bytes of text that one token decodes to, where no run says otherwise (an assumption)."""


@dataclass(frozen=True)
class ColumnForm:
    """Kind and dtype of a column, and what decides the length of its rows."""

    spec: ColumnSpec
    like: str = ""
    """Column whose rows are as long: prompts or responses; empty for dense columns."""
    items_per_token: int = 1
    """Items of a row for each item of the column it is like (text: bytes)."""


def _dense(dtype: str, *row_shape: int) -> ColumnForm:
    return ColumnForm(ColumnSpec("dense", dtype, row_shape))


def _ragged(dtype: str, like: str) -> ColumnForm:
    return ColumnForm(ColumnSpec("ragged", dtype, ()), like)


def _text(like: str) -> ColumnForm:
    return ColumnForm(ColumnSpec("text", "uint8", ()), like, TEXT_BYTES_PER_TOKEN)


_PER_TOKEN = (
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_probs",
    "values",
    "cost_values",
    "token_level_rewards",
    "token_level_costs",
    "advantages",
    "returns",
    "cost_returns",
    "rollout_weights",
)
_PER_ROW = (
    "scores",
    "costs",
    "baseline_scores",
    "reference_kl",
    "pretrain_losses",
    "losses",
    "margins",
)
KNOWN: dict[str, ColumnForm] = {
    "prompts": _ragged("int64", PROMPTS),
    "pretrain_ids": _ragged("int64", PROMPTS),
    "loss_mask": _ragged("bool", PROMPTS),
    "responses": _ragged("int64", RESPONSES),
    "response_mask": _ragged("bool", RESPONSES),
    "chosen_tokens": _dense("int64"),
    "valid": _dense("bool"),
    "cost_valid": _dense("bool"),
    "ref_answer_log_probs": _dense("float32", 2),
    "prompt_text": _text(PROMPTS),
    "row": _text(PROMPTS),
    "response_text": _text(RESPONSES),
    "score_terms": _text(PROMPTS),
    **{name: _ragged("float32", RESPONSES) for name in _PER_TOKEN},
    **{name: _dense("float32") for name in _PER_ROW},
}
"""Columns of the built-in roles."""

UNKNOWN = _dense("float32")
"""What a column is taken for that nobody has declared; the plan says so."""


def form_of(name: str, text: str) -> ColumnForm:
    """A declaration as users write it: "float32", "int64[3]", "float32 like responses", "text".

    Refusal if it does not read so.
    """
    head, _, like = text.partition(" like ")
    dtype, _, shape = head.strip().rstrip("]").partition("[")
    extents = [part.strip() for part in shape.split(",") if part.strip()]
    is_text = dtype == "text"
    if is_text:
        dtype = "uint8"
    known = isinstance(getattr(torch, dtype, None), torch.dtype)
    right_like = like.strip() in ("", PROMPTS, RESPONSES)
    if not known or not all(extent.isdigit() for extent in extents) or not right_like:
        raise Refusal(
            f"assume {name}: got {text!r}, expected a dtype with an optional shape and length, "
            f"such as 'float32', 'int64[3]', 'float32 like responses' or 'text like prompts'; "
            f"correct it"
        )
    row_shape = tuple(int(extent) for extent in extents)
    like = like.strip() or (RESPONSES if is_text else "")
    kind = "text" if is_text else "ragged" if like else "dense"
    per_token = TEXT_BYTES_PER_TOKEN if is_text else 1
    return ColumnForm(ColumnSpec(kind, dtype, row_shape), like, per_token)
