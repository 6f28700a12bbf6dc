"""What may travel between controller and ranks, how it comes back, and what is refused."""

from __future__ import annotations

import enum
import logging
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spmdflow import message
from spmdflow.errors import MessageError
from spmdflow.message import MAX_MESSAGE_BYTES, decode, encode
from spmdflow.runtime.wire import Envelopes, Kind
from spmdflow.worker_api.metric import Max, Mean, Sum

_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
)
_PLAIN = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(0, 99), inner),
    max_leaves=20,
)


@dataclass(frozen=True)
class Point:
    """A record with a tuple inside."""

    name: str
    place: tuple[int, tuple[float, ...]]
    more: Any = None


class Pair(NamedTuple):
    """A record that is a tuple."""

    left: int
    right: Any


class Color(enum.IntEnum):
    """A number with a name."""

    RED = 3


@given(_PLAIN)
def test_plain_data_comes_back_equal(value: Any) -> None:
    assert decode(encode(value)) == value


def test_tuples_become_lists_and_paths_text() -> None:
    assert decode(encode({"a": (1, (2,)), "b": Path("x/y")})) == {"a": [1, [2]], "b": "x/y"}


@pytest.mark.parametrize("dtype", ["bool", "int64", "int32", "uint8", "float32", "float64", ">i8"])
@pytest.mark.parametrize("shape", [(0,), (3,), (2, 3), ()])
def test_arrays_come_back_equal_writable_and_of_the_same_kind(
    dtype: str, shape: tuple[int, ...]
) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)

    back = decode(encode({"x": array}))["x"]

    np.testing.assert_array_equal(back, array)
    assert back.dtype == array.dtype.newbyteorder("<") and back.shape == shape
    assert back.flags.writeable


def test_array_that_is_not_contiguous_comes_back_equal() -> None:
    array = np.arange(12).reshape(3, 4)[:, ::2]

    np.testing.assert_array_equal(decode(encode(array)), array)


def test_dataclasses_and_named_tuples_come_back_equal_with_their_tuples() -> None:
    point = Point("p", (1, (2.0, 3.0)), [Pair(1, (2,)), {"m": Mean(1.0, 2.0)}])

    back = decode(encode([point, Sum(3.0), Max(4.0)]))

    assert back == [point, Sum(3.0), Max(4.0)]
    assert type(back[0].more[0]) is Pair and type(back[1]) is Sum and type(back[2]) is Max


def test_numpy_scalars_and_enum_members_become_numbers() -> None:
    back = decode(encode([np.int64(3), np.float32(0.5), np.bool_(True), Color.RED]))

    assert back == [3, 0.5, True, 3]
    assert [type(value) for value in back] == [int, float, bool, int]


class Plain:
    """No record."""


def _local_class() -> Any:
    @dataclass
    class Local:
        x: int = 0

    return Local()


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (torch.zeros(2), "torch.Tensor"),
        (object(), "builtins.object"),
        (Plain(), "Plain"),
        (lambda: 0, "builtins.function"),
        ({1, 2}, "builtins.set"),
        (1 + 2j, "builtins.complex"),
        (2**64, "out of"),
        (np.array(["a"]), "dtype <U1"),
        (np.array([None]), "dtype object"),
        (_local_class(), "not a module-level class"),
    ],
)
def test_anything_else_is_refused_naming_it(value: Any, named: str) -> None:
    with pytest.raises(MessageError) as caught:
        encode({"deep": [value]})

    text = str(caught.value)
    assert named in text and "expected plain data" in text and "keep tensors in the batch" in text


def test_message_beyond_the_limit_is_refused_on_both_sides() -> None:
    data = b"x" * (MAX_MESSAGE_BYTES + 1)

    with pytest.raises(MessageError, match=f"expected at most {MAX_MESSAGE_BYTES}; send rows"):
        encode(data)
    with pytest.raises(MessageError, match="arrived; expected at most"):
        decode(data)


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", b"\x92\x01", msgpack.packb(1) + b"x", pickle.dumps({"a": 1})],
    ids=["empty", "unused code", "cut off", "too long", "pickle"],
)
def test_bytes_of_another_kind_are_refused(data: bytes) -> None:
    with pytest.raises(MessageError, match="do not decode|of plain data"):
        decode(data)


@given(st.binary(max_size=200))
def test_random_bytes_give_a_value_or_a_message_error(data: bytes) -> None:
    try:
        decode(data)
    except MessageError as err:
        assert "expected" in str(err)


def _record(name: str, values: list[Any]) -> bytes:
    """A record as only a foreign program would send it."""
    content = msgpack.packb([name, values])
    return msgpack.packb(msgpack.ExtType(message._RECORD, content))


@pytest.mark.parametrize(
    "name",
    ["antigravity:fly", "subprocess:Popen", "os:system", "builtins:eval", "nowhere:Class", "x"],
)
def test_record_of_a_class_that_is_no_record_or_not_imported_is_refused(name: str) -> None:
    with pytest.raises(MessageError, match="expected a dataclass of a module"):
        decode(_record(name, ["true"]))


def test_record_does_not_import_its_module() -> None:
    program = (
        "import sys\n"
        "from spmdflow.message import decode\n"
        "from spmdflow.errors import MessageError\n"
        f"data = {_record('colorsys:Any', [])!r}\n"
        "try:\n"
        "    decode(data)\n"
        "except MessageError:\n"
        "    sys.exit(int('colorsys' in sys.modules))\n"
        "sys.exit(2)\n"
    )
    root = Path(__file__).parents[3]

    assert subprocess.run([sys.executable, "-c", program], cwd=root, timeout=600).returncode == 0


def test_name_of_a_module_that_is_not_imported_runs_nothing_of_it(tmp_path: Path) -> None:
    (tmp_path / "harm.py").write_text("raise SystemExit('ran')\n")
    program = (
        "import sys\n"
        "from spmdflow.worker_api.register import find_map_function as find\n"
        "from spmdflow.errors import ProtocolError\n"
        "for name in ('harm:function', 'spmdflow.doctor.__main__:main'):\n"
        "    try:\n"
        "        find(name)\n"
        "    except ProtocolError as err:\n"
        "        assert 'import it at the top of the script' in str(err)\n"
        "    assert name.partition(':')[0] not in sys.modules\n"
        "assert 'spmdflow.objectives.kl' not in sys.modules\n"
        "assert find('spmdflow.objectives.kl:measure_kl').__name__ == 'measure_kl'\n"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])])

    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, timeout=600
    )

    assert done.returncode == 0


def test_record_with_other_fields_is_refused_with_both_numbers() -> None:
    name = f"{Point.__module__}:Point"

    with pytest.raises(MessageError, match=r"with 1 fields; expected 3 \(name, place, more\)"):
        decode(_record(name, ["p"]))


def test_envelope_of_another_run_is_dropped_with_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Envelopes(b"a" * 16)
    theirs = Envelopes(b"b" * 16)
    monkeypatch.setattr(logging.getLogger("spmdflow"), "propagate", True)

    assert ours.open(ours.seal(Kind.REPLY, [1, {}]), 0) == (Kind.REPLY, [1, {}])
    with caplog.at_level(logging.WARNING):
        assert ours.open(theirs.seal(Kind.ABORT, []), 7) is None
    assert "of another run, sent as rank 7" in caplog.text


def test_envelope_of_this_run_and_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(MessageError, match="expected one of"):
        Envelopes(b"a" * 16).open(b"a" * 16 + b"\xff\xc0", 0)
