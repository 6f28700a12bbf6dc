"""The forwards of the built-in generator: a causal LM with a KV cache, rows coming and going.

`LlamaForward` (cpu.llama) covers the Llama, Mistral, Qwen2 and Qwen3 families;
`HuggingFaceForward` runs every other family.

Of the rollout package, only this file imports transformers, inside its functions. It does not know
sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from spmdflow.cpu.llama import LlamaForward, covers
from spmdflow.kind.generator import PREFILL_TOKENS
from spmdflow.rollout.row_cache import (
    can_join,
    can_truncate,
    drop_slots,
    has_states,
    join,
    select_rows,
    take_row,
    truncate_row,
)
from spmdflow.router import Routers
from spmdflow.weights.folder import attention_of


class Routing:
    """Which experts the tokens of the last pass used, if `routers.records` is set."""

    def __init__(self, routers: Routers) -> None:
        self.routers = routers
        self.of_prompts: list[Tensor] = []
        """Of each prompt of a `prefill`, or of each row's new tokens in an `extend`, (P, layers, k)
        int16."""
        self.of_tokens = routers.own_routes(0)
        """Of the tokens of a `step`, (n, layers, k) int16."""


class CachedForward(Protocol):
    """Rows of a KV cache, parked ones first, and the forward passes that generation needs."""

    weights: dict[str, Tensor]
    """Every tensor that the forward reads, by Hugging Face name. Tied tensors appear once."""
    max_positions: int
    refills: bool
    """Whether new rows can join rows that are being decoded."""
    parks: bool
    """Whether rows can be parked, and extended later."""
    truncates: bool
    """Whether a parked row can be extended from before its end."""
    prefill_chunk: int
    """Most tokens of a prompt that one pass of `prefill` computes (chunked prefill)."""

    @property
    def routing(self) -> Routing | None:
        """Which experts its tokens use. None: it is no mixture of experts."""

    def reserve(self, rows: int, slots: int) -> None:
        """Makes room for `rows` rows with `slots` tokens each after the prompt. Keeps the
        content."""

    def prefill(self, prompts: list[Tensor], source: list[int]) -> Tensor:
        """Logits (n, V) after the prompts of n new rows, which are appended to the cache.

        Prompts longer than `prefill_chunk` are computed in chunks, and so are tokens in `extend`.
        prompts: distinct prompts, on the host. source: index of each new row's prompt.
        """

    def extend(self, rows: list[int], more: list[Tensor], starts: list[int]) -> Tensor:
        """Logits (B, V) after more tokens of B parked rows. Cache entries from `starts` on are
        overwritten. The next `keep` makes live rows of them.

        rows: their cache rows. more: tokens of each row, at least one, on the host. starts:
        position of each row's first new token; the row's number of tokens, unless it `truncates`.
        """

    def step(self, tokens: Tensor, positions: Tensor, span: int) -> Tensor:
        """Logits (n, V) after one more token (n,) of every row that is not parked.

        positions (n,): of these tokens. span: upper bound of the tokens that any row has after its
        prompt, including this one.
        """

    def keep(self, rows: list[int], num_parked: int = 0) -> None:
        """Keeps only these rows, in this order. The first `num_parked` of them only keep their keys
        and values; they are not decoded."""

    def release(self) -> None:
        """Free the KV cache."""

    def renew(self) -> None:
        """Forget what was computed from the weights, because they have changed."""


def forward_of(
    path: str, *, dtype: torch.dtype, device: torch.device, empty: bool
) -> CachedForward:
    """Returns a LlamaForward if it covers the folder's model, otherwise a HuggingFaceForward.

    empty: a LlamaForward may start with zeros as weights, because a sync or `take_folder_weights`
    fills them. A HuggingFaceForward always reads the folder. Only local files are read, and no code
    of the folder is run.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    if not covers(module):
        return HuggingFaceForward(causal_lm(path, dtype=dtype, device=device))
    if not empty:
        module = causal_lm(path, dtype=dtype, device=device)
    return LlamaForward(module, device, prefill_chunk=PREFILL_TOKENS)


def causal_lm(path: str, *, dtype: torch.dtype, device: torch.device) -> Any:
    """Returns a folder's transformers model on `device`, in evaluation mode, without gradients.

    The folder has config.json and *.safetensors; no code of the folder is run. Also turns off the
    progress bars of transformers in this process.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # one bar per rank and model would hide the run's log lines
    attention = attention_of(
        AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    )
    module = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, local_files_only=True, trust_remote_code=False, **attention
    )
    return module.to(device).eval().requires_grad_(False)


def end_tokens(path: str) -> tuple[int, ...]:
    """Returns the ids of the tokens that end a response; () if there are none.

    These are eos_token_id of generation_config.json, or of config.json if the former is missing or
    has none.
    """
    from transformers import AutoConfig, GenerationConfig

    end_ids = AutoConfig.from_pretrained(
        path, local_files_only=True, trust_remote_code=False
    ).eos_token_id
    if (Path(path) / "generation_config.json").exists():
        override = GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id
        end_ids = end_ids if override is None else override
    if end_ids is None:
        return ()
    if isinstance(end_ids, list | tuple):
        return tuple(end_ids)
    return (int(end_ids),)


def vocab_size(path: str) -> int:
    """Number of rows of the embedding according to config.json. Token ids are smaller."""
    from transformers import AutoConfig

    cfg = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    return int(cfg.get_text_config().vocab_size)


def _max_positions(config: Any) -> int:
    """The context length of a model, in tokens; without one in its config, what an index can be."""
    stated = getattr(config.get_text_config(), "max_position_embeddings", None)
    return stated or torch.iinfo(torch.int32).max


class HuggingFaceForward:
    """Forward of any model family, with transformers' own module and cache.

    All rows end at the same slot of the cache (`row_cache`), because sliding windows count slots.
    A parked row ends where it ended, so it has a cache of its own. Prompts of families with states
    (linear attention) are computed in one pass.
    """

    prefill_chunk = PREFILL_TOKENS

    def __init__(self, module: Any) -> None:
        """module: a transformers causal LM in evaluation mode. Its weights get memory of their
        own, which can be freed, if they are mapped from a file."""
        from transformers import DynamicCache

        self._module = module
        routers = Routers.of(module)
        self.routing = None if routers is None else Routing(routers)
        self._cache: Any = None
        self._mask = torch.zeros(0, 0, dtype=torch.int64, device=module.device)
        """(rows, slots): 1 where a slot has a token of the row. Without parked rows."""
        self._parked: list[_RowCache] = []
        empty = DynamicCache(config=module.config)
        self.refills = can_join(empty)
        self.truncates = can_truncate(empty)
        self._prefills_in_chunks = not has_states(empty)
        self.parks = self.refills and (not has_states(empty) or _continues_states(module))
        self.weights: dict[str, Tensor] = {}
        for name, parameter in module.named_parameters():
            if not parameter.untyped_storage().resizable():
                parameter.data = parameter.data.clone()
            self.weights[name] = parameter.detach()
        self.max_positions: int = _max_positions(module.config)

    def reserve(self, rows: int, slots: int) -> None:
        """Does nothing, because the cache grows on its own."""

    def prefill(self, prompts: list[Tensor], source: list[int]) -> Tensor:
        """See CachedForward.prefill."""
        from transformers import DynamicCache

        ones = [torch.ones_like(prompt) for prompt in prompts]
        ids, mask = (
            pad_sequence(rows, batch_first=True, padding_side="left").to(self._module.device)
            for rows in (prompts, ones)
        )
        cache = DynamicCache(config=self._module.config)
        positions = (mask.cumsum(1) - 1).clamp_(min=0)
        logits, routes = self._run_in_chunks(cache, ids, mask, positions)
        if self.routing is not None and routes is not None:
            of_prompts = []
            for prompt, row in zip(prompts, routes, strict=True):
                of_prompts.append(row[len(row) - len(prompt) :])
            self.routing.of_prompts = of_prompts
        selection = torch.tensor(source, dtype=torch.int64, device=mask.device)
        select_rows(cache, selection)
        self._append(cache, mask[selection])
        return logits[selection]

    def extend(self, rows: list[int], more: list[Tensor], starts: list[int]) -> Tensor:
        """See CachedForward.extend. Rows with the same number of new tokens run together."""
        results: dict[int, Tensor] = {}
        of_prompts: dict[int, Tensor] = {}
        for size in sorted({len(tokens) for tokens in more}):
            chosen = [index for index, tokens in enumerate(more) if len(tokens) == size]
            for index in chosen:
                self._parked[rows[index]].truncate(starts[index])
            group = [self._parked[rows[index]] for index in chosen]
            cache, mask = _join_rows(group, self._mask)
            mask = pad(mask, (0, size), value=1)
            first = torch.tensor([[starts[index]] for index in chosen], device=mask.device)
            positions = first + torch.arange(size, device=mask.device)
            ids = torch.stack([more[index] for index in chosen]).to(mask.device)
            logits, routes = self._run_in_chunks(cache, ids, mask, positions)
            for row_of_pass, index in enumerate(chosen):
                self._parked[rows[index]] = _RowCache.of(cache, mask, row_of_pass)
                results[index] = logits[row_of_pass]
                if routes is not None:
                    of_prompts[index] = routes[row_of_pass]
        if self.routing is not None:
            self.routing.of_prompts = [of_prompts[index] for index in sorted(of_prompts)]
        return torch.stack([results[index] for index in range(len(rows))])

    def _run_in_chunks(
        self, cache: Any, ids: Tensor, mask: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Run new tokens, `prefill_chunk` at a time, after those in the cache; see `_run`.

        ids, positions: (B, F) of new tokens. mask: (B, slots), of the cached tokens and of these.
        """
        width = ids.shape[1]
        num_cached = mask.shape[1] - width
        chunk_size = self.prefill_chunk if self._prefills_in_chunks else width
        routes_of_chunks = []
        for start in range(0, width, chunk_size):
            end = min(start + chunk_size, width)
            chunk = slice(start, end)
            seen = mask[:, : num_cached + end]
            logits, routes = self._run(cache, ids[:, chunk], seen, positions[:, chunk])
            if routes is not None:
                routes_of_chunks.append(routes)
        return logits, torch.cat(routes_of_chunks, 1) if routes_of_chunks else None

    def step(self, tokens: Tensor, positions: Tensor, span: int) -> Tensor:
        """See CachedForward.step."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], 1)
        logits, routes = self._run(self._cache, tokens[:, None], self._mask, positions[:, None])
        if self.routing is not None and routes is not None:
            self.routing.of_tokens = routes[:, 0]
        return logits

    def keep(self, rows: list[int], num_parked: int = 0) -> None:
        """See CachedForward.keep. Slots that no live row uses are dropped."""
        before = self._parked
        self._parked = []
        for row in rows[:num_parked]:
            if row < len(before):
                self._parked.append(before[row])
            else:
                self._parked.append(_RowCache.of(self._cache, self._mask, row - len(before)))
        wanted = rows[num_parked:]
        live = [row for row in wanted if row >= len(before)]
        extended = [row for row in wanted if row < len(before)]
        self._select([row - len(before) for row in live])
        if extended:
            self._append(*_join_rows([before[row] for row in extended], self._mask))
            order = [*live, *extended]
            self._select([order.index(row) for row in wanted])

    def release(self) -> None:
        """Free the KV cache with all rows, parked ones too."""
        self._parked = []
        self._select([])

    def _append(self, cache: Any, mask: Tensor) -> None:
        """Append the rows of a cache to the live ones. mask (n, slots): of these rows."""
        if not len(self._mask):
            self._cache = cache
            self._mask = mask
            return
        join(self._cache, cache)
        num_slots = max(mask.shape[1], self._mask.shape[1])
        both = [pad(x, (num_slots - x.shape[1], 0)) for x in (self._mask, mask)]
        self._mask = torch.cat(both)

    def _select(self, rows: list[int]) -> None:
        """Keep only these live rows, in this order, and the slots that one of them uses."""
        if not rows:
            self._cache = None
            self._mask = self._mask.new_zeros(0, 0)
            return
        selection = torch.tensor(rows, dtype=torch.int64, device=self._mask.device)
        self._mask = self._mask[selection]
        select_rows(self._cache, selection)
        num_slots = self._mask.shape[1]
        used = int(self._mask.sum(1).max())
        if used < num_slots:
            drop_slots(self._cache, num_slots, used)
            self._mask = self._mask[:, num_slots - used :]

    def renew(self) -> None:
        """Does nothing, because only the KV cache is computed from the weights."""

    def _run(
        self, cache: Any, ids: Tensor, mask: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Logits (n, V) after the last of these tokens (n, m), whose keys the cache gets.

        With them the experts of each token, (n, m, layers, k) int16, if the routers record;
        otherwise None. mask (n, slots): of all slots including these tokens'. positions (n, m).
        """
        routers = None if self.routing is None else self.routing.routers
        if routers is not None:
            routers.begin()
        output = self._module(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        if routers is None or not routers.records:
            return logits, None
        chosen = torch.stack([layer.experts for layer in routers.take_all()], 1)
        return logits, chosen.to(torch.int16).view(*ids.shape, *chosen.shape[1:])


@dataclass
class _RowCache:
    """The cache of a single parked row, without slots before its first token."""

    cache: Any
    num_tokens: int

    @classmethod
    def of(cls, cache: Any, mask: Tensor, row: int) -> _RowCache:
        """A copy of one row of a cache. mask: (rows, slots) of the cache."""
        num_tokens = int(mask[row].sum())
        index = torch.tensor([row], dtype=torch.int64, device=mask.device)
        return cls(take_row(cache, index, mask.shape[1], num_tokens), num_tokens)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first tokens. AssertionError if there are more, and layers cannot truncate."""
        if num_tokens == self.num_tokens:
            return
        assert can_truncate(self.cache), (num_tokens, self.num_tokens)
        truncate_row(self.cache, num_tokens)
        self.num_tokens = num_tokens


def _join_rows(rows: Sequence[_RowCache], like: Tensor) -> tuple[Any, Tensor]:
    """One cache with these rows, at least one, and its mask (n, slots), with `like`'s type."""
    num_slots = max(row.num_tokens for row in rows)
    masks = []
    for row in rows:
        masks.append(pad(like.new_ones(row.num_tokens), (num_slots - row.num_tokens, 0)))
    index = torch.zeros(1, dtype=torch.int64, device=like.device)
    cache = take_row(rows[0].cache, index, rows[0].num_tokens, rows[0].num_tokens)
    for row in rows[1:]:
        join(cache, row.cache)
    return cache, torch.stack(masks)


def _continues_states(module: Any) -> bool:
    """Whether a transformers module with linear attention continues a state over several tokens.

    Some modules only continue it over one token, and begin with an empty state for more. Checked
    with five tokens: the last two, continued, must be closer to a pass over all five than to one
    over the two alone, by a factor of four.
    """
    from transformers import DynamicCache

    ids = torch.arange(1, 6, device=module.device)[None]
    cache = DynamicCache(config=module.config)
    with torch.inference_mode():
        at_once = module(input_ids=ids, use_cache=False).logits[0, 3:]
        module(input_ids=ids[:, :3], past_key_values=cache, use_cache=True)
        continued = module(input_ids=ids[:, 3:], past_key_values=cache, use_cache=True).logits[0]
        alone = module(input_ids=ids[:, 3:], use_cache=False).logits[0]
    wrong = float((alone - at_once).abs().max())
    return 4 * float((continued - at_once).abs().max()) < wrong
