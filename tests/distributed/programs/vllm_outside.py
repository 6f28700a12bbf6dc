"""A user's program with an LLM of its own, which takes weights from a trainer elsewhere.

Usage: vllm_outside.py MODEL FOLDER [DTYPE]
Offers vLLM's weight-update routes over HTTP, as `vllm serve` does, and two more: /generate, and
/plant, after which the named tensor keeps its old values. Writes its port to FOLDER/port.
"""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from spmdflow.serving.backend import ServedModel

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
MAX_TOKENS = 8


class Program:
    """The LLM, and what the routes do with it."""

    def __init__(self, model: str, dtype: str) -> None:
        import vllm

        from spmdflow.serving.receiver import register

        register()
        self._params = vllm.SamplingParams(
            temperature=0, max_tokens=MAX_TOKENS, detokenize=False, ignore_eos=True
        )
        self._llm = vllm.LLM(
            model,
            skip_tokenizer_init=True,
            dtype=dtype,
            enforce_eager=True,
            max_num_seqs=8,
            kv_cache_memory_bytes=1 << 24,
            weight_transfer_config={"backend": "spmdflow"},
        )

    def answer(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        """What a request gets."""
        llm = self._llm
        route = route.partition("?")[0].strip("/")
        if route == "get_world_size":
            return {"world_size": 1}
        if route == "generate":
            return {"tokens": self._tokens(body["prompts"]), "version": llm.get_weight_version()}
        if route == "plant":
            self._plant(body["name"])
        elif route == "pause":
            llm.reset_prefix_cache()
        elif route == "finish_weight_update":
            llm.finish_weight_update(body["weight_version"])
        elif route == "start_weight_update":
            llm.start_weight_update()
        elif route in ("init_weight_transfer_engine", "update_weights"):
            getattr(llm, route)(body)
        elif route != "resume":
            raise ValueError(f"no route {route}")
        return {}

    def _tokens(self, prompts: list[list[int]]) -> list[list[int]]:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [
            list(answer.outputs[0].token_ids)
            for answer in self._llm.generate(inputs, self._params, use_tqdm=False)
        ]

    def _plant(self, name: str) -> None:
        """The tensor's old values come instead of the new ones, from now on.

        packed head: what vLLM packed of a tied head stays instead.
        """
        if name == "packed head":
            ServedModel._packed_layers = _unchanged_once(ServedModel._packed_layers)  # type: ignore
            return
        model = self._llm.apply_model(lambda model: model)[0]
        load = model.load_weights
        old = dict[str, Any]()

        def load_stale(tensors: Any) -> Any:
            def stale() -> Any:
                for each, tensor in tensors:
                    yield each, old.setdefault(name, tensor.clone()) if each == name else tensor

            return load(stale())

        model.load_weights = load_stale


def _unchanged_once(packed_layers: Any) -> Any:
    """Nothing to pack again, the first time that it is asked: by finish_reload."""
    asked = []

    def layers(self: ServedModel) -> Any:
        asked.append(1)
        return packed_layers(self) if len(asked) > 1 else ()

    return layers


class Routes(BaseHTTPRequestHandler):
    """One request."""

    program: Program

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length) or b"{}")
        try:
            status = 200
            answer = self.program.answer(self.path, body)
        except Exception as err:  # the program goes on, as a server does
            status = 500
            answer = {"error": f"{type(err).__name__}: {err}"}
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST

    def log_message(self, *_: object) -> None:
        """Quiet."""


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    model, folder, dtype = [*sys.argv[1:], "float32"][:3]
    Routes.program = Program(model, dtype)
    server = HTTPServer(("127.0.0.1", 0), Routes)
    port = Path(folder, "port")
    port.with_suffix(".part").write_text(str(server.server_port))
    port.with_suffix(".part").rename(port)
    server.serve_forever()
