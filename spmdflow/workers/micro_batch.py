"""Rows of a batch as the padded tensors of one forward. Pure: knows no ranks and no model.

A row is prompt + response, padded on the right, positions from 0. Token t of the response of a
row with prompt length P is predicted at position P - 1 + t.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.data.micro import cut
from spmdflow.data.ragged import is_ragged, lengths_of, mask_of, pad, ragged, take_rows
from spmdflow.errors import ColumnError, ProtocolError


@dataclass(frozen=True)
class MicroBatch:
    """b rows of one forward. T: longest prompt + response, R: longest response (at least 1)."""

    input_ids: Tensor
    """(b, T) int64."""
    attention_mask: Tensor
    """(b, T) bool: True at real tokens; a causal model needs no mask for right padding."""
    position_ids: Tensor
    """(b, T) int64, also counting through the padding."""
    prompt_lengths: Tensor
    """(b,) int64, at least 1."""
    response_lengths: Tensor
    """(b,) int64."""
    response_mask: Tensor
    """(b, R) bool: True where the policy chose the token; padding rows are all False."""
    row_weight: Tensor
    """(b,) float32: 1, or 0 for a padding row."""
    columns: Mapping[str, Tensor]
    """Response-shaped (b, R), 0 beyond a response, or dense (b, ...)."""
    index: Tensor
    """(rows,) int64: positions in the batch; empty for a padding micro-batch."""

    @property
    def next_ids(self) -> Tensor:
        """(b, T) int64: the token after each position; 0 after the last."""
        return torch.nn.functional.pad(self.input_ids[:, 1:], (0, 1))

    @property
    def response_tokens(self) -> Tensor:
        """(b, R) bool: True where the response has a token, chosen by the policy or not."""
        return mask_of(self.response_lengths, self.response_mask.shape[1])

    def gather(self, x: Tensor) -> Tensor:
        """(b, T) -> (b, R): x at the position that predicts each response token; 0 elsewhere."""
        places = torch.arange(self.response_mask.shape[1], device=x.device)
        index = (self.prompt_lengths[:, None] - 1 + places).clamp(max=x.shape[1] - 1)
        return torch.where(self.response_tokens, x.gather(1, index), torch.zeros_like(x[:, :1]))

    def last(self, x: Tensor) -> Tensor:
        """(b, T) -> (b,): x at the last real token of each row."""
        return x.gather(1, (self.prompt_lengths + self.response_lengths - 1)[:, None])[:, 0]


def micro_batches(
    batch: TensorDict, *, num_micro_batches: int, by_tokens: bool, device: torch.device
) -> list[MicroBatch]:
    """The rows of batch in exactly num_micro_batches parts; an empty part is one padding row.

    batch lies in host memory, the micro-batches on device. Needs ragged prompts (no empty one) and
    responses; other columns are ragged of the responses' lengths, dense, or text (left out).
    Response_mask is all True if the batch has none.
    """
    rows = _RowTable(batch, device)
    totals = (rows.prompt_lengths + rows.response_lengths).tolist()
    parts = cut(totals, num_micro_batches, by_tokens=by_tokens)
    return [rows.take(part) if part else rows.padding() for part in parts]


def restore_order(parts: list[Tensor], index: Tensor) -> Tensor:
    """Dense rows of all parts, joined and put back: row i of the join goes to index[i]."""
    return torch.cat(parts)[torch.argsort(index)]


def restore_ragged(parts: list[Tensor], lengths: list[Tensor], index: Tensor) -> Tensor:
    """Ragged column from padded parts (b, R) with their row lengths, rows put back in order."""
    widths = [mask_of(n, part.shape[1]) for n, part in zip(lengths, parts, strict=True)]
    values = torch.cat([part[width] for part, width in zip(parts, widths, strict=True)])
    return ragged(*take_rows(values, torch.cat(lengths), torch.argsort(index)))


def join_columns(answers: Sequence[Mapping[str, Tensor]], micros: list[MicroBatch]) -> TensorDict:
    """One answer for each micro-batch as columns; padding rows dropped, rows in batch order."""
    index = torch.cat([micro.index for micro in micros])
    columns = {
        name: _column(name, [answer[name] for answer in answers], micros, index)
        for name in answers[0]
    }
    return TensorDict(columns, batch_size=[len(index)])


def lengthened(micro: MicroBatch, multiple: int) -> MicroBatch:
    """The same rows with T padded to a multiple."""
    rows, length = micro.input_ids.shape
    extra = -length % multiple
    if not extra:
        return micro
    places = torch.arange(length + extra, device=micro.input_ids.device)
    return replace(
        micro,
        input_ids=torch.nn.functional.pad(micro.input_ids, (0, extra)),
        attention_mask=torch.nn.functional.pad(micro.attention_mask, (0, extra)),
        position_ids=places.expand(rows, -1),
    )


def _column(name: str, parts: list[Tensor], micros: list[MicroBatch], index: Tensor) -> Tensor:
    for part, micro in zip(parts, micros, strict=True):
        allowed = (micro.response_mask.shape, micro.response_mask.shape[:1])
        if part.shape not in allowed:
            raise ProtocolError(
                f"forward: column {name} of fn has shape {tuple(part.shape)}; expected one row "
                f"per row, {tuple(allowed[0])} or {tuple(allowed[1])}; use micro.gather or "
                f"micro.last on the output"
            )
    real = [part[: len(micro.index)] for part, micro in zip(parts, micros, strict=True)]
    if parts[0].dim() == 1:
        return restore_order(real, index)
    lengths = [micro.response_lengths[: len(micro.index)].cpu() for micro in micros]
    return restore_ragged(real, lengths, index)


class _RowTable:
    """The batch as (values, lengths) pairs and dense tensors, ready to be indexed."""

    def __init__(self, batch: TensorDict, device: torch.device) -> None:
        for name in ("prompts", "responses"):
            if name not in batch.keys() or not is_ragged(batch[name]):
                raise ColumnError(
                    f"micro-batch: got columns {sorted(batch.keys())}; expected ragged {name}; "
                    f"add it to the reads of the method"
                )
        self.device = device
        self.prompts, self.responses = batch["prompts"].values(), batch["responses"].values()
        self.prompt_lengths = lengths_of(batch["prompts"])
        self.response_lengths = lengths_of(batch["responses"])
        self.ragged: dict[str, Tensor] = {}
        self.dense: dict[str, Tensor] = {}
        for name, column in batch.items():
            if name not in ("prompts", "responses") and isinstance(column, Tensor):
                self._add(name, column)
        self.ragged.setdefault("response_mask", torch.ones_like(self.responses, dtype=torch.bool))
        if bool((self.prompt_lengths < 1).any()):
            row = int(self.prompt_lengths.argmin())
            raise ColumnError(
                f"micro-batch: row {row} has an empty prompt; expected at least one token, which "
                f"predicts the first of the response; start prompts with a bos token"
            )

    def _add(self, name: str, column: Tensor) -> None:
        if not is_ragged(column):
            self.dense[name] = column
            return
        if not torch.equal(lengths_of(column), self.response_lengths):
            raise ColumnError(
                f"micro-batch: column {name} has row lengths {lengths_of(column).tolist()[:8]}...; "
                f"expected those of responses, {self.response_lengths.tolist()[:8]}...; "
                f"write one entry per response token"
            )
        self.ragged[name] = column.values()

    def take(self, part: list[int]) -> MicroBatch:
        """The rows at these positions, padded to the longest of them."""
        index = torch.tensor(part, dtype=torch.int64)
        prompts, prompt_lengths = take_rows(self.prompts, self.prompt_lengths, index)
        responses, lengths = take_rows(self.responses, self.response_lengths, index)
        width = max(1, int(lengths.max()))
        columns = {
            name: pad(
                ragged(take_rows(values, self.response_lengths, index)[0], lengths), width=width
            )
            for name, values in self.ragged.items()
        }
        columns |= {name: values[index] for name, values in self.dense.items()}
        return self._build(prompts, prompt_lengths, responses, lengths, columns, index)

    def padding(self) -> MicroBatch:
        """One row of weight 0: a prompt and a response of one token each, mask False."""
        one, zero = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        columns = {name: v.new_zeros(1, 1, *v.shape[1:]) for name, v in self.ragged.items()}
        columns |= {name: v.new_zeros(1, *v.shape[1:]) for name, v in self.dense.items()}
        return self._build(zero, one, zero, one, columns, zero[:0])

    def _build(
        self,
        prompts: Tensor,
        prompt_lengths: Tensor,
        responses: Tensor,
        response_lengths: Tensor,
        columns: dict[str, Tensor],
        index: Tensor,
    ) -> MicroBatch:
        totals = prompt_lengths + response_lengths
        real = mask_of(totals, int(totals.max()))
        in_prompt = mask_of(prompt_lengths, real.shape[1])
        input_ids = torch.zeros_like(real, dtype=torch.int64)
        input_ids[in_prompt] = prompts
        input_ids[real & ~in_prompt] = responses
        moved = {name: column.to(self.device) for name, column in columns.items()}
        return MicroBatch(
            input_ids=input_ids.to(self.device),
            attention_mask=real.to(self.device),
            position_ids=torch.arange(real.shape[1], device=self.device).expand(real.shape),
            prompt_lengths=prompt_lengths.to(self.device),
            response_lengths=response_lengths.to(self.device),
            response_mask=moved.pop("response_mask").bool(),
            row_weight=torch.full((len(totals),), float(len(index) > 0), device=self.device),
            columns=moved,
            index=index,
        )
