"""Ranks of one start find each other in a store that other starts have used; threads are ranks."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from spmdflow.checkpoint.lock import RunDirLock
from spmdflow.errors import ConfigError, DeadlineError, RunFailed, SpmdflowError
from spmdflow.failure.process import Process
from spmdflow.failure.settings import SessionSettings
from spmdflow.runtime.rendezvous import (
    _ROOT,
    RankInfo,
    StartingRank,
    _check_devices,
    _check_shared,
    meet,
    own_store,
)


def start(
    store: dist.Store, ranks: list[StartingRank], *, seconds: float = 60.0
) -> list[dist.Store]:
    """What `own_store` gives to each of the ranks, which run side by side."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        jobs = [pool.submit(own_store, store, rank, len(ranks), seconds=seconds) for rank in ranks]
        return [job.result() for job in jobs]


def of_one_node(origin: str, num_ranks: int = 3) -> list[StartingRank]:
    return [StartingRank(rank, 0, origin) for rank in range(num_ranks)]


def test_ranks_of_a_start_share_keys_and_those_of_the_next_start_do_not_see_them() -> None:
    store = dist.HashStore()

    first = start(store, of_one_node("a"))
    second = start(store, of_one_node("a"))
    first[0].set("key", "of the first")
    second[2].set("key", "of the second")

    assert [part.get("key") for part in first] == [b"of the first"] * 3
    assert [part.get("key") for part in second] == [b"of the second"] * 3


def test_rank_of_another_torchrun_on_the_node_is_left_out() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(1) as pool:
        orphan = pool.submit(own_store, store, StartingRank(1, 0, "dead"), 2, seconds=1.0)

        start(store, of_one_node("new", 2))

        with pytest.raises(DeadlineError, match="rank 1 got no answer from rank 0"):
            orphan.result()


def test_ranks_of_two_torchruns_on_another_node_are_refused() -> None:
    ranks = [StartingRank(0, 0, "a"), StartingRank(1, 1, "old"), StartingRank(2, 1, "new")]

    with pytest.raises(ConfigError, match="expected one torchrun on node 1; end the torchrun of"):
        start(dist.HashStore(), ranks)


def test_ranks_that_do_not_come_are_named() -> None:
    with pytest.raises(DeadlineError, match=r"ranks \[1, 2\] of 3 did not arrive in time"):
        own_store(dist.HashStore(), StartingRank(0, 0, ""), 3, seconds=0.1)


@pytest.mark.parametrize(
    "nonsense",
    [b"\xff{", b"[1]", b"7", b'{"rank": 1}', b'{"rank": 9, "node": 0, "origin": "a"}']
    + [b'{"rank": "1", "node": 0, "origin": "a"}', b'{"rank": 1, "node": 0, "origin": {}}'],
)
def test_what_no_rank_wrote_into_the_list_of_a_start_is_left_out(nonsense: bytes) -> None:
    store = dist.HashStore()
    store.set(f"{_ROOT}/asked/{store.add(f'{_ROOT}/count', 1)}", nonsense)

    first, second = start(store, of_one_node("a", 2))
    first.set("key", "of the first")

    assert second.get("key") == b"of the first"


def test_rank_that_was_killed_while_it_asked_does_not_hold_up_the_next_start() -> None:
    store = dist.HashStore()
    store.add(f"{_ROOT}/count", 1)  # the text of that entry never comes

    first, second = start(store, of_one_node("a", 2), seconds=5.0)
    first.set("key", "of the first")

    assert second.get("key") == b"of the first"


def test_error_of_the_controllers_rank_is_told_to_the_ranks_that_wait_for_it(
    tmp_path: Path,
) -> None:
    def fail() -> RunDirLock:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    settings = SessionSettings(tmp_path, (0, 1), start_seconds=20.0)
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(meet, store, rank, settings, fail) for rank in (0, 1))

        with pytest.raises(OSError, match="Too many open files"):
            first.result()
        with pytest.raises(RunFailed, match=r"rank failed \(OSError: \[Errno 24\] Too many open"):
            second.result()


def test_rank_alone_waits_for_nobody() -> None:
    own_store(dist.HashStore(), StartingRank(0, 0, ""), 1, seconds=0.1).set("key", "value")


def test_another_name_of_the_key_in_the_store_does_not_blame_the_folder(tmp_path: Path) -> None:
    process = Process(1, 1, "boot/pids/a")
    own = RankInfo(process, None, "a", key_name=".key-1")
    misled = RankInfo(process, None, "a", has_key=False, key_name="../../x")

    with pytest.raises(SpmdflowError, match=r"torchrun's store sent rank 1 to") as caught:
        _check_shared(SessionSettings(tmp_path, (0, 1)), own, {1: misled})

    assert "shared" not in str(caught.value)


def test_ranks_that_cannot_read_the_key_are_refused_by_rank_node_and_path(tmp_path: Path) -> None:
    def info(node: str, *, has_key: bool) -> RankInfo:
        return RankInfo(Process(1, 1, f"boot/pids/{node}"), None, node, has_key=has_key)

    own = info("a", has_key=True)
    blind = info("b", has_key=False)
    settings = SessionSettings(tmp_path, (0, 1, 2, 3))

    with pytest.raises(ConfigError) as caught:
        _check_shared(settings, own, {1: blind, 2: own, 3: blind})

    assert str(caught.value) == (
        f"run.dir: got {tmp_path}, where rank 1 on node b, rank 3 on node b cannot read the file "
        f"that rank 0 on node a wrote there, expected one folder that every node shares "
        f"(checkpoints are written into it); set run.dir to a shared folder"
    )


def info_of(node: str, device: str) -> RankInfo:
    return RankInfo(Process(1, 1, f"boot/pids/{node}"), None, node, device=device)


def test_ranks_with_one_device_are_refused_with_the_number_that_the_node_has() -> None:
    devices = ["GPU-1", "GPU-2", "GPU-1", "GPU-1"]
    infos = {rank: info_of("a", device) for rank, device in enumerate(devices)}

    with pytest.raises(ConfigError) as caught:
        _check_devices(infos | {4: info_of("b", "GPU-3")})

    assert str(caught.value) == (
        "devices: ranks 0, 2, 3 use one device (GPU-1) of node a, expected a device for each "
        "rank; lower --nproc-per-node (`spmdflow run -n`) to 2, or let the ranks see more devices "
        "(CUDA_VISIBLE_DEVICES)"
    )


def test_ranks_on_cpus_and_on_devices_of_their_own_are_accepted() -> None:
    _check_devices({rank: info_of("a", "") for rank in range(3)})
    _check_devices({rank: info_of("a", f"GPU-{rank}") for rank in range(3)})
