"""One rank's tensors come back bit for bit, or the file is refused."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from spmdflow.checkpoint.tensors import read_tensors, write_tensors
from spmdflow.errors import CheckpointError

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
DTYPES += [torch.int64, torch.int32, torch.uint8, torch.bool]


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().flatten().view(torch.uint8).tolist() if tensor.numel() else []


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    """A tensor of any bit patterns, so also nan with payload, -0.0 and denormals."""
    num_bytes = math.prod(shape) * dtype.itemsize
    top = 2 if dtype == torch.bool else 256
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(top, (num_bytes,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(DTYPES),
            st.lists(st.integers(0, 4), max_size=3).map(tuple),
            st.integers(0, 2**31),
        ),
        max_size=5,
    )
)
def test_any_tensors_come_back_bit_for_bit(tmp_path_factory, wanted):
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    tensors = {f"t.{number}": random_bits(*facts) for number, facts in enumerate(wanted)}
    write_tensors(path, tensors, {})

    read, plain = read_tensors(path)
    assert plain == {} and set(read) == set(tensors)
    for name, tensor in tensors.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert bits(read[name]) == bits(tensor)


def test_views_shared_storage_and_transposes_come_back(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {"whole": base, "same": base, "row": base[1], "turned": base.t(), "part": base[:, 1:]}
    parameter = torch.nn.Parameter(torch.ones(2, requires_grad=True))
    write_tensors(tmp_path / "a", tensors | {"parameter": parameter}, {})

    read, _ = read_tensors(tmp_path / "a")
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor), name
    assert torch.equal(read["parameter"], torch.ones(2))


def test_plain_data_comes_back(tmp_path):
    plain = {"step": 3, "lr": 0.1 + 0.2, "big": 2**80, "text": "\u00e9\n", "none": None}
    plain |= {"nested": {"list": [1, [2.5, True]]}}
    write_tensors(tmp_path / "a", {}, plain | {"tuple": (1, 2)})

    assert read_tensors(tmp_path / "a") == ({}, plain | {"tuple": [1, 2]})


@pytest.mark.parametrize(
    ("plain", "problem"),
    [
        ({"a": {1: 2}}, r"plain\.a has key 1, expected str keys"),
        ({"a": [0, torch.zeros(1)]}, r"plain\.a\[1\] is a Tensor, expected JSON data"),
        ({"a": {1, 2}}, r"plain\.a is a set"),
    ],
)
def test_plain_data_that_json_would_change_is_refused_with_its_place(tmp_path, plain, problem):
    with pytest.raises(CheckpointError, match=problem):
        write_tensors(tmp_path / "a", {}, plain)
    assert not (tmp_path / "a").exists()


def test_writing_again_replaces_the_file_and_makes_its_folder(tmp_path):
    path = tmp_path / "step-1.tmp" / "actor" / "rank-0.safetensors"
    for value in (1.0, 2.0):
        write_tensors(path, {"a": torch.tensor(value)}, {})

    assert read_tensors(path)[0]["a"].item() == 2.0
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_file_truncated_at_any_byte_is_refused_by_name(tmp_path):
    path = tmp_path / "rank-0.safetensors"
    write_tensors(path, {"a": torch.arange(4), "b": torch.tensor(1.0)}, {"x": [1, 2]})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"rank-0\.safetensors is damaged"):
            read_tensors(path)


def test_a_flipped_bit_of_the_header_gives_no_other_error(tmp_path):
    path = tmp_path / "rank-0.safetensors"
    write_tensors(path, {"a": torch.arange(4)}, {"x": [1, 2]})
    whole = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        for bit in range(8 * (len(whole) - 32)):
            at = bit // 8
            os.pwrite(file.fileno(), bytes([whole[at] ^ 1 << bit % 8]), at)
            try:
                read_tensors(path)  # other names or values: the manifest's hash tells
            except CheckpointError as err:
                assert "rank-0.safetensors" in str(err)
            os.pwrite(file.fileno(), whole[at : at + 1], at)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot read .*gone\.safetensors.*No such file"):
        read_tensors(tmp_path / "gone.safetensors")


def test_a_file_of_another_program_is_refused(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "a", {"format": "pt"})

    with pytest.raises(CheckpointError, match=r"a is damaged, or of another program"):
        read_tensors(tmp_path / "a")


def test_a_full_disk_is_named_with_bytes_free_and_leaves_no_part(tmp_path):
    tensors = {"a": torch.zeros(5000)}
    child = os.fork()  # a limit on file size cannot be lifted again in this process
    if child == 0:
        os._exit(write_beyond_limit(tmp_path / "actor" / "rank-0", tensors))

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert list((tmp_path / "actor").iterdir()) == []


def write_beyond_limit(path: Path, tensors: dict[str, Tensor]) -> int:
    """7 if the write was refused with an error that names the file."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
    with pytest.raises(
        CheckpointError, match=r"cannot write .*rank-0: .*File too large.*bytes are"
    ):
        write_tensors(path, tensors, {})
    return 7


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "actor").write_text("a file, not a folder")

    with pytest.raises(CheckpointError, match=r"cannot write .*actor/rank-0: "):
        write_tensors(tmp_path / "actor" / "rank-0", {}, {})
