"""An environment that sends random requests: good ones, bad ones, and what is no HTTP."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any
from urllib.parse import urlsplit

_WAIT_SECONDS = 60.0
_MOST_BAD = 90
"""Refused requests of one episode: one that has 100 is ended."""


async def episode(row: dict[str, Any], *, base_url: str, model: str, api_key: str) -> Any:
    """Sends row["requests"] requests; how many were answered, by status."""
    draw = random.Random(row["seed"])
    fuzzer = _Fuzzer(base_url, api_key, draw)
    counts = {"score": 0.0, "status_200": 0.0, "status_500": 0.0, "refused": 0.0, "closed": 0.0}
    await fuzzer.send(fuzzer.good_request())  # an episode without a reply has no row
    for _ in range(row["requests"]):
        request = fuzzer.random_request()
        if counts["refused"] >= _MOST_BAD:
            request = fuzzer.good_request()
        status = await fuzzer.send(request)
        counts["score"] += 1
        if status is None:
            counts["closed"] += 1
        elif status in (200, 500):
            counts[f"status_{status}"] += 1
        else:
            counts["refused"] += 1
    return counts


class _Fuzzer:
    """Makes requests, and sends each over a connection of its own."""

    def __init__(self, base_url: str, api_key: str, draw: random.Random) -> None:
        self._place = urlsplit(base_url)
        self._key = api_key
        self._draw = draw
        self._may_lack_bytes = False

    async def send(self, request: bytes) -> int | None:
        """The status of the first answer; None: there was none."""
        host = self._place.hostname
        port = self._place.port
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(request)
            if self._draw.random() < 0.03:
                return None  # leaves at once
            if self._may_lack_bytes:
                writer.write_eof()  # otherwise the endpoint waits for them
            line = await asyncio.wait_for(reader.readline(), _WAIT_SECONDS)
            return int(line.split()[1]) if line else None
        except OSError:
            return None
        finally:
            writer.close()

    def good_request(self) -> bytes:
        """A request that is answered."""
        self._may_lack_bytes = False
        body = {"prompt": [4], "max_tokens": 1}
        return self._http("completions", json.dumps(body).encode(), may_err=False)

    def random_request(self) -> bytes:
        """A request that may be wrong in any layer."""
        chance = self._draw.random()
        self._may_lack_bytes = self._draw.random() < 0.1
        if chance < 0.05:
            return self._draw.randbytes(self._draw.randrange(200)) + b"\r\n\r\n"
        route, body = self._body()
        data = json.dumps(body).encode()
        if chance < 0.15:
            data = self._damaged(data)
        request = self._http(route, data)
        if 0.15 <= chance < 0.25:
            request = self._damaged(request)
            self._may_lack_bytes = True
        if chance < 0.3:
            request += request
        return request

    def _http(self, route: str, data: bytes, *, may_err: bool = True) -> bytes:
        size = str(len(data))
        method = "POST"
        if may_err and self._draw.random() < 0.05:
            self._may_lack_bytes = True
            size = self._draw.choice(["", "\u00b2", "9" * 5000, "-1", "1e3", "99", "0"])
        if may_err and self._draw.random() < 0.03:
            method = self._draw.choice(["GET", "", "PUT", "post"])
        head = [
            f"{method} {self._place.path}/{route} HTTP/1.1",
            f"host: {self._place.netloc}",
            f"authorization: Bearer {self._key}",
            f"content-length: {size}",
        ]
        return "\r\n".join([*head, "", ""]).encode("latin-1") + data

    def _damaged(self, data: bytes) -> bytes:
        place = self._draw.randrange(len(data) + 1)
        kind = self._draw.randrange(3)
        if kind == 0:
            return data[:place]
        if kind == 1:
            return data[:place] + self._draw.randbytes(3) + data[place:]
        return data[:place] + data[place + 5 :]

    def _body(self) -> tuple[str, object]:
        """(route, body): a good one, of which some fields are replaced."""
        routes = ["completions", "chat/completions", "completions", "models"]
        routes += ["responses", "messages", "messages/count_tokens"]
        route = self._draw.choice(routes)
        body: dict[str, Any] = {"max_tokens": self._draw.randrange(1, 4)}
        if route == "responses":
            texts = ["guess", [{"role": "user", "content": "guess"}], self._value(3)]
            body["input"] = self._draw.choice(texts)
        elif "messages" in route or route == "chat/completions":
            body["messages"] = [
                {"role": self._draw.choice(["user", "assistant", "system"]), "content": "guess"}
                for _ in range(self._draw.randrange(1, 4))
            ]
        else:
            ids = [self._draw.randrange(18) for _ in range(self._draw.randrange(1, 9))]
            body["prompt"] = self._draw.choice([ids, "guess", "<user>guess"])
        if self._draw.random() < 0.3:
            body["stop"] = self._draw.choice(["1", ["2", "3"], "guess"])
        if self._draw.random() < 0.3:
            body["logprobs"] = True
            body["stream"] = self._draw.choice([True, False])
        names = [*body, "tools", "stop", "n", "tool_choice", "stream_options", "response_format"]
        names += ["instructions", "previous_response_id", "text", "system", "output_config"]
        for _ in range(self._draw.choice([0, 0, 0, 1, 1, 2])):
            body[self._draw.choice(names)] = self._value(3)
        if "messages" in body and self._draw.random() < 0.3 and isinstance(body["messages"], list):
            names = ["role", "content", "tool_calls", "name", "tool_call_id"]
            message = {self._draw.choice(names): self._value(3) for _ in range(3)}
            body["messages"].append({"role": "user", **message})
        return route, self._value(2) if self._draw.random() < 0.03 else body

    def _value(self, depth: int) -> Any:
        """Any JSON."""
        numbers = [0, -1, 1, 17, 18, 5000, 2**31, 2**63, 2**64, 10**30, 0.5, 1e308, float("nan")]
        texts = ["", "guess", "\ud800", "\x00", "\u00b2", "<eos>", "{{ x }}", "user", "x" * 3000]
        plain = [*numbers, *texts, None, True, False]
        kind = self._draw.random()
        if depth == 0 or kind < 0.5:
            return self._draw.choice(plain)
        if kind < 0.7:
            return [self._draw.choice(numbers) for _ in range(self._draw.randrange(1, 6))]
        if kind < 0.85:
            return [self._value(depth - 1) for _ in range(self._draw.randrange(3))]
        names = ["role", "content", "type", "text", "function", "name", "arguments", "id"]
        chosen = [self._draw.choice(names) for _ in range(self._draw.randrange(4))]
        return {name: self._value(depth - 1) for name in chosen}
