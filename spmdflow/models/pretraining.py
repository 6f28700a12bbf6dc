"""Pre-training texts as rows of a policy's batch: a text is a row without a response."""

from __future__ import annotations

from dataclasses import replace

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.data.ragged import is_ragged, lengths_of, ragged
from spmdflow.transfer.worker import CallInfo, MiniBatch


def text_rows(texts: Tensor) -> TensorDict:
    """Rows with the texts (ragged ids) as prompts, empty responses, and is_text True."""
    count, device = texts.shape[0], texts.device
    empty = ragged(texts.values()[:0], torch.zeros(count, dtype=torch.int64))
    marks = torch.ones(count, dtype=torch.bool, device=device)
    columns = {"prompts": texts, "responses": empty, "is_text": marks}
    return TensorDict(columns, batch_size=[count])


def with_text_rows(batch: TensorDict, call: CallInfo) -> tuple[TensorDict, CallInfo]:
    """Samples that bring a text along (pretrain_ids) -> samples and texts as rows of their own.

    Sample i's text is row n + i, in the same mini-batches as the sample. Each mini-batch has twice
    the rows in twice the forwards: under a limit of tokens, texts should be as short as samples.
    """
    count = batch.batch_size[0]
    texts = text_rows(batch["pretrain_ids"])
    samples = batch.exclude("pretrain_ids")
    samples["is_text"] = torch.zeros_like(texts["is_text"])
    columns = {
        str(name): _stacked(column, texts[name] if name in texts.keys() else None)
        for name, column in samples.items()
        if isinstance(column, Tensor)
    }
    minis = tuple(
        MiniBatch(torch.cat([mini.index, mini.index + count]), 2 * mini.num_micro_batches)
        for mini in call.mini_batches
    )
    return TensorDict(columns, batch_size=[2 * count]), replace(call, mini_batches=minis)


def _stacked(column: Tensor, below: Tensor | None) -> Tensor:
    """A column of the samples with one of the texts below it, or with as many empty rows."""
    if not is_ragged(column):
        return torch.cat([column, torch.zeros_like(column) if below is None else below])
    lengths = lengths_of(column)
    if below is None:
        return ragged(column.values(), torch.cat([lengths, torch.zeros_like(lengths)]))
    values = torch.cat([column.values(), below.values()])
    return ragged(values, torch.cat([lengths, lengths_of(below)]))
