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
from spmdflow.worker_api.command import Command, MiniBatch

Sequence = tuple[Tensor, Tensor, Tensor]
"""Token ids of prompt (P,) and response (R,), and the mask of the tokens to learn, (R,) bool."""
_COLUMNS = {"prompts": torch.int64, "responses": torch.int64, "response_mask": torch.bool}


def example_rows(batch: TensorDict) -> TensorDict:
    """Complete sequences with masks -> prompts, responses and response_mask."""
    return _build_rows(_cut_own_answers(batch))


def is_pairs(batch: TensorDict) -> bool:
    """Whether the rows are pairs. Otherwise they have labels."""
    return "chosen_tokens" in batch.keys()


def answer_rows(batch: TensorDict) -> TensorDict:
    """n rows -> 2n sequences: row i is the first answer of row i, row n + i the second one.

    Prompts, responses and response_mask; first and second: chosen and rejected, or a labelled
    row's answer and, after the same prompt, another row's answer.
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
    """n labelled rows -> n sequences, with their answers, labels and reference log-probs."""
    rows = example_rows(batch)
    rows["ref_answer_log_probs"] = batch["ref_answer_log_probs"]
    rows["desirable"] = batch["desirable"]
    return rows


def other_answer_rows(batch: TensorDict) -> TensorDict:
    """n labelled rows -> n sequences: their prompts with the answers of other rows."""
    return _build_rows(_cut_other_answers(batch))


def pair_rows(batch: TensorDict) -> TensorDict:
    """n pairs -> 2n sequences: row i is the chosen one of pair i, row n + i the rejected one."""
    sequences = ragged_from_rows(_split_pairs(batch, "prompts"), dtype=torch.int64)
    count = sequences.shape[0]
    empty = ragged(sequences.values()[:0], torch.zeros(count, dtype=torch.int64))
    return TensorDict({"prompts": sequences, "responses": empty}, batch_size=[count])


def text_rows(texts: Tensor) -> TensorDict:
    """Rows with the first token of each text (ragged ids) as prompt, the others as response."""
    rows = rows_of(texts)
    parts = {"prompts": [row[:1] for row in rows], "responses": [row[1:] for row in rows]}
    columns = {}
    for name, part in parts.items():
        columns[name] = ragged_from_rows(part, dtype=torch.int64)
    return TensorDict(columns, batch_size=[len(rows)])


def with_text_rows(batch: TensorDict, call: Command) -> tuple[TensorDict, Command]:
    """n samples with a text each (pretrain_ids) -> 2n rows: the samples, then their texts.

    Sample i's text is row n + i, in the same mini-batches as the sample; is_text marks it, and its
    response_mask is False. Mini-batches have twice the rows: count their micro-batches again.
    """
    count = batch.batch_size[0]
    texts = text_rows(batch["pretrain_ids"])
    samples = batch.exclude("pretrain_ids")
    lengths = lengths_of(texts["responses"])
    columns = {}
    for name, column in samples.items():
        if isinstance(column, Tensor):
            columns[str(name)] = _stack(column, texts.get(name, None), lengths)
    columns["is_text"] = torch.arange(2 * count) >= count
    minis = tuple(
        MiniBatch(torch.cat([mini.index, mini.index + count]), mini.num_micro_batches)
        for mini in call.mini_batches
    )
    return TensorDict(columns, batch_size=[2 * count]), replace(call, mini_batches=minis)


def _stack(column: Tensor, below: Tensor | None, lengths: Tensor) -> Tensor:
    """A column of the samples with one of the texts below it, or with zeros of their lengths."""
    if not is_ragged(column):
        return torch.cat([column, torch.zeros_like(column)])
    if below is None:
        values = column.values()
        below = ragged(values.new_zeros(int(lengths.sum()), *values.shape[1:]), lengths)
    values = torch.cat([column.values(), below.values()])
    return ragged(values, torch.cat([lengths_of(column), lengths_of(below)]))


def _split_pairs(batch: TensorDict, name: str) -> list[Tensor]:
    """Both parts of each row of a column: all chosen ones, then all rejected ones."""
    both = rows_of(batch[name])
    cuts = batch["chosen_tokens"].tolist()
    return [row[:cut] for row, cut in zip(both, cuts)] + [row[cut:] for row, cut in zip(both, cuts)]


def _cut_own_answers(batch: TensorDict) -> list[Sequence]:
    return list(map(_cut, rows_of(batch["prompts"]), rows_of(batch["loss_mask"])))


def _cut_other_answers(batch: TensorDict) -> list[Sequence]:
    """Prompts of labelled rows with the answers of other rows."""
    answers = rows_of(batch["answers"])
    other_answers = []
    for (prompt, _, _), answer in zip(_cut_own_answers(batch), answers, strict=True):
        other_answers.append((prompt, answer, torch.ones_like(answer, dtype=torch.bool)))
    return other_answers


def _cut(ids: Tensor, mask: Tensor) -> Sequence:
    """A marked sequence, cut before its first learnt token."""
    first = int(mask.int().argmax())
    if first == 0:
        raise RowError(
            "loss_mask: a row is learnt from its first token on, expected a prompt before the "
            "answer; give each row at least one token that is not learnt"
        )
    return ids[:first], ids[first:], mask[first:]


def _build_rows(sequences: Iterable[Sequence]) -> TensorDict:
    """The columns prompts, responses and response_mask of the sequences."""
    parts = list(sequences)
    columns = {}
    for part, (name, dtype) in enumerate(_COLUMNS.items()):
        columns[name] = ragged_from_rows([row[part] for row in parts], dtype=dtype)
    return TensorDict(columns, batch_size=[len(parts)])
