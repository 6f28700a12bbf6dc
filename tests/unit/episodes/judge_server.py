"""A small OpenAI-compatible server in a thread, on a port of the system: the judge of tests."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

Answer = tuple[int, Any]
"""Status and JSON; bytes are sent as they are."""


class JudgeServer:
    """Answers with what `answer` returns for the body of a request."""

    def __init__(self, answer: Callable[[dict[str, Any]], Answer]) -> None:
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        """Path, headers and body of each request."""
        judge = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                headers = {name.lower(): value for name, value in self.headers.items()}
                judge.requests.append((self.path, headers, body))
                status, fields = answer(body)
                data = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                """Nothing is logged."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, at: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def says(text: str | None, **message: Any) -> Answer:
    """A chat completion with one choice."""
    choice = {
        "index": 0,
        "finish_reason": "tool_calls" if "tool_calls" in message else "stop",
        "message": {"role": "assistant", "content": text, **message},
    }
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    return 200, {"choices": [choice], "usage": usage}


def is_silent(seconds: float) -> Callable[[dict[str, Any]], Answer]:
    """An answer that takes so long."""

    def answer(body: dict[str, Any]) -> Answer:
        time.sleep(seconds)
        return says("late")

    return answer
