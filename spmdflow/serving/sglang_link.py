"""`SglangLink`: brings the weights of a mirror to one SGLang server, by its routes of 0.5.23.

    POST /init_weights_update_group        a gloo group of the rank and all workers
    POST /pause_generation                 aborts what runs
    POST /begin_weight_update              then, for each bucket of tensors, one broadcast:
    POST /update_weights_from_distributed
    POST /end_weight_update
    POST /flush_cache                      the keys and values of the old weights
    POST /weights_checker                  checksums, where they can be compared
    POST /update_weight_version            only if they are equal
    POST /continue_generation              always

Written against the source of that version and never run with it, because it needs a GPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spmdflow.blocks.box import Box
from spmdflow.rollout.generator import NEVER
from spmdflow.serving.broadcast import BroadcastGroup
from spmdflow.serving.client import ServerClient, ServerFault, WrongAnswer, show_value
from spmdflow.serving.connection import address_towards
from spmdflow.serving.link import UpdateReport
from spmdflow.serving.mirror import BoxOf, SharedMirror, WeightMirror
from spmdflow.serving.update import PackedMessage, cut_into_messages

logger = logging.getLogger(__name__)

_NO_VERSION = "spmdflow-none"
"""Version of a server whose weights are being replaced."""
_GROUP = "spmdflow"
_VOCABULARY_PADDING = 64
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Part of the name of a tensor of a server -> of the tensors that it has below one another."""


@dataclass(frozen=True)
class TensorBucket:
    """Whole tensors that travel together, one after the other."""

    names: list[str]
    shapes: list[list[int]]
    values: Tensor
    """(elements of all,)"""


class SglangLink:
    """The connection to one server: a gloo group of this rank (0) and all its workers.

    The server writes tensors into its live weights, so it generates nothing in an update.
    """

    def __init__(
        self,
        client: ServerClient,
        group: BroadcastGroup,
        *,
        num_workers: int,
        is_compared: bool,
        seconds: float,
    ) -> None:
        """is_compared: whether the server's checksums can be compared with the rank's.

        seconds: limit of each wait. `open` makes a complete link.
        """
        self._client = client
        self._group = group
        self._num_workers = num_workers
        self._is_compared = is_compared
        self._seconds = seconds

    @classmethod
    async def open(cls, client: ServerClient, transport: str, seconds: float) -> SglangLink:
        """Connect to all workers of a server. ServerFault or WeightSyncError if that fails.

        Ends the group and the update that a trainer which has died may have left open.
        """
        assert transport == "gloo", transport
        facts = await client.facts(seconds=seconds)
        server = await client.call("GET", "server_info", None, seconds=seconds)
        size = 1 + facts.num_workers
        address = address_towards(client.host, client.port)
        group = BroadcastGroup(address, size=size, name=_GROUP, seconds=seconds)
        is_compared = facts.num_workers == 1 and server.get("device") == "cpu"
        if not is_compared:
            reason = f"{facts.num_workers} workers on {show_value(server.get('device'))}"
            text = "warning: weights of %s are not compared after a sync (%s)"
            logger.warning(text, client.url, reason)
        link = cls(
            client,
            group,
            num_workers=facts.num_workers,
            is_compared=is_compared,
            seconds=seconds,
        )
        await link._connect(address, size)
        return link

    async def _connect(self, address: str, size: int) -> None:
        """Let the workers join the group."""
        with contextlib.suppress(ServerFault):
            await self._post("end_weight_update", {})
        with contextlib.suppress(ServerFault):
            await self._post("destroy_weights_update_group", {"group_name": _GROUP})
        body = {
            "master_address": address,
            "master_port": self._group.port,
            "rank_offset": 1,
            "world_size": size,
            "group_name": _GROUP,
            "backend": "gloo",
        }
        await asyncio.gather(
            self._post("init_weights_update_group", body), asyncio.to_thread(self._group.connect)
        )

    async def bring(
        self,
        shared: SharedMirror,
        *,
        since: int,
        epoch: str,
        waits: bool,
    ) -> UpdateReport:
        """Bring the server from version `since` to the mirror's; see ServerLink.bring.

        Tensors that changed are sent as a whole. What runs is aborted, so waits is False.
        """
        assert not waits, "exact mode"
        began = time.perf_counter()
        version, is_full, buckets = await asyncio.to_thread(_pack, shared, since)
        paused = time.perf_counter()
        await self._post("pause_generation", {"mode": "abort"})
        try:
            await self._set_version(_NO_VERSION)
            if buckets:
                await self._send(buckets)
            await self._flush()
            difference = await self._compare(shared, version)
            if difference is None:
                await self._set_version(f"{epoch}:{version}")
        finally:
            await self._post("continue_generation", {})
        ended = time.perf_counter()
        return UpdateReport(
            version=version,
            is_full=is_full,
            num_bytes=self._num_workers * sum(each.values.nbytes for each in buckets),
            seconds=ended - began,
            switch_seconds=ended - paused,
            difference=difference,
        )

    async def _send(self, buckets: Sequence[TensorBucket]) -> None:
        """Broadcast the buckets, which the workers load as tensors of a checkpoint."""
        await self._post("begin_weight_update", {})
        for bucket in buckets:
            dtype = str(bucket.values.dtype).removeprefix("torch.")
            body = {
                "names": bucket.names,
                "dtypes": [dtype] * len(bucket.names),
                "shapes": bucket.shapes,
                "group_name": _GROUP,
                "flush_cache": False,
                "load_format": "flattened_bucket",
            }
            data = bucket.values.view(torch.uint8)
            await asyncio.gather(
                self._post("update_weights_from_distributed", body),
                asyncio.to_thread(self._group.broadcast, data),
            )
        await self._post("end_weight_update", {})

    async def _flush(self) -> None:
        """Forget the keys and values of the old weights. Answered with text."""
        route = f"flush_cache?timeout={self._seconds:g}"
        await self._client.fetch("POST", route, None, seconds=4 * self._seconds)

    async def _compare(self, shared: SharedMirror, version: int) -> str | None:
        """Compare the server's checksums with the mirror's; return the first that differs.

        Only those of one worker in host memory can be compared: several have parts of tensors, and
        devices have a hash of their own.
        """
        if not self._is_compared:
            return None
        body = {"action": "checksum", "selector": "target"}
        checksums = read_checksums(await self._post("weights_checker", body))
        expected = await asyncio.to_thread(_expected, shared, version, list(checksums))
        for name, allowed in expected.items():
            if checksums[name] not in allowed:
                got = show_value(checksums[name])
                return f"tensor {name}: got checksum {got}, expected {allowed[0]}"
        return None

    async def _set_version(self, version: str) -> None:
        """Name the weights that the server has."""
        body = {"new_version": version, "abort_all_requests": False}
        await self._post("update_weight_version", body)

    async def _post(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Make a request that changes the server. ServerFault unless it says that it did."""
        answer = await self._client.call("POST", route, body, seconds=4 * self._seconds)
        if answer.get("success") is False:
            raise ServerFault(f"/{route}: {show_value(answer.get('message'))}")
        return answer

    def close(self) -> None:
        """Close the connections."""
        self._group.close()


def read_checksums(answer: Mapping[str, Any]) -> dict[str, str]:
    """Tensor name -> checksum, in an answer of one worker. WrongAnswer for anything else."""
    ranks = answer.get("ranks")
    first = ranks[0] if isinstance(ranks, list) and len(ranks) == 1 else None
    checksums = first.get("checksums") if isinstance(first, dict) else None
    if not isinstance(checksums, dict) or not checksums:
        raise WrongAnswer(f"checksums {show_value(answer)}")
    return checksums


def checksum_of(tensor: Tensor) -> str:
    """The checksum that SGLang has of a tensor in host memory: the start of its bytes' SHA-256."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data.data).hexdigest()[:16]


def allowed_checksums(name: str, tensors: Mapping[str, Tensor]) -> list[str]:
    """The checksums that a tensor of a server may have; [] if it is none of these tensors.

    name: the server's; it may have several tensors below one another, or zeros below the
    vocabulary's last row. tensors: by Hugging Face name.
    """
    names = [name]
    for fused, parts in _FUSED.items():
        if fused in name:
            names = [name.replace(fused, part) for part in parts]
    if any(each not in tensors for each in names):
        return []
    whole = torch.cat([tensors[each] for each in names])
    missing = -len(whole) % _VOCABULARY_PADDING
    padded = torch.cat([whole, whole.new_zeros(missing, *whole.shape[1:])])
    return [checksum_of(whole), checksum_of(padded)]


def _expected(shared: SharedMirror, version: int, names: Sequence[str]) -> dict[str, list[str]]:
    """The checksums that a server with this version may have, by its names of tensors.

    {} if the mirror has a newer version by now. Tensors that the run does not send are skipped.
    WrongAnswer if there is none that it sends.
    """
    with shared.lock_mirror() as mirror:
        if mirror.version != version:
            return {}
        boxes = _boxes_of(mirror)
        tensors = {}
        for update in mirror.updates(boxes, since=NEVER):
            name, box = boxes[update.index]
            tensors[name] = update.values.view(box.shape)
        result = {}
        for name in names:
            allowed = allowed_checksums(name, tensors)
            if allowed:
                result[name] = allowed
    if not result:
        raise WrongAnswer(f"checksums of other tensors than the policy's, such as {names[0][:80]}")
    return result


def _pack(shared: SharedMirror, since: int) -> tuple[int, bool, list[TensorBucket]]:
    """Return the version, whether all is sent, and copies of what changed after `since`."""
    result = []
    with shared.lock_mirror() as mirror:
        boxes = _boxes_of(mirror)
        is_full = since == NEVER or not mirror.has_changes_since(since)
        changed = {update.index for update in mirror.updates(boxes, since=since)}
        whole = [each for each in mirror.updates(boxes, since=NEVER) if each.index in changed]
        for updates in cut_into_messages(whole):
            names = [boxes[each.index][0] for each in updates]
            shapes = [list(boxes[each.index][1].shape) for each in updates]
            values = PackedMessage.of(updates, mirror.dtype).values
            result.append(TensorBucket(names, shapes, values))
        return mirror.version, is_full, result


def _boxes_of(mirror: WeightMirror) -> list[BoxOf]:
    """All tensors of a mirror, as boxes."""
    return [(name, Box.of_shape(shape)) for name, shape in mirror.shapes.items()]
