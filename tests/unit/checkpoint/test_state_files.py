"""Boxes that the ranks of one layout saved are read by those of another, and verified."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from spmdflow import checkpoint
from spmdflow.blocks.box import Box, subtract_all
from spmdflow.blocks.plan import plan_reads
from spmdflow.checkpoint import tensors
from spmdflow.checkpoint.manifest import RankReport, make_rank_folder, move_rank_files
from spmdflow.checkpoint.run_dir import Checkpoints, find_latest
from spmdflow.checkpoint.state import StateFiles
from spmdflow.checkpoint.tensors import write_state
from spmdflow.errors import CheckpointError

WHOLE = {"w": torch.arange(60.0).reshape(10, 6), "w.exp_avg": -torch.arange(60.0).reshape(10, 6)}


def seal(run_dir: Path, cuts: list[int]) -> Path:
    """Ranks save the rows between the cuts, each in a file of its own."""
    checkpoints = Checkpoints(run_dir, keep=1)
    folder = checkpoints.begin(1)
    written = []
    edges = [0, *sorted(cuts), 10]
    for rank, (low, high) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
        box = Box(((low, high), (0, 6)))
        rows = [(name, whole[low:high], box) for name, whole in WHOLE.items() if high > low]
        own = make_rank_folder(folder / "actor", rank)
        write_state(own / f"rank-{rank}.safetensors", rows, {"steps_done": 3})
        facts = move_rank_files(folder / "actor", own)
        written.append(RankReport(rank, "node", {f"actor/{n}": f for n, f in facts.items()}))
    return checkpoints.seal(1, {}, written).folder / "actor"


bound = st.tuples(st.integers(0, 5), st.integers(0, 5)).map(lambda x: (min(x), max(x) + 1))


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(0, 10), max_size=3), st.lists(bound, min_size=2, max_size=2))
def test_any_box_is_read_from_any_layout(tmp_path_factory, cuts, wanted):
    folder = seal(tmp_path_factory.mktemp("run"), cuts)
    files = StateFiles(folder, index=1, count=2)
    box = Box(tuple(wanted))

    for name, whole in WHOLE.items():
        assert torch.equal(files.read(name, box), whole[box.slices()])
    assert files.plain == {"steps_done": 3}


boxes = st.lists(st.lists(bound, min_size=2, max_size=2).map(lambda x: Box(tuple(x))), max_size=4)


@settings(deadline=None, max_examples=100)
@given(boxes, boxes)
def test_plan_reads_each_needed_element_once_from_who_holds_it(held, needed):
    rest = subtract_all([Box(((0, 7), (0, 7)))], held)
    everything = (*held, *rest)

    reads = plan_reads(everything, tuple(needed))

    count = torch.zeros(7, 7, dtype=torch.int64)
    wanted = torch.zeros(7, 7, dtype=torch.int64)
    for place, part in reads:
        assert everything[place].contains(part)
        count[part.slices()] += 1
    for box in needed:
        wanted[box.slices()] = 1
    assert torch.equal(count, wanted)


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(0, 10), max_size=3), boxes)
def test_overlapping_views_are_filled_and_each_tensor_in_a_file_is_read_once(
    tmp_path_factory, cuts, needed
):
    needed = [Box(tuple((low, min(high, 6)) for low, high in box.bounds)) for box in needed]
    files = StateFiles(seal(tmp_path_factory.mktemp("run"), cuts))
    views = [(name, torch.zeros(box.shape), box) for name in WHOLE for box in needed]

    files.fill(views)

    for name, view, box in views:
        assert torch.equal(view, WHOLE[name][box.slices()])
    edges = [0, *sorted(cuts), 10]
    touched = [
        (high - low) * 6 * 4
        for low, high in itertools.pairwise(edges)
        if any(box.size and box.bounds[0][0] < high and low < box.bounds[0][1] for box in needed)
        and low < high
    ]
    assert files.bytes_read == len(WHOLE) * sum(touched)


def test_a_rank_that_finds_all_in_its_own_file_opens_no_other(tmp_path):
    folder = seal(tmp_path, [4])
    (folder / "rank-0.safetensors").write_bytes(b"damaged")

    files = StateFiles(folder, index=1, count=2)

    assert torch.equal(files.read("w", Box(((4, 10), (0, 6)))), WHOLE["w"][4:])
    with pytest.raises(CheckpointError, match=r"rank-0\.safetensors is damaged"):
        files.read("w", Box(((3, 10), (0, 6))))


def test_any_flipped_bit_is_found_by_who_reads_it(tmp_path):
    folder = seal(tmp_path, [4])
    path = folder / "rank-0.safetensors"
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with pytest.raises(CheckpointError, match=r"rank-0\.safetensors (is|has)"):
            files = StateFiles(folder, index=0, count=2)
            for name in WHOLE:
                files.read(name, Box(((0, 4), (0, 6))))


def test_a_large_box_is_written_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(tensors, "_MAX_BOX_BYTES", 50)
    folder = seal(tmp_path, [])

    parts = load_file(folder / "rank-0.safetensors")

    assert len(parts) == 10 and "w.exp_avg[2:4,0:6]" in parts
    assert max(part.nbytes for part in parts.values()) == 48
    files = StateFiles(folder)
    assert torch.equal(files.read("w", Box(((1, 9), (2, 3)))), WHOLE["w"][1:9, 2:3])


def test_what_nobody_saved_is_refused_with_the_box(tmp_path):
    files = StateFiles(seal(tmp_path, [4]))

    with pytest.raises(CheckpointError, match=r"lacks w\[\(10, 12\), \(0, 6\)\], expected all of"):
        files.read("w", Box(((8, 12), (0, 6))))
    with pytest.raises(
        CheckpointError, match=r"lacks b\[\(0, 1\)\], expected all of .*resume with"
    ):
        files.read("b", Box(((0, 1),)))


def test_scalars_and_views_come_back(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    folder = checkpoints.begin(1)
    blocks: list[tuple[str, Tensor, Box]] = [
        ("step", torch.tensor(7.0), Box(())),
        ("w", WHOLE["w"][:, 2:4], Box(((0, 10), (2, 4)))),
    ]
    write_state((own := make_rank_folder(folder / "a", 0)) / "rank-0.x", blocks, {})
    facts = move_rank_files(folder / "a", own)
    info = checkpoints.seal(1, {}, [RankReport(0, "n", {f"a/{n}": f for n, f in facts.items()})])

    files = StateFiles(info.folder / "a")

    assert float(files.read("step", Box(()))) == 7.0
    assert torch.equal(files.read("w", Box(((3, 5), (2, 4)))), WHOLE["w"][3:5, 2:4])


def test_nothing_but_headers_is_read_again_to_seal(tmp_path):
    folder = seal(tmp_path, [4])

    info = find_latest(tmp_path)

    facts = info.files["actor/rank-0.safetensors"]
    size = (folder / "rank-0.safetensors").stat().st_size
    assert (facts.num_bytes, facts.head_bytes) == (size, size - 2 * 4 * 6 * 4)


def test_name_that_the_package_had_before_is_found_with_a_warning_that_tells_its_module() -> None:
    with pytest.warns(FutureWarning, match=r"import it from spmdflow\.checkpoint\.state"):
        found = checkpoint.StateFiles

    assert found is StateFiles
