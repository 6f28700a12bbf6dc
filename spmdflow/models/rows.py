"""Rows of data -> the rows of prompt and response that engines read. Pure functions; no ranks.

A row of data is a sequence (`prompts`) with a mask (`loss_mask`) of the tokens to learn. It is cut
before the first of them: the part before is the prompt, the remainder the response, whose mask is
False at other speakers' turns. A row of preferences gives two sequences. Each is a separate row
that may be in any micro-batch. Of a pre-training text, all but the first token is the response.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.data.ragged import (
    is_ragged,
    lengths_of,
    pad,
    ragged,
    ragged_from_rows,
    rows_of,
)
from spmdflow.errors import RowError
from spmdflow.router import ROUTES, own_column
from spmdflow.worker_api.command import Command, MiniBatch

Sequence = tuple[Tensor, Tensor, Tensor]
"""Token ids of prompt (P,) and response (R,), and the mask of the tokens to learn, (R,) bool."""
_COLUMNS = {"prompts": torch.int64, "responses": torch.int64, "response_mask": torch.bool}


def example_rows(batch: TensorDict) -> TensorDict:
    """Cut each sequence before its first token to learn.

    Returns prompts, responses and response_mask. RowError if a sequence begins with a token to
    learn.
    """
    return _build_rows(_cut_own_answers(batch))


def is_pairs(batch: TensorDict) -> bool:
    """Whether the rows are pairs. Otherwise they have labels."""
    return "chosen_tokens" in batch.keys()


def answer_rows(batch: TensorDict) -> TensorDict:
    """Turn n rows of preferences into 2n sequences: all first answers, then all second answers.

    Row i is the first answer of row i, row n + i its second. For pairs these are the chosen and the
    rejected sequence. For a labelled row they are its own answer and, after the same prompt,
    another row's answer (column answers). Returns prompts, responses and response_mask.
    """
    if not is_pairs(batch):
        return _build_rows([*_cut_own_answers(batch), *_cut_other_answers(batch)])
    halves = (_split_pairs(batch, name) for name in ("prompts", "loss_mask"))
    return _build_rows(map(_cut, *halves))


def answer_tokens(rows: TensorDict) -> Tensor:
    """(n, 2) float32: learnt tokens of both answers; rows: 2n sequences of `answer_rows`."""
    return pair_up(pad(rows["response_mask"]).sum(-1).float())


def pair_up(x: Tensor) -> Tensor:
    """(2n,) in the order of `answer_rows` -> (n, 2)."""
    return x.view(2, len(x) // 2).T


def own_answer_rows(batch: TensorDict) -> TensorDict:
    """Return n sequences of n labelled rows: each prompt with the row's own answer.

    Columns: prompts, responses, response_mask, ref_answer_log_probs and desirable.
    """
    rows = example_rows(batch)
    rows["ref_answer_log_probs"] = batch["ref_answer_log_probs"]
    rows["desirable"] = batch["desirable"]
    return rows


def other_answer_rows(batch: TensorDict) -> TensorDict:
    """n labelled rows -> n sequences: their prompts with the answers of other rows."""
    return _build_rows(_cut_other_answers(batch))


def pair_rows(batch: TensorDict) -> TensorDict:
    """Turn n pairs into 2n complete sequences: all chosen ones, then all rejected ones.

    Row i is the chosen sequence of pair i, row n + i the rejected one. Each is in the column
    prompts, with an empty response, as a reward model reads it.
    """
    sequences = ragged_from_rows(_split_pairs(batch, "prompts"), dtype=torch.int64)
    count = sequences.shape[0]
    empty = ragged(sequences.values()[:0], torch.zeros(count, dtype=torch.int64))
    return TensorDict({"prompts": sequences, "responses": empty}, batch_size=[count])


def text_rows(texts: Tensor) -> TensorDict:
    """Return rows with the first token of each text as prompt and the others as response.

    texts: ragged ids. There is no response_mask.
    """
    rows = rows_of(texts)
    parts = {"prompts": [row[:1] for row in rows], "responses": [row[1:] for row in rows]}
    columns = {}
    for name, part in parts.items():
        columns[name] = ragged_from_rows(part, dtype=torch.int64)
    return TensorDict(columns, batch_size=[len(rows)])


def with_text_rows(batch: TensorDict, call: Command) -> tuple[TensorDict, Command]:
    """Append the text of each of n samples (column pretrain_ids) as a row: 2n rows, and the call.

    Row n + i is the text of sample i, and in the same mini-batches as the sample. is_text is True
    for texts. Their response_mask is False, and the samples' other columns are 0 there. Columns
    that are not tensors are dropped. In the returned call the mini-batches have twice the rows, but
    the same number of micro-batches, which must be counted again.
    """
    count = batch.batch_size[0]
    texts = text_rows(batch["pretrain_ids"])
    samples = batch.exclude("pretrain_ids")
    lengths = lengths_of(texts["responses"])
    columns = {}
    for name, column in samples.items():
        if isinstance(column, Tensor):
            below = texts.get(name, None)
            if name == ROUTES:
                below = _own_routes(column, lengths_of(texts["prompts"]) + lengths)
            columns[str(name)] = _stack(column, below, lengths)
    columns["is_text"] = torch.arange(2 * count) >= count
    minis = tuple(
        MiniBatch(torch.cat([mini.index, mini.index + count]), mini.num_micro_batches)
        for mini in call.mini_batches
    )
    return TensorDict(columns, batch_size=[2 * count]), replace(call, mini_batches=minis)


def _own_routes(column: Tensor, lengths: Tensor) -> Tensor:
    """Routes of rows of these lengths, by which the trainer's routers select; as in the column."""
    values = column.values()
    own = own_column(values.dtype, (int(lengths.sum()), *values.shape[1:]))
    return ragged(own, lengths)


def _stack(column: Tensor, below: Tensor | None, lengths: Tensor) -> Tensor:
    """Append rows of texts to a column of the samples: `below`, or zeros if it is None.

    Ragged zeros get the given lengths. A dense column always gets zeros.
    """
    if not is_ragged(column):
        return torch.cat([column, torch.zeros_like(column)])
    if below is None:
        values = column.values()
        below = ragged(values.new_zeros(int(lengths.sum()), *values.shape[1:]), lengths)
    values = torch.cat([column.values(), below.values()])
    return ragged(values, torch.cat([lengths_of(column), lengths_of(below)]))


def _split_pairs(batch: TensorDict, name: str) -> list[Tensor]:
    """Split each row of a column after its first chosen_tokens entries.

    Returns the first parts of all rows (chosen), then the second parts of all rows (rejected).
    """
    both = rows_of(batch[name])
    cuts = batch["chosen_tokens"].tolist()
    return [row[:cut] for row, cut in zip(both, cuts)] + [row[cut:] for row, cut in zip(both, cuts)]


def _cut_own_answers(batch: TensorDict) -> list[Sequence]:
    return list(map(_cut, rows_of(batch["prompts"]), rows_of(batch["loss_mask"])))


def _cut_other_answers(batch: TensorDict) -> list[Sequence]:
    """Return (prompt, another row's answer, all-True mask) for each labelled row.

    The other answers are in the column answers.
    """
    answers = rows_of(batch["answers"])
    other_answers = []
    for (prompt, _, _), answer in zip(_cut_own_answers(batch), answers, strict=True):
        other_answers.append((prompt, answer, torch.ones_like(answer, dtype=torch.bool)))
    return other_answers


def _cut(ids: Tensor, mask: Tensor) -> Sequence:
    """Cut a sequence before its first token to learn: (prompt, response, response's mask).

    RowError if that is the first token, or if there is no token to learn.
    """
    if not mask.any():
        raise RowError(
            "loss_mask: a row has no token to learn, expected at least one; give each row an answer"
        )
    first = int(mask.int().argmax())
    if first == 0:
        raise RowError(
            "loss_mask: a row is learnt from its first token on, expected a prompt before the "
            "answer; give each row at least one token that is not learnt"
        )
    return ids[:first], ids[first:], mask[first:]


def _build_rows(sequences: Iterable[Sequence]) -> TensorDict:
    """Return the columns prompts, responses and response_mask of the sequences."""
    parts = list(sequences)
    columns = {}
    for part, (name, dtype) in enumerate(_COLUMNS.items()):
        columns[name] = ragged_from_rows([row[part] for row in parts], dtype=dtype)
    return TensorDict(columns, batch_size=[len(parts)])
