"""A stand-in for an SGLang server: answers as the source of SGLang 0.5.23 says, on the CPU.

It generates with a model of transformers in float32, whose weights are zeros until it gets some,
and receives tensors over a gloo group that it joins as SGLang does. `fault` makes it misbehave.
SGLang itself cannot be installed without CUDA, so this shows what its source says, as we read it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from transformers import AutoModelForCausalLM

SECONDS = timedelta(seconds=30)
FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


class Refusal(Exception):
    """A request that is answered with status 400."""


@dataclass
class Row:
    """A row that is generated."""

    prompt: list[int]
    choice: Mapping[str, Any]
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    probed: list[float] = field(default_factory=list)
    """Log-probabilities of the tokens that were asked for, at the last position."""
    finish: dict[str, Any] | None = None


class StandIn:
    """The server. Its requests are served by threads until `close`."""

    def __init__(
        self, model_path: str, *, key: str = "", is_incremental: bool = False, fault: str = ""
    ) -> None:
        self.model_path = model_path
        self.key = key
        self.is_incremental = is_incremental
        self.fault = fault
        self.facts: dict[str, Any] = {}
        """Replaces entries of /server_info."""
        self.version = "default"
        self.events: list[str] = []
        """Routes that changed the server, in order; generate once for a run of them."""
        self.bodies: list[dict[str, Any]] = []
        """Of the requests to generate."""
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        self._parameters = dict(self.model.named_parameters())
        for each in self._parameters.values():
            each.data.zero_()
        self._draws = torch.Generator().manual_seed(0)
        self._started = time.time()
        self._state = threading.Condition()
        self._is_paused = False
        self._running = 0
        self._aborted = 0
        """Rows that began before this number of pauses are aborted."""
        self._groups: dict[str, Any] = {}
        self._is_updating = False
        handler = type("Handler", (_Handler,), {"server_of": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self) -> None:
        """End it."""
        self._http.shutdown()
        self._http.server_close()

    def answer(self, route: str, body: dict[str, Any]) -> Any:
        """The answer to a request but /generate: JSON, or text."""
        if route == "model_info":
            return self._model_info()
        if route == "server_info":
            return self._server_info()
        if route == "stand_in":
            self.fault = body.get("fault", self.fault)
            return {"events": self.events, "version": self.version}
        self.events.append(route)
        result: Any = getattr(self, f"_post_{route}")(body)
        return result

    def _model_info(self) -> dict[str, Any]:
        return {
            "model_path": self.model_path,
            "served_model_name": self.model_path,
            "tokenizer_path": self.model_path,
            "is_generation": True,
            "weight_version": self.version,
            "model_type": "llama",
        }

    def _server_info(self) -> dict[str, Any]:
        facts = {
            "dtype": "float32",
            "quantization": None,
            "device": "cpu",
            "tp_size": 1,
            "pp_size": 1,
            "dp_size": 1,
            "disable_radix_cache": False,
            "preferred_sampling_params": None,
            "incremental_streaming_output": self.is_incremental,
            "random_seed": 1,
            "launch_command": "sglang serve",
            "startup_time": {"total": self._started},
            "max_req_input_len": self.model.config.max_position_embeddings - 6,
            "internal_states": [{"effective_max_running_requests_per_dp": 8}],
            "version": "0.5.23",
        }
        return facts | self.facts

    def _post_pause_generation(self, body: dict[str, Any]) -> dict[str, Any]:
        assert body == {"mode": "abort"}
        with self._state:
            self._is_paused = True
            self._aborted += 1
            self._state.wait_for(lambda: self._running == 0)
        return {"message": "Generation paused successfully.", "status": "ok"}

    def _post_continue_generation(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._state:
            self._is_paused = False
            self._state.notify_all()
        return {"message": "Generation continued successfully.", "status": "ok"}

    def _post_init_weights_update_group(self, body: dict[str, Any]) -> dict[str, Any]:
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        name = body["group_name"]
        place = f"tcp://{body['master_address']}:{body['master_port']}"
        meeting = c10d.rendezvous(place, body["rank_offset"], body["world_size"], timeout=SECONDS)
        store, rank, size = next(meeting)
        group, _ = c10d._new_process_group_helper(
            size,
            rank,
            [],
            c10d.Backend(body["backend"]),
            dist.PrefixStore(name, store),
            group_name=name,
            timeout=SECONDS,
        )
        c10d._world.pg_group_ranks[group] = {each: each for each in range(size)}
        self._groups[name] = group
        return {"success": True, "message": "joined"}

    def _post_destroy_weights_update_group(self, body: dict[str, Any]) -> dict[str, Any]:
        if body["group_name"] not in self._groups:
            raise Refusal("no such group")
        dist.destroy_process_group(self._groups.pop(body["group_name"]))
        return {"success": True, "message": "left"}

    def _post_begin_weight_update(self, body: dict[str, Any]) -> dict[str, Any]:
        if self._is_updating:
            raise Refusal("an update is open")
        self._is_updating = True
        return {"success": True, "message": ""}

    def _post_end_weight_update(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self._is_updating:
            raise Refusal("no update is open")
        self._is_updating = False
        return {"success": True, "message": ""}

    def _post_update_weights_from_distributed(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self._is_updating or body["load_format"] != "flattened_bucket":
            raise Refusal("not in an update")
        if self.fault == "refuse":
            raise Refusal("out of memory")
        dtypes = [getattr(torch, each) for each in body["dtypes"]]
        sizes = []
        for shape, dtype in zip(body["shapes"], dtypes, strict=True):
            sizes.append(torch.Size(shape).numel() * dtype.itemsize)
        data = torch.empty(sum(sizes), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=self._groups[body["group_name"]])
        parts = zip(body["names"], data.split(sizes), dtypes, body["shapes"], strict=True)
        with self._state:
            for name, part, dtype, shape in parts:
                assert self._parameters[name].shape == torch.Size(shape)
                self._parameters[name].data.copy_(part.view(dtype).view(shape))
        return {"success": True, "message": ""}

    def _post_update_weight_version(self, body: dict[str, Any]) -> dict[str, Any]:
        assert body["abort_all_requests"] is False
        self.version = body["new_version"]
        self.events[-1] += f" {self.version.partition(':')[2] or 'none'}"
        return {"success": True, "message": "", "new_version": self.version}

    def _post_weights_checker(self, body: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, list[Any]] = {}
        for name, parameter in self._parameters.items():
            part = name.split(".")[-2]
            fused, index = FUSED.get(part, (part, 0))
            found.setdefault(name.replace(part, fused), [None] * 3)[index] = parameter.data
        checksums = {}
        for name, parts in found.items():
            whole = torch.cat([part for part in parts if part is not None])
            if name in ("model.embed_tokens.weight", "lm_head.weight"):
                whole = torch.cat([whole, torch.zeros(-len(whole) % 64, whole.shape[1])])
            checksums[name] = hashlib.sha256(whole.numpy().tobytes()).digest()[:8].hex()
        checksums["model.rotary.some_buffer"] = "0" * 16
        if self.fault == "checksum":
            checksums["model.norm.weight"] = "0" * 16
        return {"success": True, "message": "", "ranks": [{"checksums": checksums}]}

    def _post_flush_cache(self, body: dict[str, Any]) -> str:
        if self._running:
            raise Refusal("requests are running")
        return "Cache flushed.\n"

    def generate(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The answers to /generate, one for each part of a stream."""
        self.bodies.append(body)
        if self.events[-1:] != ["generate"]:
            self.events.append("generate")
        choice = body["sampling_params"]
        row = Row(body["input_ids"], choice)
        with self._state:
            self._state.wait_for(lambda: not self._is_paused)
            number = self._aborted
            self._running += 1
        try:
            shown = 0
            while row.finish is None:
                with self._state:
                    if number < self._aborted:
                        row.finish = {"type": "abort", "message": "Abort"}
                    else:
                        self._draw(row, body.get("token_ids_logprob") or [])
                is_due = len(row.tokens) - shown >= choice.get("stream_interval", 1)
                if shown == 0 or is_due or row.finish is not None:
                    yield self._part(row, shown)
                    shown = len(row.tokens)
        finally:
            with self._state:
                self._running -= 1
                self._state.notify_all()

    def _draw(self, row: Row, probed: list[int]) -> None:
        """Draw the next token of a row."""
        if self.fault == "slow":
            time.sleep(0.05)
        ids = torch.tensor([row.prompt + row.tokens])
        with torch.no_grad():
            logits = self.model(input_ids=ids, use_cache=False).logits[0, -1].float()
        temperature = row.choice["temperature"]
        scaled = logits / (temperature or 1.0)
        drawn = torch.multinomial(scaled.softmax(-1), 1, generator=self._draws)
        token = int(drawn) if temperature else int(logits.argmax())
        shown = logits if self.fault == "original" else scaled
        log_probs = shown.softmax(-1).log()
        row.tokens.append(token)
        row.log_probs.append(float(log_probs[token]))
        row.probed = log_probs[probed].tolist()
        if token in row.choice.get("stop_token_ids", ()) and not row.choice.get("ignore_eos"):
            row.finish = {"type": "stop", "matched": token}
        elif len(row.tokens) == row.choice["max_new_tokens"]:
            row.finish = {"type": "length", "length": len(row.tokens)}

    def _part(self, row: Row, shown: int) -> dict[str, Any]:
        """What is sent of a row, of which `shown` tokens have been."""
        start = shown if self.is_incremental else 0
        pairs = zip(row.log_probs[start:], row.tokens[start:], strict=True)
        facts = {
            "id": "1",
            "finish_reason": row.finish,
            "weight_version": "other:1" if self.fault == "version" else self.version,
            "completion_tokens": len(row.tokens),
            "output_token_logprobs": [[value, token, None] for value, token in pairs],
            "output_token_logprobs_length": len(row.tokens),
            "output_token_ids_logprobs": [[[value, 0, None] for value in row.probed]],
        }
        tokens = row.tokens[start:]
        if self.fault == "no_log_probs":
            del facts["output_token_logprobs"]
        if self.fault == "foreign_token":
            tokens = [99, *tokens[1:]]
        return {"text": "", "output_ids": tokens, "meta_info": facts}


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    server_of: StandIn

    def do_GET(self) -> None:  # noqa: N802 its name in the standard library
        """Answer a question."""
        self._serve({})

    def do_POST(self) -> None:  # noqa: N802 its name in the standard library
        """Answer a request."""
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._serve(json.loads(data or b"{}"))

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def _serve(self, body: dict[str, Any]) -> None:
        stand_in = self.server_of
        route = re.split(r"[?]", self.path.strip("/"))[0]
        if stand_in.key and self.headers["Authorization"] != f"Bearer {stand_in.key}":
            self._send(401, {"error": "Unauthorized"})
        elif route == "generate" and body.get("stream"):
            self._stream(body)
        elif route == "generate":
            self._send(200, list(stand_in.generate(body))[-1])
        else:
            try:
                self._send(200, stand_in.answer(route, body))
            except Refusal as err:
                self._send(400, {"success": False, "message": str(err)})

    def _stream(self, body: dict[str, Any]) -> None:
        stand_in = self.server_of
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for part in stand_in.generate(body):
                if stand_in.fault == "cut":
                    return
                if stand_in.fault == "garbage":
                    self.wfile.write(b"data: {\x00\xff\n\n")
                if stand_in.fault == "long_line":
                    self.wfile.write(b"data: " + b" " * (5 << 20))
                self.wfile.write(b"data: " + json.dumps(part).encode() + b"\n\n")
                self.wfile.flush()
            self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, status: int, value: Any) -> None:
        data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def serve(model_path: str, address_file: Path) -> None:
    """Serve in this process until it is ended; the address is written to a file."""
    torch.set_num_threads(1)
    server = StandIn(model_path)
    part = address_file.with_suffix(".part")
    part.write_text(server.url)
    part.rename(address_file)
    threading.Event().wait()
