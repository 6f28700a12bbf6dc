"""A server with this package's door in front of a stand-in for vLLM, in a thread. No vLLM.

The door, the workers' methods and the transports are the real ones. What stands in for vLLM draws
a token from (seed, position) alone, has one tensor for weights, and can be told to misbehave.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import torch
import uvicorn

from spmdflow.blocks.box import Box
from spmdflow.rollout.generator import Replica
from spmdflow.rollout.sampling import uniform
from spmdflow.rollout.vllm_weights import Reading
from spmdflow.serving.door import Door
from spmdflow.serving.row_noise import ROW
from spmdflow.serving.worker import WeightTaker

VOCABULARY = 50
END = 0
SHAPE = (6, 4)
NAME = "model.weight"


def token_at(seed: int, position: int) -> int:
    """The token that every stand-in draws: END for about one in 50."""
    number = uniform(torch.tensor([seed]), torch.tensor([position]))
    return int(number * VOCABULARY)


class StandInWorker(WeightTaker):
    """The worker's methods on one tensor instead of a vLLM model."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.rank = 0
        self.weight = weight
        self.drops_update = False
        """The next update is announced as in use, but is not."""
        self.model_runner = SimpleNamespace(sampler=None)
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(dtype=weight.dtype))

    def spmdflow_describe(self) -> dict[str, Any]:
        """See WeightTaker; the stand-in draws with row noise."""
        return super().spmdflow_describe() | {"row_noise": True}

    def spmdflow_switch(self, number: int, verify: bool, seconds: float) -> dict[str, int]:
        """See WeightTaker."""
        before = self.weight.clone()
        hashes = super().spmdflow_switch(number, verify, seconds)
        if self.drops_update:
            self.drops_update = False
            self.weight.copy_(before)
            hashes = self._spmdflow_read().hashes(Replica.alone(), torch.device("cpu"))
        return hashes

    def _spmdflow_read(self) -> Reading:
        box = Box.of_shape(self.weight.shape)
        slots = [frozenset({(NAME, box)})]
        return Reading({NAME: self.weight.shape}, [(NAME, self.weight, box)], slots)

    def _spmdflow_replica(self) -> Replica:
        return Replica.alone()


class StandInServer:
    """A server on a port, until `stop`."""

    def __init__(
        self,
        model: str,
        *,
        port: int = 0,
        max_num_seqs: int = 4,
        seconds_per_token: float = 0.0,
        key: str = "",
    ) -> None:
        """model: folder whose hashes it reports. port: 0 for one that the system picks."""
        self.worker = StandInWorker(torch.zeros(SHAPE))
        self.seconds_per_token = seconds_per_token
        self.misbehaves: Callable[[dict[str, Any]], str | None] = lambda body: None
        """Called with each request; a text is sent instead of the response, "hang" waits."""
        self.facts_seconds = 0.0
        """How long it takes to say who it is."""
        self.num_requests = 0
        self.prompts: list[list[int]] = []
        """Prompts of all requests, in order."""
        self._key = key
        self._max_num_seqs = max_num_seqs
        self._model = model
        self._is_paused = False
        self._wanted_port = port
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, on the same port as before; as a new instance without weights."""
        guarded = Door(_ServerApp(self), self._key)
        config = uvicorn.Config(
            lambda: _WithState(guarded, self._engine()),
            factory=True,
            host="127.0.0.1",
            port=self.port or self._wanted_port,
            log_level="critical",
            timeout_graceful_shutdown=0,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]

    def stop(self) -> None:
        """End it: open connections break."""
        assert self._server is not None and self._thread is not None
        self._server.force_exit = True
        self._server.should_exit = True
        self._thread.join(10)

    def _engine(self) -> Any:
        """What the door uses of vLLM's engine client."""
        config = SimpleNamespace(
            model_config=SimpleNamespace(model=self._model, max_model_len=64),
            scheduler_config=SimpleNamespace(max_num_seqs=self._max_num_seqs),
            cache_config=SimpleNamespace(enable_prefix_caching=False),
        )

        async def collective_rpc(method: str, timeout: float, args: tuple[Any, ...]) -> list[Any]:
            return [await asyncio.to_thread(getattr(self.worker, method), *args)]

        async def do_nothing(**_: Any) -> None: ...

        async def is_paused() -> bool:
            await asyncio.sleep(self.facts_seconds)
            return False

        async def is_sleeping() -> bool:
            return False

        return SimpleNamespace(
            vllm_config=config,
            collective_rpc=collective_rpc,
            pause_generation=do_nothing,
            resume_generation=do_nothing,
            reset_prefix_cache=do_nothing,
            is_paused=is_paused,
            is_sleeping=is_sleeping,
        )


class _WithState:
    """Adds the application with the engine to each connection, as Starlette does."""

    def __init__(self, app: Any, engine: Any) -> None:
        self._app = app
        self._state = SimpleNamespace(state=SimpleNamespace(engine_client=engine))

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        await self._app({**scope, "app": self._state}, receive, send)


class _ServerApp:
    """What stands in for vLLM's application: the route to generate, and lifespan."""

    def __init__(self, server: StandInServer) -> None:
        self._server = server

    async def __call__(
        self,
        scope: dict[str, Any],
        receive: Callable[[], Awaitable[dict[str, Any]]],
        send: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        if scope["type"] == "lifespan":
            for kind in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{kind}.complete"})
            return
        body = json.loads((await receive())["body"])
        server = self._server
        server.num_requests += 1
        server.prompts.append(body["token_ids"])
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        text = server.misbehaves(body)
        if text == "hang":
            await asyncio.sleep(3600)
        if text is not None:
            await send({"type": "http.response.body", "body": text.encode()})
            return
        facts = body["sampling_params"]["extra_args"][ROW]
        left = body["sampling_params"]["max_tokens"]
        for index in range(left):
            await asyncio.sleep(server.seconds_per_token)
            token = token_at(facts["seed"], facts["num_drawn"] + index)
            finish = "stop" if token == END else "length" if index == left - 1 else None
            choice = {
                "token_ids": [token],
                "finish_reason": finish,
                "logprobs": {"content": [{"token_id": token, "logprob": -1.5}]},
            }
            line = f"data: {json.dumps({'choices': [choice]})}\n\n"
            more = {"type": "http.response.body", "body": line.encode(), "more_body": True}
            await send(more)
            if finish is not None:
                break
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
