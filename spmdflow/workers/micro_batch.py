"""Rows of a batch as the tensors of one forward. Pure: knows no ranks and no model.

A row is prompt + response, positions from 0. Packed rows lie end to end as one sequence, shorter
ones first, so that rows of equal length are adjacent. Otherwise each row is a sequence, padded on
the right. A prompt that several packed rows share may be packed once, before them. Token t of the
response of a row with prompt length P is predicted at position P - 1 + t. Heads run only there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.data.micro import cut
from spmdflow.data.ragged import (
    is_ragged,
    lengths_of,
    mask_of,
    pad,
    ragged,
    rows_of,
    select_rows,
    take_rows,
)
from spmdflow.data.shared_prompt import shared_groups
from spmdflow.errors import ColumnError, ProtocolError
from spmdflow.parallel.device import all_to_device, to_device
from spmdflow.router import OWN_CHOICE, ROUTES, from_column
from spmdflow.workers.attention import PackedRows, SeenKeys
from spmdflow.workers.context_group import ContextGroup
from spmdflow.workers.context_parallel import TokenShard


@dataclass(frozen=True)
class MicroBatch:
    """b rows of one forward. R: longest response (at least 1)."""

    input_ids: Tensor
    """(1, N) int64 of packed rows, N tokens in all; else (b, T), T tokens of the longest row. Under
    context parallelism only the columns of this rank (`shard`), and likewise below."""
    position_ids: Tensor
    """The same shape, int64: from 0 in each row, also counting through padding."""
    packed: PackedRows | None
    """Positions of packed rows. None: rows are padded, and a causal mask suffices."""
    response_lengths: Tensor
    """(b,) int64."""
    response_mask: Tensor
    """(b, R) bool: True where the policy sampled the token; padding rows are all False."""
    row_weight: Tensor
    """(b,) float32: 1, or 0 for a padding row."""
    columns: Mapping[str, Tensor]
    """Response-shaped (b, R), 0 beyond a response, or dense (b, ...)."""
    index: Tensor
    """(rows,) int64 in host memory: positions in the batch; empty for a padding micro-batch."""
    answers: Tensor
    """(rows,) int64 in host memory: response_lengths of these rows."""
    targets: Tensor
    """(n,) int64: the tokens of all responses, row after row."""
    predicting: Tensor
    """(n,) int64: the index in input_ids.flatten() of whole rows that predicts each of them."""
    ends: Tensor
    """(b,) int64: the index in input_ids.flatten() of whole rows of the last real token of each."""
    response_indices: Tensor
    """(n,) int64: the index of each of them in (b, R), flattened."""
    rows_of_token: Tensor
    """Shape of input_ids, int32: how many rows have the token; more than 1 in a shared prompt, 0
    for padding. FSDP casts numbers that are not integers to the compute precision."""
    routes: Tensor | None = None
    """(input_ids.numel(), layers, k) int16: the experts to use (`Routers.begin`). None: the routers
    select them."""
    shard: TokenShard | None = None
    """Which tokens this rank has under context parallelism. None: it has whole rows."""

    @property
    def response_tokens(self) -> Tensor:
        """(b, R) bool: True where the response has a token, sampled by the policy or not."""
        return mask_of(self.response_lengths, self.response_mask.shape[1])

    def spread(self, x: Tensor) -> Tensor:
        """(n,), one for each token of `targets`, -> (b, R); 0 beyond a response."""
        shape = self.response_mask.shape
        return x.new_zeros(shape.numel()).scatter(0, self.response_indices, x).view(shape)


def micro_batches(
    batch: TensorDict,
    *,
    num_micro_batches: int,
    by_tokens: bool,
    device: torch.device,
    packed: bool = False,
    shares_prompts: bool = False,
    context_group: ContextGroup | None = None,
    multiple: int = 1,
) -> list[MicroBatch]:
    """Split the rows of batch into exactly num_micro_batches micro-batches on device.

    An empty part becomes one padding row of weight 0. by_tokens: parts are balanced by tokens,
    otherwise by rows. Packed rows are sorted by length inside a part. shares_prompts: a prompt that
    packed rows share is packed once, where that saves enough (`shared_prompt.SHARED_FROM`).
    context_group: the ranks that divide the tokens of each row; None: each has whole rows.
    multiple: the number of a rank's tokens of a row, or of packed rows, becomes a multiple of this.

    batch is in host memory. It needs ragged prompts (no empty one) and responses. Other columns are
    ragged with the responses' lengths, dense, or text (omitted). response_mask is all True if the
    batch has none. ColumnError if prompts or lengths do not fit.
    """
    rows = _read_rows(batch)
    lengths = lengths_of(rows["prompts"])
    totals = (lengths + lengths_of(rows["responses"])).tolist()
    prompts = lengths.tolist()
    micros = []
    for part in cut(totals, num_micro_batches, by_tokens=by_tokens, packed=packed):
        if packed:
            part = sorted(part, key=lambda row: (totals[row], prompts[row]))
        index = torch.tensor(part, dtype=torch.int64)
        rows_of_part = select_rows(rows, index) if part else _padding_of(rows)
        positions = _token_positions(rows_of_part, packed=packed, shares=packed and shares_prompts)
        micro = _build_micro_batch(rows_of_part, index, positions)
        if context_group is None:
            micro = pad_length(micro, multiple)
        else:
            micro = pad_length(micro, multiple * context_group.multiple)
            micro = _shard_tokens(micro, context_group)
        micros.append(_on_device(micro, device))
    return micros


def join_answers(answers: Sequence[Mapping[str, Tensor]], micros: list[MicroBatch]) -> TensorDict:
    """Join the columns of all micro-batches, without padding rows, in the order of the batch.

    answers: the columns of each micro-batch. (b,) columns stay dense; (b, R) columns become ragged,
    truncated to the response lengths. ProtocolError for any other shape.
    """
    index = torch.cat([micro.index for micro in micros])
    order = torch.argsort(index)
    columns = {}
    for name in answers[0]:
        columns[name] = _join_column(name, [answer[name] for answer in answers], micros, order)
    return TensorDict(columns, batch_size=[len(index)])


def pad_length(micro: MicroBatch, multiple: int) -> MicroBatch:
    """Return the micro-batch with T padded to a multiple, or itself if T already is one.

    Padding tokens have id 0. Packed rows get an additional row of padding. predicting and ends are
    shifted accordingly.
    """
    rows, length = micro.input_ids.shape
    extra = -length % multiple
    if not extra:
        return micro
    device = micro.input_ids.device
    packed = micro.packed
    if packed is not None:
        packed = _with_padding_row(packed, length, extra)
        packed = packed.move_tensors(lambda x: to_device(x, device))
    routes = micro.routes
    if routes is not None:
        routes = routes.unflatten(0, (rows, length))
        routes = torch.cat(
            [routes, routes.new_full((rows, extra, *routes.shape[2:]), OWN_CHOICE)], 1
        )
        routes = routes.flatten(0, 1)
    first = length if packed is None else 0
    more = torch.arange(first, first + extra, device=device).expand(rows, -1)
    return replace(
        micro,
        input_ids=torch.nn.functional.pad(micro.input_ids, (0, extra)),
        rows_of_token=torch.nn.functional.pad(micro.rows_of_token, (0, extra)),
        routes=routes,
        position_ids=torch.cat([micro.position_ids, more], 1),
        packed=packed,
        predicting=micro.predicting + micro.predicting // length * extra,
        ends=micro.ends + micro.ends // length * extra,
    )


def _with_padding_row(packed: PackedRows, num_tokens: int, extra: int) -> PackedRows:
    """Return packed rows in host memory with one more row of `extra` tokens, which sees itself."""
    rows = PackedRows.of([*packed.lengths, extra])
    if packed.seen is None:
        return rows
    own = torch.arange(num_tokens, num_tokens + extra)
    indices = torch.cat([packed.seen.indices.cpu(), own])
    return replace(rows, seen=SeenKeys.of([*packed.seen.lengths, extra], indices))


def _join_column(name: str, parts: list[Tensor], micros: list[MicroBatch], order: Tensor) -> Tensor:
    """Concatenate the real rows of a column's parts: row i of the result is row order[i].

    A (b,) column stays dense. A (b, R) column becomes ragged, truncated to the response lengths.
    ProtocolError for any other shape.
    """
    for part, micro in zip(parts, micros, strict=True):
        allowed = (micro.response_mask.shape, micro.response_mask.shape[:1])
        if part.shape not in allowed:
            raise ProtocolError(
                f"forward: column {name} of fn has shape {tuple(part.shape)}; expected one row "
                f"per row, {tuple(allowed[0])} or {tuple(allowed[1])}; use micro.spread on "
                f"one number per response token"
            )
    real = []
    for part, micro in zip(parts, micros, strict=True):
        real.append(part[: len(micro.index)])
    if parts[0].dim() == 1:
        return torch.cat(real)[order]
    lengths = [micro.answers for micro in micros]
    values = []
    for part, n in zip(real, lengths, strict=True):
        values.append(part[mask_of(n, part.shape[1])])
    return ragged(*take_rows(torch.cat(values), torch.cat(lengths), order))


def _read_rows(batch: TensorDict) -> TensorDict:
    """Return the tensor columns of batch, with a response_mask (all True if it has none).

    ColumnError if prompts or responses are missing or not ragged, if a prompt is empty, or if
    another ragged column has other lengths than responses.
    """
    for name in ("prompts", "responses"):
        if name not in batch.keys() or not is_ragged(batch[name]):
            raise ColumnError(
                f"micro-batch: got columns {sorted(batch.keys())}; expected ragged {name}; "
                f"add it to the reads of the method"
            )
    responses = batch["responses"]
    lengths = lengths_of(batch["prompts"])
    if bool((lengths < 1).any()):
        row = int(lengths.argmin())
        raise ColumnError(
            f"micro-batch: row {row} has an empty prompt; expected at least one token, which "
            f"predicts the first of the response; start prompts with a bos token"
        )
    everywhere = torch.ones_like(responses.values(), dtype=torch.bool)
    sizes = lengths_of(responses)
    columns = {"response_mask": ragged(everywhere, sizes)}
    for name, column in batch.items():
        if not isinstance(column, Tensor):
            continue
        own_sizes = sizes
        each = "one entry per response token"
        if name == ROUTES:
            own_sizes = lengths + sizes
            each = "one entry per token of prompt and response"
        if (
            name != "prompts"
            and is_ragged(column)
            and not torch.equal(lengths_of(column), own_sizes)
        ):
            raise ColumnError(
                f"micro-batch: column {name} has row lengths {lengths_of(column).tolist()[:8]}...; "
                f"expected {own_sizes.tolist()[:8]}...; write {each}"
            )
        columns[name] = column
    return TensorDict(columns, batch_size=batch.batch_size)


def _padding_of(rows: TensorDict) -> TensorDict:
    """Return one padding row: a prompt and a response of one token 0 each, other columns 0."""
    one = torch.ones(1, dtype=torch.int64)

    def zero(column: Any) -> Tensor:
        """Return a column of one row of zeros, which has one entry if the column is ragged."""
        values: Tensor = column.values() if is_ragged(column) else column
        zeros = values.new_zeros(1, *values.shape[1:])
        if is_ragged(column):
            return ragged(zeros, one)
        return zeros

    plain = rows.exclude(ROUTES)
    return TensorDict({name: zero(column) for name, column in plain.items()}, batch_size=[1])


@dataclass(frozen=True)
class _TokenPositions:
    """Positions of the tokens of b rows in (1, N) or (b, T), flattened."""

    shape: tuple[int, int]
    prompts: Tensor
    """(b,) int64: index of the first token of each prompt; rows may share one."""
    responses: Tensor
    """(b,) int64: index of the first token of each response, or where it would be."""
    packed: PackedRows | None


def _token_positions(rows: TensorDict, *, packed: bool, shares: bool) -> _TokenPositions:
    """Return where the tokens of each row lie in the micro-batch.

    Padded: row i begins at i * T, T tokens of the longest row. Packed: rows lie end to end. shares:
    prompts that several packed rows share come first, if that saves enough.
    """
    prompt_lengths = lengths_of(rows["prompts"])
    totals = prompt_lengths + lengths_of(rows["responses"])
    if not packed:
        shape = (len(totals), int(totals.max()))
        starts = torch.arange(len(totals)) * shape[1]
        return _TokenPositions(shape, starts, starts + prompt_lengths, None)
    groups = _shared_prompts(rows["prompts"], totals.tolist()) if shares else []
    if groups:
        return _positions_with_sharing(groups, prompt_lengths.tolist(), totals.tolist())
    starts = totals.cumsum(0) - totals
    shape = (1, int(totals.sum()))
    return _TokenPositions(shape, starts, starts + prompt_lengths, PackedRows.of(totals.tolist()))


def _shared_prompts(prompts: Tensor, totals: list[int]) -> list[list[int]]:
    """Return groups of rows with an equal prompt that is worth computing once; short prompts first.

    See `shared_groups`. totals: tokens of each row, prompt and response.
    """
    keys = [prompt.numpy().tobytes() for prompt in rows_of(prompts)]
    return shared_groups(keys, lengths_of(prompts).tolist(), totals)


def _positions_with_sharing(
    groups: list[list[int]], prompts: list[int], totals: list[int]
) -> _TokenPositions:
    """Return positions where shared prompts are packed first, each as a separate row.

    After them comes every row: only its response if it shares a prompt, otherwise the whole row. A
    row also sees the keys of its shared prompt. groups: rows of each shared prompt. prompts,
    totals: tokens of each row's prompt, and of prompt and response.
    """
    offset = 0
    starts: dict[int, int] = {}
    # sizes: (tokens, visible keys) of each packed row; keys: (index, tokens) of visible spans
    sizes = []
    keys = []
    for group in groups:
        length = prompts[group[0]]
        starts |= dict.fromkeys(group, offset)
        sizes.append((length, length))
        keys.append((offset, length))
        offset += length
    responses = []
    for row, (prompt, total) in enumerate(zip(prompts, totals, strict=True)):
        shared = row in starts
        start = starts.setdefault(row, offset)
        own = total - prompt if shared else total
        responses.append(offset if shared else offset + prompt)
        if own:
            sizes.append((own, total))
            keys += [(start, prompt), (offset, own)] if shared else [(offset, own)]
        offset += own
    lengths, seen = zip(*sizes, strict=True)
    seen_keys = SeenKeys.of(seen, _spans(*torch.tensor(keys).T))
    return _TokenPositions(
        (1, offset),
        torch.tensor([starts[row] for row in range(len(totals))]),
        torch.tensor(responses),
        replace(PackedRows.of(lengths), seen=seen_keys),
    )


def _shard_tokens(micro: MicroBatch, group: ContextGroup) -> MicroBatch:
    """Return the micro-batch with this rank's tokens of each row. c divides the row's length."""
    rows, length = micro.input_ids.shape
    shape = (rows, length)
    shard = TokenShard.of(group, shape=shape, predicting=micro.predicting, rows=micro.packed)
    routes = micro.routes
    if routes is not None:
        routes = shard.select(routes.unflatten(0, (rows, length))).flatten(0, 1)
    return replace(
        micro,
        input_ids=shard.select(micro.input_ids),
        position_ids=shard.select(micro.position_ids),
        rows_of_token=shard.select(micro.rows_of_token),
        routes=routes,
        shard=shard,
    )


def _build_micro_batch(rows: TensorDict, index: Tensor, layout: _TokenPositions) -> MicroBatch:
    """Build the micro-batch of these rows, with tokens where `layout` says, in host memory.

    index: positions of the rows in the batch; empty for a padding row, whose row_weight is 0.
    Ragged columns become (b, R), R the longest response but at least 1.
    """
    prompts = rows["prompts"]
    responses = rows["responses"]
    prompt_lengths = lengths_of(prompts)
    response_lengths = lengths_of(responses)
    shape = layout.shape
    num_rows = len(prompt_lengths)
    at_prompts = _spans(layout.prompts, prompt_lengths)
    at_responses = _spans(layout.responses, response_lengths)
    input_ids = torch.zeros(shape, dtype=torch.int64)
    input_ids.view(-1)[at_prompts] = prompts.values()
    input_ids.view(-1)[at_responses] = responses.values()
    positions = torch.arange(shape[1]).expand(shape).clone()
    if layout.packed is not None:
        positions[0, at_prompts] = _spans(torch.zeros_like(prompt_lengths), prompt_lengths)
        positions[0, at_responses] = _spans(prompt_lengths, response_lengths)
    # the first token of a response is predicted where its prompt ends
    before = layout.prompts + prompt_lengths - 1
    answered = response_lengths > 0
    predicting = at_responses - 1
    predicting[(response_lengths.cumsum(0) - response_lengths)[answered]] = before[answered]
    ends = torch.where(answered, layout.responses + response_lengths - 1, before)
    width = max(1, int(response_lengths.max()))
    in_width = _spans(torch.arange(num_rows) * width, response_lengths)
    rows_of_token = torch.bincount(
        torch.cat([at_prompts, at_responses]), minlength=input_ids.numel()
    )
    routes = None
    if ROUTES in rows.keys():
        routes = _place_routes(rows, at_prompts, at_responses, num_tokens=input_ids.numel())
    columns: dict[str, Any] = dict(rows.exclude("prompts", "responses", ROUTES).items())
    for name, column in columns.items():
        columns[name] = pad(column, width=width) if is_ragged(column) else column
    return MicroBatch(
        input_ids=input_ids,
        position_ids=positions,
        packed=layout.packed,
        response_lengths=response_lengths,
        response_mask=columns.pop("response_mask").bool(),
        row_weight=torch.full((num_rows,), float(len(index) > 0)),
        columns=columns,
        index=index,
        answers=response_lengths[: len(index)],
        targets=responses.values(),
        predicting=predicting,
        ends=ends,
        response_indices=in_width,
        rows_of_token=rows_of_token.view(shape).int() * (len(index) > 0),
        routes=routes,
    )


def _place_routes(
    rows: TensorDict, at_prompts: Tensor, at_responses: Tensor, *, num_tokens: int
) -> Tensor:
    """Return the experts of each token of a micro-batch, (num_tokens, layers, k) int16.

    at_prompts, at_responses: position of each prompt token and response token, row after row.
    Padding selects itself. A shared prompt has the routes of the last row that shares it.
    """
    column = rows[ROUTES]
    values = from_column(column.values())
    prompt_lengths = lengths_of(rows["prompts"])
    starts = lengths_of(column).cumsum(0) - lengths_of(column)
    routes = values.new_full((num_tokens, *values.shape[1:]), OWN_CHOICE)
    routes[at_prompts] = values[_spans(starts, prompt_lengths)]
    in_responses = _spans(starts + prompt_lengths, lengths_of(rows["responses"]))
    routes[at_responses] = values[in_responses]
    return routes


def _on_device(micro: MicroBatch, device: torch.device) -> MicroBatch:
    """Copy the tensors that a forward reads to the device, in a single transfer.

    index and answers stay on the host.
    """
    names = (
        *("input_ids", "position_ids", "response_lengths", "response_mask", "row_weight"),
        *("targets", "predicting", "ends", "response_indices", "rows_of_token"),
    )

    def map_tensors(move: Callable[[Tensor], Tensor]) -> MicroBatch:
        """Return the micro-batch with `move` applied to each tensor, always in the same order."""
        tensors: dict[str, Any] = {name: move(getattr(micro, name)) for name in names}
        columns = {}
        for name, column in micro.columns.items():
            columns[name] = move(column)
        packed = micro.packed and micro.packed.move_tensors(move)
        shard = micro.shard and micro.shard.move_tensors(move)
        tensors["routes"] = None if micro.routes is None else move(micro.routes)
        return replace(micro, columns=columns, packed=packed, shard=shard, **tensors)

    on_host: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        on_host.append(tensor)
        return tensor

    map_tensors(collect)
    moved = iter(all_to_device(on_host, device))
    return map_tensors(lambda _: next(moved))


def _spans(starts: Tensor, lengths: Tensor) -> Tensor:
    """start, start + 1, ... of every row, `length` numbers each, one row after the other."""
    before = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) + (starts - before).repeat_interleave(lengths)
