"""Replies that a grammar limits (guided decoding), by the package xgrammar; for every generator.

At each position the grammar says which tokens may follow. The token is drawn among them, by the
same random number as without a grammar. The recorded log-probability is that of the policy WITHOUT
the grammar, because that is what the trainer recomputes: the two agree as for any other token. Such
tokens are off-policy: the policy alone chooses them with the recorded probability, guided decoding
with that probability divided by that of all allowed tokens. Where only one token is allowed, it is
marked as forced: nobody chose it, so it is not trained.

xgrammar is imported here alone, when the first request with a grammar comes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from spmdflow.datasets.tokenizer import load_tokenizer
from spmdflow.errors import ConfigError
from spmdflow.requirement import install_command
from spmdflow.rollout.sampling import Grammar, Sampling, draw, log_probs_of, scale

_BITS = 32
_MOST_SPACES = 8
"""Most white space between two parts of JSON: without a limit a reply might consist of it."""


@dataclass
class TokenNotes:
    """What is known of each token of a response besides its log-probability."""

    forced: list[bool] = field(default_factory=list)
    """Whether the grammar allowed no other token."""
    likeliest: list[list[tuple[int, float]]] = field(default_factory=list)
    """(token, log-probability) of the likeliest tokens at its position, if they are reported."""

    def cut(self, size: int) -> TokenNotes:
        """Those of the first `size` tokens."""
        return TokenNotes(self.forced[:size], self.likeliest[:size])

    def join(self, other: TokenNotes) -> TokenNotes:
        """These, followed by those of later tokens."""
        return TokenNotes(self.forced + other.forced, self.likeliest + other.likeliest)


def check_grammar(grammar: Grammar) -> None:
    """ConfigError if xgrammar is not installed, or cannot read the grammar."""
    xgrammar = _import_xgrammar()
    try:
        if grammar.kind == "json_schema":
            xgrammar.Grammar.from_json_schema(grammar.text, max_whitespace_cnt=_MOST_SPACES)
        else:
            xgrammar.Grammar.from_structural_tag(json.loads(grammar.text))
    except (RuntimeError, ValueError, TypeError) as err:
        # the first line is enough, without the place in xgrammar's source
        reason = str(err).strip().splitlines()[0].rpartition("cc:")[2].partition(": ")[2]
        raise ConfigError(
            f"the grammar cannot be used ({reason or err}); expected a JSON Schema that xgrammar "
            f"reads; simplify the schema"
        ) from err


def _import_xgrammar() -> Any:
    try:
        return import_module("xgrammar")
    except ImportError as err:
        raise ConfigError(
            f"a reply of a given form (response_format, tool_choice) needs the package xgrammar, "
            f"which is not installed; run {install_command('structured')}"
        ) from err


@lru_cache(maxsize=4)
def _compiler(tokenizer_path: str, vocab_size: int, ends: tuple[int, ...]) -> Any:
    xgrammar = _import_xgrammar()
    info = xgrammar.TokenizerInfo.from_huggingface(
        load_tokenizer(tokenizer_path), vocab_size=vocab_size, stop_token_ids=list(ends)
    )
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=256 << 20)


def compile_grammar(
    grammar: Grammar, *, tokenizer_path: str, vocab_size: int, ends: tuple[int, ...]
) -> Any:
    """The grammar for a tokenizer, compiled once. ConfigError if xgrammar cannot do that."""
    compiler = _compiler(tokenizer_path, vocab_size, ends)
    try:
        if grammar.kind == "json_schema":
            return compiler.compile_json_schema(grammar.text, max_whitespace_cnt=_MOST_SPACES)
        return compiler.compile_structural_tag(json.loads(grammar.text))
    except (RuntimeError, ValueError, TypeError) as err:
        raise ConfigError(
            f"the grammar cannot be used with the tokenizer of {tokenizer_path} ({err}); expected "
            f"one that xgrammar reads; send a request without response_format and tool_choice"
        ) from err


class _GuidedRow:
    """The state of one response that has a grammar, or whose likeliest tokens are reported."""

    def __init__(self, sampling: Sampling, *, vocab_size: int, ends: tuple[int, ...]) -> None:
        self.num_likeliest = sampling.top_log_probs
        self.notes = TokenNotes()
        self._ends = ends
        self._vocab_size = vocab_size
        self._matcher: Any = None
        self._banned: list[int] = []
        """Special tokens, which have no text: the grammar would take them for their names."""
        if sampling.grammar is None:
            return
        path = sampling.tokenizer_path
        compiled = compile_grammar(
            sampling.grammar, tokenizer_path=path, vocab_size=vocab_size, ends=ends
        )
        if sampling.grammar.kind == "json_schema":
            special = load_tokenizer(path).all_special_ids
            self._banned = [token for token in special if token not in ends]
        xgrammar = _import_xgrammar()
        self._matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(ends))
        self._bits = xgrammar.allocate_token_bitmask(1, vocab_size)

    @property
    def is_limited(self) -> bool:
        """Whether a grammar limits the next token."""
        return self._matcher is not None and not self._matcher.is_terminated()

    def allowed_tokens(self, device: torch.device) -> Tensor:
        """(V,) bool: the tokens that may follow. If none can (the vocabulary lacks a character that
        the grammar needs), the end tokens."""
        self._matcher.fill_next_token_bitmask(self._bits)
        shifts = torch.arange(_BITS, dtype=torch.int32)
        bits = (self._bits[0][:, None] >> shifts) & 1
        allowed = bits.flatten()[: self._vocab_size].bool()
        allowed[self._banned] = False
        if not bool(allowed.any()):
            allowed[list(self._ends)] = True
        return allowed.to(device)

    def accept(self, token: int) -> None:
        """Moves the grammar past a token."""
        if self.is_limited:
            self._matcher.accept_token(token)


class GuidedRows:
    """The rows of a generator whose draws need more than their logits."""

    def __init__(self, ends: Sequence[int]) -> None:
        """ends: token ids that end a response."""
        self._ends = tuple(ends)
        self._rows: dict[int, _GuidedRow] = {}

    def add(
        self, number: int, sampling: Sampling, prompt: Tensor, *, num_drawn: int, vocab_size: int
    ) -> None:
        """Begins a row with this number; does nothing for a row that needs no guidance.

        num_drawn: tokens of the response at the end of the prompt. vocab_size: width of the logits.
        """
        if sampling.grammar is None and not sampling.top_log_probs:
            return
        row = _GuidedRow(sampling, vocab_size=vocab_size, ends=self._ends)
        for token in prompt[len(prompt) - num_drawn :].tolist():
            row.accept(token)
        self._rows[number] = row

    def __bool__(self) -> bool:
        """Whether there is any such row."""
        return bool(self._rows)

    def redraw(
        self,
        numbers: Sequence[int | None],
        logits: Tensor,
        sampling: Sampling,
        seeds: Tensor,
        positions: Tensor,
        drawn: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Returns the tokens and log-probabilities of one draw, with those of guided rows replaced.

        numbers (B): of each row of the batch; None: its token does not count. logits (B, V), seeds
        (B,), positions (B,) and the result are those of `draw`. drawn: what `draw` returned.
        """
        tokens, log_probs = drawn
        places = []
        for place, number in enumerate(numbers):
            if number in self._rows:
                places.append(place)
        if not places:
            return drawn
        tokens = tokens.clone()
        log_probs = log_probs.clone()
        for place in places:
            number = numbers[place]
            assert number is not None
            row = self._rows[number]
            one = slice(place, place + 1)
            forced = False
            if row.is_limited:
                allowed = row.allowed_tokens(logits.device)
                forced = int(allowed.sum()) == 1
                masked = logits[one].float().masked_fill(~allowed, float("-inf"))
                tokens[one], _ = draw(masked, sampling, seeds[one], positions[one])
                log_probs[one] = log_probs_of(logits[one], tokens[one], sampling)
                row.accept(int(tokens[place]))
            row.notes.forced.append(forced)
            if row.num_likeliest:
                row.notes.likeliest.append(_likeliest(logits[place], sampling, row.num_likeliest))
        return tokens, log_probs

    def take(self, number: int, size: int) -> TokenNotes | None:
        """Removes a row, and returns the notes of its first `size` tokens; None if it is no guided
        row."""
        row = self._rows.pop(number, None)
        if row is None:
            return None
        return row.notes.cut(size)


def _likeliest(logits: Tensor, sampling: Sampling, count: int) -> list[tuple[int, float]]:
    """(token, log-probability) of the likeliest tokens for logits (V,), under the policy."""
    scaled = scale(logits, sampling.policy_temperature or sampling.temperature)
    values, tokens = scaled.log_softmax(-1).topk(min(count, len(scaled)))
    return list(zip(tokens.tolist(), values.tolist(), strict=True))
