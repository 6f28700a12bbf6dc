"""Reads a folder of torch.distributed.checkpoint (DCP) box by box, without running its code.

    .metadata         a pickle: each tensor's shape, its chunks (boxes), their offsets in the files
    __0_0.distcp      items one after the other, each as torch.save writes it

The pickle is read by an unpickler that knows a few names: torch's records of the metadata become
`_Record`, which only stores its state, and no other class or function is looked up. Items are read
by torch.load(weights_only=True). Tensors have the names of the model's state dict, also if that was
saved as {"model": state_dict}.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spmdflow.blocks.box import Box, subtract_all
from spmdflow.blocks.plan import plan_reads
from spmdflow.errors import ConfigError

METADATA = ".metadata"
_DO = "save it again with torch.distributed.checkpoint, or convert it to safetensors"


class TorchCheckpoint:
    """The tensors of one model; the methods are those of safetensors' `safe_open`."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError if the metadata is damaged or has anything but records of tensors."""
        self._folder = folder
        self._read: tuple[_Chunk | None, Tensor] = (None, torch.empty(0))
        path = folder / METADATA
        metadata = _unpickle(folder / METADATA)
        try:
            self._tensors = _tensors_of(folder, metadata)
        except (AttributeError, LookupError, TypeError, ValueError) as err:
            got = f"{path}, whose content is no metadata of tensors ({type(err).__name__}: {err})"
            raise ConfigError.of(
                "model", got, "what torch.distributed.checkpoint writes", _DO
            ) from err

    def keys(self) -> list[str]:
        """Names of the tensors."""
        return list(self._tensors)

    def get_tensor(self, name: str) -> Tensor:
        """A complete tensor, on the host."""
        return self.read(name, Box.of_shape(self._tensors[name].shape))

    def get_slice(self, name: str) -> Slice:
        """A view of a tensor from which parts can be read."""
        return Slice(self, name, self._tensors[name].shape)

    def read(self, name: str, box: Box) -> Tensor:
        """Return the values of a box on the host, assembled from the chunks that have them.

        ConfigError if the files lack a part of the box or are damaged. An empty box gives an empty
        tensor.
        """
        chunks = self._tensors[name].chunks
        boxes = tuple(chunk.box for chunk in chunks)
        if missing := subtract_all([box], boxes):
            got = f"{self._folder} without {name}{list(missing[0].bounds)}"
            raise ConfigError.of("model", got, f"all of {list(box.bounds)}", _DO)
        result: Tensor | None = None
        for index, part in plan_reads(boxes, (box,)):
            values = self._read_chunk(name, chunks[index])
            result = values.new_empty(box.shape) if result is None else result
            result[part.slices(box)] = values[part.slices(boxes[index])]
        if result is None:  # an empty box
            return self._read_chunk(name, chunks[0]).new_empty(box.shape)
        return result

    def _read_chunk(self, name: str, chunk: _Chunk) -> Tensor:
        """Read one chunk from its file. The last one is cached, because boxes are read in order.

        ConfigError if it cannot be read, is no tensor, or has another shape than the metadata
        states.
        """
        if self._read[0] is chunk:
            return self._read[1]
        try:
            with chunk.path.open("rb") as file:
                file.seek(chunk.start)
                data = io.BytesIO(file.read(chunk.num_bytes))
            values = torch.load(data, map_location="cpu", weights_only=True)
            is_right = isinstance(values, Tensor) and tuple(values.shape) == chunk.box.shape
        except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as err:
            got = f"{name} in {chunk.path}, which cannot be read ({type(err).__name__}: {err})"
            raise ConfigError.of("model", got, f"a tensor of shape {chunk.box.shape}", _DO) from err
        if not is_right:
            got = f"{name} in {chunk.path} of another shape than its metadata says"
            raise ConfigError.of("model", got, f"shape {chunk.box.shape}", _DO)
        self._read = (chunk, values)
        return values


@dataclass(frozen=True)
class Slice:
    """Like safetensors' slice: `slice[rows, columns]` reads, `get_shape()` does not."""

    checkpoint: TorchCheckpoint
    name: str
    shape: tuple[int, ...]

    def get_shape(self) -> tuple[int, ...]:
        """Shape of the complete tensor."""
        return self.shape

    def __getitem__(self, slices: slice | tuple[slice, ...]) -> Tensor:
        """Read the values of these leading dimensions; further dimensions are complete."""
        leading = slices if isinstance(slices, tuple) else (slices,)
        every = (*leading, *[slice(None)] * (len(self.shape) - len(leading)))
        pairs = (each.indices(size) for each, size in zip(every, self.shape, strict=True))
        return self.checkpoint.read(self.name, Box(tuple((low, high) for low, high, _ in pairs)))


class _Chunk(NamedTuple):
    box: Box
    path: Path
    start: int
    num_bytes: int


class _Stored(NamedTuple):
    shape: tuple[int, ...]
    chunks: Sequence[_Chunk]


def _tensors_of(folder: Path, metadata: Any) -> dict[str, _Stored]:
    """Return the model's tensors by name: those at the top of the state dict or under "model".

    Entries that are not tensors are skipped. LookupError if there are no tensors in either place;
    ValueError for compressed chunks or files outside of the folder. Any: unpickled metadata;
    invalid content may raise any error.
    """
    locations = {}
    for key, x in metadata.storage_data.items():
        locations[(key.fqn, getattr(key, "offset", None))] = x
    tensors: dict[tuple[Any, ...], dict[str, _Stored]] = {}
    for key, facts in metadata.state_dict_metadata.items():
        if not hasattr(facts, "chunks"):
            continue  # bytes: numbers, texts
        *holder, name = (metadata.planner_data or {}).get(key, (key,))
        chunks = []
        for chunk in facts.chunks:
            offsets = chunk.offsets
            at = locations[key, chunk.offsets]
            if Path(at.relative_path).name != at.relative_path:
                raise ValueError(f"a file outside of the folder: {at.relative_path!r}")
            if getattr(at, "transform_descriptors", None):
                raise ValueError("it is compressed")
            pairs = zip(offsets, chunk.sizes, strict=True)
            box = Box(tuple((int(low), int(low) + int(size)) for low, size in pairs))
            path = folder / at.relative_path
            chunks.append(_Chunk(box, path, int(at.offset), int(at.length)))
        shape = tuple(int(size) for size in facts.size)
        tensors.setdefault(tuple(holder), {})[str(name)] = _Stored(shape, chunks)
    for holder in ((), ("model",)):
        if holder in tensors:
            return tensors[holder]
    raise LookupError(f"no tensors at its top or under 'model', but under {list(tensors)}")


class _Record:
    """An object of torch's metadata: its state, without its code."""

    def __init__(self, *arguments: object) -> None:
        pass

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {})


_METADATA = "torch.distributed.checkpoint.metadata"
_RECORDS = {
    _METADATA: (
        "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata "
        "TensorProperties MetadataIndex StorageMeta _MEM_FORMAT_ENCODING"
    ),
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.serialization": "_get_layout",
    "pathlib": "PosixPath PurePosixPath WindowsPath PureWindowsPath",
    "pathlib._local": "PosixPath PurePosixPath WindowsPath PureWindowsPath",
}


class _Unpickler(pickle._Unpickler):  # Python's: the C one allocates any size that the file names
    """Accepts the names above and refuses all others before anything is imported."""

    def find_class(self, module: str, name: str) -> Callable[..., Any] | torch.dtype:
        """Return the substitute for module.name; UnpicklingError if the name is not accepted.

        Records of the metadata become _Record, torch.Size becomes tuple. OrderedDict and torch's
        dtypes are themselves.
        """
        if name in _RECORDS.get(module, "").split():
            return _Record
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _unpickle(path: Path) -> Any:
    """Read a pickle with `_Unpickler`; ConfigError if that fails."""
    try:
        with path.open("rb") as file:
            return _Unpickler(file).load()
    except (
        *(pickle.UnpicklingError, EOFError, OSError, MemoryError, RecursionError),
        *(ArithmeticError, AttributeError, LookupError, TypeError, ValueError, struct.error),
    ) as err:
        got = f"{path}, a pickle that is not read on ({type(err).__name__}: {err})"
        expected = "records of torch.distributed.checkpoint alone; nothing of it was run"
        raise ConfigError.of("model", got, expected, _DO) from err
