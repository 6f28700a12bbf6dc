"""`Door`: the part of this package in the API process of a vLLM server, as its middleware.

Every request must carry the server's key, also those to vLLM's own routes (vLLM's own key leaves
some of them open). The door has routes of its own for the ranks of a run, and compares the weights
version that a request to generate asks for with the one that the server has.

    GET  /spmdflow/facts      who the server is, its weights version, what it is doing
    POST /spmdflow/connect    opens the connection for updates of the weights
    POST /spmdflow/receive    an update begins to arrive, while the server generates
    POST /spmdflow/switch     pause, put the update into use, resume
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping
from importlib.metadata import version as package_version
from typing import Any

from spmdflow.rollout.generator import NEVER
from spmdflow.serving.identity import config_hash, tokenizer_hash
from spmdflow.serving.settings import GENERATE, VERSION_HEADER, server_key

PROTOCOL = 1
"""Version of the door's routes."""
SLEEP = "/sleep"
_PREFIX = "/spmdflow/"
_MOST_BODY_BYTES = 64 << 20
_RPC_SECONDS = 120.0
Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class _Refusal(Exception):
    """A request that the door does not serve: status and reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Door:
    """ASGI middleware of the server."""

    def __init__(
        self, app: Callable[[Scope, Receive, Send], Awaitable[None]], key: str | None = None
    ) -> None:
        """app: vLLM's application. key: that every request must carry, "" for none; None: that of
        this process (serving.settings)."""
        self._app = app
        self._key = (server_key() if key is None else key).encode()
        self._instance = secrets.token_hex(8)
        self._version = NEVER
        self._epoch = ""
        """Random id of the run whose version it is."""
        self._running = 0
        self._has_slept = False
        """Whether the server was told to sleep since its last switch."""
        self._workers: list[dict[str, Any]] = []
        """What the workers have (`WeightTaker.spmdflow_describe`)."""
        self._describing = asyncio.Lock()
        """Held while they are asked for it, which may take minutes for some families."""
        self._lock = asyncio.Lock()
        """Held while the workers are asked, so that two trainers do not mix."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection of the ASGI interface."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            self._check_key(headers)
            path = scope["path"]
            if scope["type"] == "http" and path.startswith(_PREFIX):
                reply = await self._reply(scope, receive, path.removeprefix(_PREFIX))
                await _send_json(send, 200, reply)
                return
            if path == GENERATE:
                self._check_version(headers)
        except _Refusal as err:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            else:
                await _send_json(send, err.status, {"error": str(err)})
            return
        self._has_slept = self._has_slept or path == SLEEP
        is_generation = path == GENERATE
        self._running += is_generation
        try:
            await self._app(scope, receive, send)
        finally:
            self._running -= is_generation

    def _check_key(self, headers: Mapping[bytes, bytes]) -> None:
        """_Refusal unless the request carries the server's key (or the server has none)."""
        given = headers.get(b"authorization", b"")
        if self._key and not hmac.compare_digest(given, b"Bearer " + self._key):
            raise _Refusal(401, "no key, or another one")

    def _check_version(self, headers: Mapping[bytes, bytes]) -> None:
        """_Refusal if the request asks for other weights than the server has."""
        wanted = headers.get(VERSION_HEADER.encode())
        own = f"{self._epoch}:{self._version}"
        if wanted is not None and wanted.decode(errors="replace") != own:
            raise _Refusal(409, f"weights {own}, not {wanted.decode(errors='replace')[:80]}")

    async def _reply(self, scope: Scope, receive: Receive, route: str) -> dict[str, Any]:
        """The reply of one of the door's own routes."""
        engine = scope["app"].state.engine_client
        method = scope["method"]
        if (method, route) == ("GET", "facts"):
            return await self._facts(engine)
        routes = {"connect": self._connect, "receive": self._receive, "switch": self._switch}
        if method != "POST" or route not in routes:
            raise _Refusal(404, f"no route {method} {_PREFIX}{route}")
        body = await _read_json(receive)
        try:
            async with self._lock:
                return await routes[route](engine, body)
        except (KeyError, TypeError, ValueError) as err:
            raise _Refusal(400, f"{type(err).__name__}: {err}") from err
        except Exception as err:  # of the workers, as vLLM raises it: the trainer decides
            raise _Refusal(500, f"{type(err).__name__}: {err}") from err

    async def _facts(self, engine: Any) -> dict[str, Any]:
        """Return who the server is, and its state."""
        config = engine.vllm_config
        model = config.model_config
        workers = await self._describe(engine)
        return {
            "protocol": PROTOCOL,
            "package": package_version("spmdflow"),
            "instance": self._instance,
            "model": await asyncio.to_thread(config_hash, model.model),
            "tokenizer": await asyncio.to_thread(tokenizer_hash, model.model),
            "dtype": workers[0]["dtype"],
            "row_noise": all(worker["row_noise"] for worker in workers),
            "num_workers": len(workers),
            "max_model_len": model.max_model_len,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "epoch": self._epoch,
            "weights_version": self._version,
            "running": self._running,
            "paused": await engine.is_paused(),
        }

    async def _connect(self, engine: Any, body: Mapping[str, Any]) -> dict[str, Any]:
        """Open the workers' ends of a connection; the reply has their boxes."""
        arguments = (str(body["transport"]), list(body["facts"]), float(body["seconds"]))
        replies = await _call_workers(engine, "spmdflow_connect", arguments)
        workers = await self._describe(engine)
        return {"replies": replies, "boxes": [worker["boxes"] for worker in workers]}

    async def _receive(self, engine: Any, body: Mapping[str, Any]) -> dict[str, Any]:
        """Let the workers begin to receive an update."""
        arguments = (int(body["number"]), list(body["messages"]))
        await _call_workers(engine, "spmdflow_receive", arguments)
        return {}

    async def _switch(self, engine: Any, body: Mapping[str, Any]) -> dict[str, Any]:
        """Put an update into use, under a version; the reply has the hashes of all tensors.

        Running requests end first (mode=wait) or are aborted (mode=abort). After an error the
        server has no version, and generates nothing until another update.
        """
        mode = str(body["mode"])
        seconds = float(body["seconds"])
        arguments = (int(body["number"]), bool(body["verify"]), seconds)
        version = int(body["version"])
        epoch = str(body["epoch"])
        self._version = NEVER
        if await engine.is_sleeping():
            await engine.wake_up()
        await engine.pause_generation(mode=mode)
        try:
            if self._has_slept:
                await _call_workers(engine, "spmdflow_clear_cache", ())
                self._has_slept = False
            hashes = await _call_workers(engine, "spmdflow_switch", arguments, seconds)
            await engine.reset_prefix_cache()
            self._version = version
            self._epoch = epoch
        finally:
            await engine.resume_generation()
        return {"hashes": hashes[0]}

    async def _describe(self, engine: Any) -> list[dict[str, Any]]:
        """What each worker has, in their order."""
        async with self._describing:
            if not self._workers:
                self._workers = await _call_workers(engine, "spmdflow_describe", ())
        return self._workers


async def _call_workers(
    engine: Any, method: str, arguments: tuple[Any, ...], seconds: float = _RPC_SECONDS
) -> list[Any]:
    """Call a method of all workers; return their results, in order."""
    result: list[Any] = await engine.collective_rpc(method, timeout=seconds, args=arguments)
    return result


async def _read_json(receive: Receive) -> dict[str, Any]:
    """Read the body of a request. _Refusal if it is too large or no JSON object."""
    body = b""
    is_complete = False
    while not is_complete:
        message = await receive()
        body += message.get("body", b"")
        is_complete = not message.get("more_body", False)
        if len(body) > _MOST_BODY_BYTES:
            raise _Refusal(413, f"a body of more than {_MOST_BODY_BYTES} bytes")
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as err:
        raise _Refusal(400, f"no JSON: {err}") from err
    if not isinstance(value, dict):
        raise _Refusal(400, "no JSON object")
    return value


async def _send_json(send: Send, status: int, value: Mapping[str, Any]) -> None:
    """Send a reply."""
    body = json.dumps(value).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
