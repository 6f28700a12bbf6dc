"""Attention of a decode step over keys that rows share, as one product for each prompt.

As in Hydragen (Juravsky et al. 2024). cpu.llama holds the keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spmdflow.parallel.device import to_device


@dataclass(frozen=True)
class SharedPrompts:
    """Which of G prompts each of n live rows begins with; at most M rows share one."""

    size: int
    """G."""
    starts: Tensor
    """(n,) int64: length of the prompt of each row."""
    by_prompt: Tensor
    """(G * KV * M * g,) int64: indices of query heads (n * KV * g,), prompt by prompt. A prompt
    with fewer rows than M repeats its first row, or row 0."""
    by_row: Tensor
    """(n * KV * g,) int64: indices of query heads in by_prompt, row by row."""

    @classmethod
    def of(
        cls, lengths: list[int], of_row: list[int], heads: Tensor, device: torch.device
    ) -> SharedPrompts:
        """Build the index tables `by_prompt` and `by_row` on `device`, and `starts`.

        lengths: of the prompts.
        of_row: the prompt of each row.
        heads (KV, g) int64: numbers of the query heads, on the host.
        """
        kv_heads, group = heads.shape
        members: list[list[int]] = [[] for _ in lengths]
        ranks = []
        for row, prompt in enumerate(of_row):
            ranks.append(len(members[prompt]))
            members[prompt].append(row)
        most = max(map(len, members), default=0)
        padded_rows = []
        for rows in members:
            padded_rows.append(rows + (rows[:1] or [0]) * (most - len(rows)))
        table = torch.tensor(padded_rows, dtype=torch.int64).view(len(lengths), 1, most, 1)
        prompts, rank = torch.tensor([of_row, ranks], dtype=torch.int64)[..., None, None]
        head = heads // group
        part = heads % group
        parts = [
            torch.tensor([lengths[prompt] for prompt in of_row], dtype=torch.int64),
            (table * heads.numel() + heads[:, None]).view(-1),
            (((prompts * kv_heads + head) * most + rank) * group + part).view(-1),
        ]
        tables = to_device(torch.cat(parts), device).split([len(x) for x in parts])
        return cls(len(lengths), *tables)

    def to_prompts(self, x: Tensor) -> Tensor:
        """(n, KV, g, c) -> (G, KV, M * g, c)."""
        by_prompt = x.reshape(-1, x.shape[-1]).index_select(0, self.by_prompt)
        return by_prompt.view(self.size, x.shape[1], -1, x.shape[-1])

    def to_rows(self, x: Tensor) -> Tensor:
        """(G, KV, M * g, c) -> (n, KV, g, c)."""
        by_row = x.reshape(-1, x.shape[-1]).index_select(0, self.by_row)
        return by_row.view(len(self.starts), x.shape[1], -1, x.shape[-1])

    def attend(self, query: Tensor, prompts: Tensor, own: Tensor, bias: Tensor) -> Tensor:
        """Return the attention output (n, H * head_dim) of a decode step.

        One softmax goes over the keys of a row's prompt and its own keys. Queries of rows with the
        same prompt are multiplied with its keys and values together.
        query (n, KV, g, head_dim): scaled.
        prompts (2, G, KV, P, head_dim), own (2, n, KV, S, head_dim): keys and values.
        bias (n, 1, 1, P + S): added to the scores; -inf hides a key.
        """
        widths = [prompts.shape[3], own.shape[3]]
        at_prompt = self.to_rows(self.to_prompts(query) @ prompts[0].transpose(2, 3))
        scores = torch.cat([at_prompt, query @ own[0].transpose(2, 3)], -1)
        of_prompt, of_own = scores.add_(bias).softmax(-1).split(widths, -1)
        mixed = self.to_rows(self.to_prompts(of_prompt) @ prompts[1])
        return mixed.add_(of_own @ own[1]).view(len(query), -1)
