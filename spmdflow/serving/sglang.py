"""`SglangClient`: the HTTP side of one SGLang server. `sglang_link` brings it weights.

Nothing of this package runs in the server. It draws with random numbers of its own, so a row that
moves to another server goes on differently (rollout.sampler=server). Routes, as of SGLang 0.5.23:

    GET  /model_info /server_info    who the server is, its weights version
    POST /generate                   a row, streamed

Written against the source of that version and never run with it, because it needs a GPU.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from spmdflow.errors import ConfigError
from spmdflow.rollout.generator import NEVER, Request
from spmdflow.serving.client import (
    ResponsePart,
    ServerClient,
    ServerFacts,
    ServerFault,
    WrongAnswer,
    WrongVersion,
    parse_event,
    parse_log_prob,
    parse_tokens,
    show_value,
)
from spmdflow.serving.identity import config_hash, tokenizer_hash

_VERSION = re.compile(r"([0-9a-f]{1,32}):(\d{1,12})")
_DTYPES = {"half": "float16", "float": "float32"}
"""SGLang's other names of precisions."""
_INTERVAL = 16
"""Tokens between two parts of a server that repeats all tokens of a row in each part."""
_HOTTEST = 1e6
"""Temperature that makes all tokens equally likely."""
_MOST_SPREAD = 1e-3
_NUM_PROBED = 64
_MOST_PATH = 4096
_AWAKE = ("sleep", "wake_up")
"""Routes of vLLM that free the memory of a server; SGLang's keep theirs."""


class SglangClient(ServerClient):
    """One SGLang server."""

    _is_incremental = False
    """Whether a part of a stream has what is new, instead of the whole row so far."""
    _instance = ""
    _checked_instance = ""
    """The instance whose log-probabilities are known to be after the temperature."""

    async def facts(self, *, seconds: float) -> ServerFacts:
        """Ask who the server is; see ServerClient.facts.

        model, tokenizer: hashes of the folders that the server names, as this host reads them.
        instance: hash of what differs between two starts. running: not known, 0.
        """
        model = await self.call("GET", "model_info", None, seconds=seconds)
        server = await self.call("GET", "server_info", None, seconds=seconds)
        for name in ("dp_size", "pp_size"):
            if server.get(name) != 1:
                raise ServerFault(
                    f"{name}: got {show_value(server.get(name))}, expected 1; start it with "
                    f"--{name.replace('_', '-')} 1"
                )
        if server.get("preferred_sampling_params") is not None:
            raise ServerFault("it has preferred sampling parameters; start it without them")
        start = [server.get(name) for name in ("startup_time", "random_seed", "launch_command")]
        self._instance = hashlib.sha256(json.dumps(start).encode()).hexdigest()[:32]
        self._is_incremental = server.get("incremental_streaming_output") is True
        epoch, version = read_version(model.get("weight_version"))
        dtype = server.get("quantization") or server.get("dtype")
        states = server.get("internal_states")
        state = states[0] if isinstance(states, list) and states else None
        if not isinstance(state, dict):
            raise WrongAnswer(f"internal_states {show_value(states)}")
        return ServerFacts.of(
            {
                "instance": self._instance,
                "model": await _hash_folder(config_hash, model.get("model_path")),
                "tokenizer": await _hash_folder(tokenizer_hash, model.get("tokenizer_path")),
                "dtype": _DTYPES.get(str(dtype), dtype),
                "row_noise": False,
                "num_workers": server.get("tp_size"),
                "max_model_len": server.get("max_req_input_len"),
                "max_num_seqs": state.get("effective_max_running_requests_per_dp"),
                "prefix_caching": server.get("disable_radix_cache") is not True,
                "epoch": epoch,
                "weights_version": version,
                "running": 0,
            }
        )

    async def call(
        self, method: str, route: str, body: Mapping[str, Any] | None, *, seconds: float
    ) -> dict[str, Any]:
        """See ServerClient.call. Does nothing for a route that lets a vLLM server sleep or wake."""
        if route.partition("?")[0] in _AWAKE:
            return {}
        return await super().call(method, route, body, seconds=seconds)

    async def generate(
        self, request: Request, *, ends: Sequence[int], version: str, stall_seconds: float
    ) -> AsyncIterator[ResponsePart]:
        """Stream the response to a request, drawn by the server; see ServerClient.generate."""
        sampling = request.sampling
        if sampling.temperature != 1 and not sampling.greedy:
            await self._check_temperature(request, seconds=stall_seconds)
        reader = RowReader(
            vocab_size=self._vocab_size,
            max_new_tokens=sampling.max_new_tokens,
            ends=ends,
            version=version,
            is_incremental=self._is_incremental,
        )
        stream = self.lines(
            "generate", self._body_of(request, ends), {}, stall_seconds=stall_seconds
        )
        async with aclosing(stream) as lines:
            async for line in lines:
                part = reader.read(line)
                if part is None:
                    continue
                yield part
                if part.finish is not None:
                    return
        raise ServerFault("the stream ended before the response")

    def _body_of(self, request: Request, ends: Sequence[int]) -> dict[str, Any]:
        """What /generate gets for a row. Its ignore_eos would also ignore stop_token_ids."""
        sampling = request.sampling
        choice: dict[str, Any] = {
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "top_p": 1.0 if sampling.greedy else sampling.top_p,
            "top_k": -1 if sampling.greedy else sampling.top_k or -1,
            "max_new_tokens": sampling.max_new_tokens,
            "stop_token_ids": list(ends),
        }
        if not self._is_incremental:
            choice["stream_interval"] = _INTERVAL
        return {
            "input_ids": request.prompt.tolist(),
            "sampling_params": choice,
            "return_logprob": True,
            "stream": True,
        }

    async def _check_temperature(self, request: Request, *, seconds: float) -> None:
        """WrongAnswer if the server's log-probabilities are those before the temperature.

        It does not say which (SGLANG_RETURN_ORIGINAL_LOGPROB). At a very high temperature all
        tokens are equally likely after it, and differ before it. Asked once of each instance.
        """
        if self._checked_instance == self._instance:
            return
        instance = self._instance
        body = {
            "input_ids": request.prompt.tolist(),
            "sampling_params": {"temperature": _HOTTEST, "max_new_tokens": 1},
            "return_logprob": True,
            "token_ids_logprob": list(range(min(self._vocab_size, _NUM_PROBED))),
        }
        answer = await self.call("POST", "generate", body, seconds=seconds)
        values = _probed_log_probs(answer)
        if max(values) - min(values) > _MOST_SPREAD:
            raise WrongAnswer(
                "its log-probabilities are those before the temperature; start it without "
                "SGLANG_RETURN_ORIGINAL_LOGPROB, or set actor.rollout.temperature=1"
            )
        self._checked_instance = instance


class RowReader:
    """Reads the stream of one row, and checks that it is one that a correct server sends."""

    def __init__(
        self,
        *,
        vocab_size: int,
        max_new_tokens: int,
        ends: Sequence[int],
        version: str,
        is_incremental: bool,
    ) -> None:
        """is_incremental: a part has the new tokens; otherwise all tokens of the row so far."""
        self._vocab_size = vocab_size
        self._max_new_tokens = max_new_tokens
        self._ends = frozenset(ends)
        self._version = version
        self._is_incremental = is_incremental
        self._tokens: list[int] = []

    def read(self, line: bytes) -> ResponsePart | None:
        """Read one line; None if it has no part.

        WrongAnswer, WrongVersion or ServerFault for anything else.
        """
        answer = parse_event(line)
        if answer is None:
            return None
        if "error" in answer:
            raise ServerFault(f"/generate: {show_value(answer['error'])}")
        facts = answer.get("meta_info")
        if not isinstance(facts, dict):
            raise WrongAnswer(f"meta_info {show_value(facts)}")
        finish = _finish_of(facts.get("finish_reason"))
        if finish == "abort":
            return ResponsePart((), (), finish)  # its tokens may be some that were there before
        self._check_version(facts)
        tokens, log_probs = self._new_tokens(answer.get("output_ids"), facts)
        self._tokens += tokens
        if finish == "length" and len(self._tokens) < self._max_new_tokens:
            number = f"{len(self._tokens)} of {self._max_new_tokens} tokens"
            raise WrongAnswer(f"it ended after {number}; its context or cache has no room for more")
        if finish == "stop" and (not self._tokens or self._tokens[-1] not in self._ends):
            raise WrongAnswer(f"it ended at {self._tokens[-1:]}, which ends no response of the run")
        if finish is None and not tokens:
            return None
        return ResponsePart(tuple(tokens), tuple(log_probs), finish)

    def _check_version(self, facts: Mapping[str, Any]) -> None:
        """WrongVersion if any token is of other weights than the row was asked of."""
        versions = [facts.get("weight_version")]
        spans = facts.get("weight_versions")
        for span in spans if isinstance(spans, list) else []:
            versions.append(span.get("version") if isinstance(span, dict) else span)
        for version in versions:
            if version != self._version:
                raise WrongVersion(f"weights {show_value(version)}, not {self._version}")

    def _new_tokens(self, value: object, facts: Mapping[str, Any]) -> tuple[list[int], list[float]]:
        """The tokens that the row did not have yet, and their log-probabilities."""
        known = 0 if self._is_incremental else len(self._tokens)
        left = self._max_new_tokens - len(self._tokens) + known
        tokens = parse_tokens(value, vocab_size=self._vocab_size, left=left)
        entries = facts.get("output_token_logprobs")
        if not isinstance(entries, list) or len(entries) != len(tokens):
            raise WrongAnswer(f"log-probabilities {show_value(entries)} of {len(tokens)} tokens")
        if tokens[:known] != self._tokens[:known]:
            raise WrongAnswer(f"a part that does not begin with the {known} tokens before it")
        log_probs: list[float] = []
        for token, entry in zip(tokens[known:], entries[known:], strict=True):
            if not isinstance(entry, list) or len(entry) != 3 or entry[1] != token:
                raise WrongAnswer(f"log-probability {show_value(entry)} of token {token}")
            log_probs.append(parse_log_prob(entry[0]))
        return tokens[known:], log_probs


def read_version(value: object) -> tuple[str, int]:
    """(run, version) of the weights that a server names; ("", NEVER) if no run gave them."""
    found = _VERSION.fullmatch(value) if isinstance(value, str) else None
    return (found[1], int(found[2])) if found else ("", NEVER)


async def _hash_folder(function: Callable[[str], str], path: object) -> str:
    """The hash of a folder that a server names. ServerFault if this host cannot read it."""
    if not isinstance(path, str) or len(path) > _MOST_PATH:
        raise WrongAnswer(f"a folder {show_value(path)}")
    try:
        return await asyncio.to_thread(function, path)
    except (ConfigError, OSError, ValueError) as err:
        raise ServerFault(
            f"folder: got {show_value(path)}, which this rank cannot read, expected a folder that "
            f"both have; serve actor.model.path under the same path"
        ) from err


def _finish_of(value: object) -> str | None:
    """Why a row ended: stop, length or abort; None: it goes on. WrongAnswer for anything else."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else value
    if kind not in ("stop", "length", "abort"):
        raise WrongAnswer(f"finish_reason {show_value(value)}")
    return str(kind)


def _probed_log_probs(answer: Mapping[str, Any]) -> list[float]:
    """The log-probabilities of the tokens of `_check_temperature`. WrongAnswer otherwise."""
    facts = answer.get("meta_info")
    table = facts.get("output_token_ids_logprobs") if isinstance(facts, dict) else None
    if not isinstance(table, list) or len(table) != 1 or not isinstance(table[0], list):
        raise WrongAnswer(f"log-probabilities {show_value(table)} of one token")
    result = []
    for entry in table[0]:
        if not isinstance(entry, list) or len(entry) != 3:
            raise WrongAnswer(f"log-probability {show_value(entry)}")
        result.append(parse_log_prob(entry[0]))
    if not result:
        raise WrongAnswer("no log-probabilities")
    return result
