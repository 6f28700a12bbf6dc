"""`WeightMirror`: a copy of the policy's weights on the host, from which servers get theirs.

A rank of the generator's pool receives the policy's weights by the plan that exists
(`hybrid_engine`), into complete Hugging Face tensors in the generator's precision. So a server can
get them at any time, also while the policy trains, and a newcomer does not disturb the policy.

There are two copies: the next version is received into one of them, and then compared with the
other. What changed is kept for the last `KEPT_VERSIONS` versions. Knows no servers.

Memory for n elements of b bytes: 2 n b for the copies. What changed takes 4 bytes an element: at
most 4 n / 3 for the last version, and as long as all versions together take at most n b, for
earlier ones.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from spmdflow.blocks.box import Box
from spmdflow.blocks.hash import positional_hash
from spmdflow.errors import WeightSyncError
from spmdflow.rollout.generator import NEVER
from spmdflow.serving.update import (
    BoxUpdate,
    TensorChanges,
    find_changes,
    join_changes,
    update_of_box,
)
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.folder import causal_lm_on_meta
from spmdflow.weights.move import Block
from spmdflow.weights.table import parameters

KEPT_VERSIONS = 8
"""A server that is further behind gets all weights."""
_Changes = Mapping[str, TensorChanges]
"""What changed with one version, by the tensor's name."""
BoxOf = tuple[str, Box]
"""A box of a server's worker: the tensor's Hugging Face name, and the box inside it."""


def trained_shapes(model_path: str) -> dict[str, torch.Size]:
    """Shape of each tensor that a policy sends, by its name in a sync."""
    arch = Architecture.sizes_from_folder(model_path)
    result = {}
    if arch.is_dense_with_table:
        for parameter in parameters(arch):
            result[parameter.name] = torch.Size(parameter.shape)
        return result
    for name, tensor in causal_lm_on_meta(model_path).named_parameters():
        result[name] = tensor.shape
    return result


class WeightMirror:
    """The tensors of one version, and what changed in the versions before it."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> None:
        """shapes: of all tensors, by Hugging Face name. dtype: the generator's precision."""
        self.shapes = {name: torch.Size(shape) for name, shape in shapes.items()}
        self.dtype = dtype
        self.version = NEVER
        self.changed_fraction = 1.0
        """Part of all elements that changed with the last version."""
        self._front = self._allocate()
        self._back = self._allocate()
        self._changes: dict[int, _Changes] = {}
        """Version -> what changed since the version before it."""
        self._hashes: dict[str, int] | None = None

    @property
    def num_elements(self) -> int:
        """Elements of all tensors."""
        return sum(shape.numel() for shape in self.shapes.values())

    def next_blocks(self) -> list[Block]:
        """Live views of the copy that the next version is received into. Write all of it."""
        result = []
        for name, tensor in self._back.items():
            result.append((name, tensor, Box.of_shape(tensor.shape)))
        return result

    def next_hashes(self) -> dict[str, int]:
        """positional_hash of every tensor of the copy that the next version is received into."""
        return {name: positional_hash(tensor) for name, tensor in self._back.items()}

    def commit(self, version: int) -> None:
        """Make the received copy the current one, under this version.

        Finds out what changed. A version that does not follow the current one, such as the first
        one of a resumed run, makes all servers get all weights. Two commits under one version must
        have the same weights.
        """
        if self.version != NEVER and version == self.version + 1:
            self._changes[version] = self._compare()
            self._forget_old_changes(version)
        else:
            self._changes = {}
            self.changed_fraction = 1.0
        front = self._front
        self._front = self._back
        self._back = front
        self.version = version
        self._hashes = None

    def hashes(self) -> dict[str, int]:
        """positional_hash of every tensor of the current version."""
        if self._hashes is None:
            self._hashes = {name: positional_hash(each) for name, each in self._front.items()}
        return self._hashes

    def has_changes_since(self, version: int) -> bool:
        """Whether a server with this version can get a delta, or has the current version."""
        if not NEVER < version <= self.version:
            return False
        return all(each in self._changes for each in range(version + 1, self.version + 1))

    def updates(self, boxes: Sequence[BoxOf], *, since: int) -> list[BoxUpdate]:
        """Return the updates that bring some boxes from version `since` to the current one.

        since: NEVER if the boxes have unknown values. Boxes without a change are omitted. The
        result may share memory with the current copy: use it before the next commit.
        WeightSyncError for a box that is not inside one of the tensors.
        """
        is_delta = self.has_changes_since(since)
        changed: dict[str, Tensor | None] = {}
        result = []
        for index, (name, box) in enumerate(boxes):
            tensor = self._tensor_of(name, box)
            if name not in changed:
                changed[name] = self._changed_since(name, since) if is_delta else None
            update = update_of_box(index, tensor, box, changed[name])
            if len(update.values):
                result.append(update)
        return result

    def _tensor_of(self, name: str, box: Box) -> Tensor:
        """The tensor that has a box. WeightSyncError if none does."""
        tensor = self._front.get(name)
        if tensor is not None and tensor.ndim == len(box.bounds):
            if Box.of_shape(tensor.shape).contains(box):
                return tensor
        raise WeightSyncError.of(
            "weights of a generation server",
            f"box {box.bounds} of {name}",
            "boxes of the policy's tensors",
            "serve the folder that is actor.model.path, with this package's version",
        )

    def _changed_since(self, name: str, version: int) -> Tensor | None:
        """Positions of a tensor that changed after a version; None: it is sent as a whole."""
        versions = range(version + 1, self.version + 1)
        changes = [self._changes[each][name] for each in versions]
        if len(changes) == 1:
            return changes[0].positions
        return join_changes(changes, self.shapes[name].numel()).positions

    def _compare(self) -> _Changes:
        """Return what differs between the two copies, and set `changed_fraction`."""
        result = {}
        count = 0
        for name, old in self._front.items():
            result[name] = find_changes(old, self._back[name])
            count += result[name].count
        self.changed_fraction = count / max(1, self.num_elements)
        return result

    def _forget_old_changes(self, version: int) -> None:
        """Forget what changed in versions too far before this one, and in more that need memory."""
        most_bytes = self.num_elements * self.dtype.itemsize
        num_bytes = 0
        for each in sorted(self._changes, reverse=True):
            for changes in self._changes[each].values():
                if changes.positions is not None:
                    num_bytes += changes.positions.nbytes
            is_old = each <= version - KEPT_VERSIONS
            if is_old or (each < version and num_bytes > most_bytes):
                del self._changes[each]

    def _allocate(self) -> dict[str, Tensor]:
        return {name: torch.zeros(shape, dtype=self.dtype) for name, shape in self.shapes.items()}


class SharedMirror:
    """A mirror that one thread commits while others read it."""

    def __init__(self, mirror: WeightMirror) -> None:
        self._mirror = mirror
        self._lock = threading.Lock()

    @property
    def version(self) -> int:
        """The current version; NEVER before the first."""
        return self._mirror.version

    def commit(self, version: int) -> None:
        """See WeightMirror.commit. Waits until nobody reads."""
        with self._lock:
            self._mirror.commit(version)

    @contextmanager
    def lock_mirror(self) -> Iterator[WeightMirror]:
        """The mirror, which does not change inside the block."""
        with self._lock:
            yield self._mirror
