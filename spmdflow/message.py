"""Commands and replies as bytes: msgpack of plain data. It does not know sockets or tensors.

Plain data: None, bool, int (64 bit), float, str, bytes, list, tuple (decoded as list), dict with
str or int keys, `Path` (decoded as str), numpy arrays of bool, int or float, NamedTuples and
dataclasses. The last two are sent as their import name and fields. They are decoded only from
modules that are already imported, and without running their code: fields are set, `__init__` and
`__post_init__` are not called. So decoding can neither load nor run foreign code, and nothing is
unpickled. Tuples *inside* them stay tuples: a decoded dataclass equals the original.

Classes and functions of workers and scripts are sent as "module:qualname" (`name_of`, `find`).
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable
from functools import cache
from pathlib import PurePath
from types import ModuleType
from typing import Any, cast

import msgpack
import numpy as np

from spmdflow.errors import MessageError, ProtocolError

MAX_MESSAGE_BYTES = 64 * 2**20
"""Larger messages are refused: data of that size belongs in the transfer lane."""

_ARRAY = 1
_RECORD = 2
_TUPLE = 3
_ARRAY_KINDS = "biuf"
_PLAIN: tuple[Any, ...] = (str, int, float, dict, list)


def encode(obj: Any, *, max_bytes: int | None = MAX_MESSAGE_BYTES) -> bytes:
    """Encode plain data (module docstring) as msgpack bytes.

    MessageError for other data, and for more than max_bytes. max_bytes None: no limit, for data
    that is not sent as one message.
    """
    try:
        data = _pack(obj, _encode_extension)
    except (TypeError, ValueError, OverflowError) as err:
        raise MessageError(
            f"message: {err}; expected plain data (None, bool, int, float, str, bytes, list, "
            f"dict, numpy arrays, dataclasses); keep tensors in the batch and send names"
        ) from err
    if max_bytes is not None and len(data) > max_bytes:
        raise MessageError(
            f"message: {len(data)} bytes; expected at most {max_bytes}; "
            f"send rows as columns of a batch, or cut the value into smaller ones"
        )
    return data


def decode(data: bytes | memoryview, *, max_bytes: int | None = MAX_MESSAGE_BYTES) -> Any:
    """Decode the bytes of `encode`; MessageError for anything else, or for more than max_bytes.

    Tuples become lists, except those inside dataclasses and NamedTuples. Runs no code of a class.
    """
    if max_bytes is not None and len(data) > max_bytes:
        raise MessageError(
            f"message: {len(data)} bytes arrived; expected at most {max_bytes}; "
            f"run the same version of spmdflow on every rank"
        )
    try:
        return _unpack(data)
    except MessageError:
        raise
    except (ValueError, TypeError, KeyError, RecursionError, msgpack.UnpackException) as err:
        raise MessageError(
            f"message: {len(data)} bytes that do not decode ({type(err).__name__}: {err}); "
            f"expected msgpack of plain data; run the same version of spmdflow on every rank"
        ) from err


def _pack(obj: Any, extension: Any) -> bytes:
    return cast(bytes, msgpack.packb(obj, default=extension, strict_types=True))


def _unpack(data: bytes | memoryview) -> Any:
    return msgpack.unpackb(data, ext_hook=_decode_extension, strict_map_key=False)


def _encode_extension(obj: Any) -> Any:
    """Replacement that msgpack packs for an object of another type."""
    if type(obj) is tuple:
        return list(obj)
    return _encode_field(obj)


def _encode_field(obj: Any) -> Any:
    """Return what msgpack packs for an object that it does not know, inside of a record.

    Tuples, arrays and records become extension types, paths and numpy numbers plain values, and
    subclasses of plain types that type. TypeError for anything else.
    """
    if type(obj) is tuple:
        return msgpack.ExtType(_TUPLE, _pack(list(obj), _encode_field))
    if isinstance(obj, np.ndarray):
        return msgpack.ExtType(_ARRAY, _encode_array(obj))
    if _is_record(type(obj)):
        return msgpack.ExtType(_RECORD, _encode_record(obj))
    if isinstance(obj, PurePath):
        return str(obj)
    if isinstance(obj, np.bool_ | np.integer | np.floating):
        return obj.item()
    for plain in _PLAIN:
        if isinstance(obj, plain):  # subclasses, such as enum members and defaultdict
            return plain(obj)
    raise TypeError(f"got {type(obj).__module__}.{type(obj).__qualname__}")


def _encode_array(array: np.ndarray) -> bytes:
    """Return dtype, shape and little-endian bytes of an array, packed.

    TypeError unless it is of bool, integers or floats.
    """
    if array.dtype.kind not in _ARRAY_KINDS:
        raise TypeError(f"got a numpy array of dtype {array.dtype}")
    if array.dtype.str[0] == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return _pack([array.dtype.str, list(array.shape), array.tobytes()], None)


def _is_record(cls: type) -> bool:
    """Whether cls is a dataclass or NamedTuple whose instances can be rebuilt from their fields."""
    is_tuple = issubclass(cls, tuple) and hasattr(cls, "_fields")
    return (dataclasses.is_dataclass(cls) or is_tuple) and not hasattr(cls, "__del__")


def _encode_record(obj: Any) -> bytes:
    """Return "module:Class" and field values of a dataclass or NamedTuple, packed.

    TypeError for a class that is not at the top level of its module.
    """
    cls = type(obj)
    name = f"{cls.__module__}:{cls.__qualname__}"
    if _find_class(name) is not cls:
        raise TypeError(f"got a {name}, which is not a module-level class")
    values = []
    for field in _field_names(cast(Any, cls)):
        values.append(getattr(obj, field))
    return _pack([name, values], _encode_field)


@cache
def _field_names(cls: Any) -> tuple[str, ...]:
    """Names of the fields of cls, in order."""
    if dataclasses.is_dataclass(cls):
        return tuple(field.name for field in dataclasses.fields(cls))
    return cast(tuple[str, ...], cls._fields)


def _find_class(name: str) -> type | None:
    """Return the class that "module:Class" names if its module is imported; otherwise None.

    Only top-level names are found. Nothing is imported.
    """
    module, _, qualname = name.partition(":")
    if module in sys.modules:
        member = vars(sys.modules[module]).get(qualname)
    else:
        member = None
    if isinstance(member, type):
        return member
    return None


def _decode_extension(code: int, data: bytes) -> Any:
    """Return the array, tuple or record that was encoded as a msgpack extension.

    The array is a writable copy. ValueError for an unknown code or another dtype.
    """
    if code == _ARRAY:
        dtype, shape, raw = msgpack.unpackb(data)
        kind = np.dtype(dtype)
        if kind.kind not in _ARRAY_KINDS:
            raise ValueError(f"numpy array of dtype {kind}")
        return np.frombuffer(raw, dtype=kind).reshape(shape).copy()
    if code == _TUPLE:
        return tuple(_unpack(data))
    if code == _RECORD:
        name, values = _unpack(data)
        return _decode_record(str(name), list(values))
    raise ValueError(f"extension type {code}")


def _decode_record(name: str, values: list[Any]) -> Any:
    """Return an instance of the class `name` with these field values, without running its code.

    MessageError if this process has not imported the class, or it has another number of fields.
    """
    cls = _find_class(name)
    if cls is None or not _is_record(cls):
        raise MessageError(
            f"message: an object of {name!r}; expected a dataclass of a module that this process "
            f"has imported; import it in the script, so that every rank knows it"
        )
    fields = _field_names(cast(Any, cls))
    if len(fields) != len(values):
        raise MessageError(
            f"message: {name} with {len(values)} fields; expected {len(fields)} "
            f"({', '.join(fields)}); run the same code on every rank"
        )
    if issubclass(cls, tuple):
        return tuple.__new__(cls, values)
    instance = object.__new__(cls)
    for name, value in zip(fields, values, strict=True):
        object.__setattr__(instance, name, value)
    return instance


def name_of(thing: Callable[..., Any]) -> str:
    """Return "module:qualname", by which every rank finds a module-level class or function.

    ProtocolError if it is defined inside a function, or is a lambda.
    """
    name = f"{thing.__module__}:{thing.__qualname__}"
    if "<" in name:
        raise ProtocolError(
            f"{name}: defined inside a function, expected module level; move it to the top of "
            f"the script, so that every rank finds it by name"
        )
    return name


_MODELS = "base critic generator policy preference reward"
_OBJECTIVES = "advantage covariance kl"
HOMES = frozenset(
    [f"spmdflow.models.{name}" for name in _MODELS.split()]
    + [f"spmdflow.objectives.{name}" for name in _OBJECTIVES.split()]
)
"""Modules of spmdflow's own workers and map functions. They are imported when a command names one,
because a script may use their public names, which import the module late, on one rank only."""


def find(name: str, is_marked: Callable[[Any], bool], expected: str) -> Any:
    """Return the class or function of this name (`name_of`), such as "module:Class.method".

    ProtocolError if its module is not imported, or there is no such object, or is_marked refuses
    it. Imports only modules of `HOMES`, and runs no code of a module or class for attribute access.
    expected: what it should be, for the message.
    """
    module, _, path = name.partition(":")
    if module not in sys.modules and module in HOMES:
        importlib.import_module(module)
    if module not in sys.modules:
        got = f"the module {module!r}, which this rank has not imported"
        do = "import it at the top of the script, so that every rank does"
        raise ProtocolError.of(name, got, "one that the script imports", do)
    thing: Any = sys.modules[module]
    for part in path.split("."):
        if isinstance(thing, type | ModuleType):
            thing = vars(thing).get(part)
        else:
            thing = None
    if not is_marked(thing) or name_of(thing) != name:
        do = "define it at the top level of the script, or import it there"
        raise ProtocolError.of("command", name, expected, do)
    return thing
