"""`VllmServer`: the weight-update routes of a vLLM server, over HTTP. Knows no weights.

The routes are vLLM's (`VLLM_SERVER_DEV_MODE=1 vllm serve ... --weight-transfer-config ...`); a
program that uses vLLM's `LLM` class can offer the same routes. The methods are those of vLLM's
`VLLMWeightSyncClient`, so an object of vLLM or of the user can replace this class.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from spmdflow.errors import ConfigError, WeightSyncError

_DETAIL = 400
"""Characters of a server's answer that go into a message."""


class VllmServer:
    """HTTP client of one server."""

    def __init__(self, url: str, *, seconds: float) -> None:
        """url: http://host:port, ConfigError otherwise. seconds: limit of one request."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            where = "weight server"
            expected = "http://host:port of a vLLM server"
            raise ConfigError.of(
                where, repr(url), expected, "check the address in the call of connect_server"
            )
        self.url = url.rstrip("/")
        self._seconds = seconds
        self.version: str | None = None
        """Version of the next weights, for a finish_weight_update without an argument."""
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)

    def num_workers(self) -> int:
        """Number of workers that hold weights, in all replicas."""
        return int(self._request("GET", "get_world_size")["world_size"])

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Make every worker connect to the trainer; returns when all have connected."""
        self._request("POST", "init_weight_transfer_engine", {"init_info": dict(init_info)})

    def pause(self) -> None:
        """Stop starting requests, wait for the running ones, and clear the prefix cache."""
        self._request("POST", "pause?mode=wait&clear_cache=true")

    def resume(self) -> None:
        """Start serving requests again."""
        self._request("POST", "resume")

    def start_weight_update(self) -> None:
        """Prepare every worker for an update."""
        self._request("POST", "start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Make every worker receive the weights; returns when all have received them."""
        self._request("POST", "update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Put the new weights into use, under this version (by default `version`)."""
        version = self.version if weight_version is None else weight_version
        self._request("POST", "finish_weight_update", {"weight_version": version})

    def _request(self, method: str, route: str, body: Mapping[str, Any] | None = None) -> Any:
        """Make an HTTP request and return its decoded JSON reply; {} for an empty one.

        body: sent as JSON, if given. WeightSyncError if the server does not answer within the
        limit, or with an error status or text that is not JSON.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self.url}/{route}",
            data=data,
            method=method,
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=self._seconds) as answer:
                return json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as err:
            raise self._request_error(route, f"status {err.code}: {_read_body(err)}") from err
        except (OSError, ValueError) as err:
            raise self._request_error(route, str(err)) from err

    def _request_error(self, route: str, problem: str) -> WeightSyncError:
        """The error for a request that failed."""
        return WeightSyncError(
            f"weight server {self.url}: got {problem} from /{route}, expected a vLLM server that "
            f"takes weight updates; start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-"
            f'config \'{{"backend": "spmdflow"}}\' where spmdflow is installed, and look at its '
            f"log"
        )


def _read_body(err: urllib.error.HTTPError) -> str:
    return err.read().decode(errors="replace")[:_DETAIL]
