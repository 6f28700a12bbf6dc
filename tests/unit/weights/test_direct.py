"""Files written past the page cache have the bytes of any other, whatever their sizes."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spmdflow.weights import direct
from spmdflow.weights.direct import NewFile

BUFFER_BYTES = 8192


def write(path: Path, head: bytes, sizes: list[int]) -> bytes:
    """What the file must hold."""
    draw = torch.Generator().manual_seed(sum(sizes))
    parts = [torch.randint(256, (size,), dtype=torch.uint8, generator=draw) for size in sizes]
    with NewFile(path, head_bytes=len(head), num_bytes=len(head) + sum(sizes)) as file:
        for part in parts:
            file.append(part)
        file.finish(head)
    return head + b"".join(part.numpy().tobytes() for part in parts)


@given(
    head=st.sampled_from([1, 4095, 4096, 4097, 20000]),
    sizes=st.lists(st.sampled_from([0, 1, 4095, 4096, 8191, 8192, 8193, 30001]), max_size=5),
)
def test_bytes_of_any_sizes_are_written_in_their_order(
    head: int, sizes: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("direct") / "file"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "_BUFFER_BYTES", BUFFER_BYTES)

        expected = write(path, bytes(i % 251 for i in range(head)), sizes)

    assert path.read_bytes() == expected


@pytest.mark.parametrize("refused", ["open", "pwrite"])
def test_file_system_that_refuses_direct_writes_gets_usual_ones(
    refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "_BUFFER_BYTES", BUFFER_BYTES)
    real_open = os.open
    real_write = os.pwrite
    asked = []

    def only_usual_open(path, flags, mode=0o777):
        asked.append(flags & os.O_DIRECT)
        if refused == "open" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct writes")
        return real_open(path, flags, mode)

    def only_usual_write(file, values, place):
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct writes")
        return real_write(file, values, place)

    monkeypatch.setattr(os, "open", only_usual_open)
    monkeypatch.setattr(os, "pwrite", only_usual_write)

    expected = write(tmp_path / "file", b"head", [100_000])

    assert asked[0] and (tmp_path / "file").read_bytes() == expected
