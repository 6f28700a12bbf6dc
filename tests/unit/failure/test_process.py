"""What a rank can tell of processes when it is short of descriptors, and that it always ends."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from spmdflow.failure.launcher import AGENT_MARK, launched_seconds
from spmdflow.failure.process import Process

ROOT = Path(__file__).parents[3]


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_process_that_lives_counts_as_alive_and_one_that_ended_as_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = Process.of(child.pid)
    lived = not process.has_ended()
    child.communicate()

    assert lived and process.has_ended() and process.state() is None


def test_restarted_rank_counts_from_the_start_of_its_torchrun() -> None:
    restarted = subprocess.Popen(
        ["sh", "-c", "sleep 60 & echo $!; wait"],  # a wrapper and a rank, of this process
        env={**os.environ, AGENT_MARK: "run"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert restarted.stdout is not None
    rank = int(restarted.stdout.readline())
    while not Path(f"/proc/{rank}/cmdline").read_bytes().startswith(b"sleep"):
        time.sleep(0.001)  # between fork and exec a process has no environment to read
    before = Process.of(os.getpid()).age_seconds()
    found = launched_seconds(rank)
    after = Process.of(os.getpid()).age_seconds()
    os.killpg(restarted.pid, signal.SIGKILL)
    restarted.communicate()

    assert before <= found <= after  # the age of this process, which started the wrapper
    assert launched_seconds(os.getpid()) >= found


OUT_OF_DESCRIPTORS = """
    import os, resource
    from spmdflow.failure.process import Process, leave
    me = Process.of(os.getppid())
    resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
    try:
        while True:
            os.dup(0)
    except OSError:
        pass
    seen = (me.has_ended(), me.is_stopped(), me.end_cause_or_none())
    os.write(1, repr(seen).encode())
    leave(7)
"""


def test_rank_out_of_descriptors_takes_nobody_for_dead_and_leaves() -> None:
    done = run_python(OUT_OF_DESCRIPTORS)

    assert done.stdout == "(False, False, None)", done.stderr
    assert done.returncode == 7


def test_start_raises_the_limit_of_descriptors_as_far_as_it_may() -> None:
    done = run_python("""
        import resource, sys
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        from spmdflow.run import main
        main(["--help"])
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    """)

    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] > 64
    assert done.returncode == 0, done.stderr


USE_MEMORY = """
import ctypes, os, resource
from spmdflow.cpu.memory import keep_freed_memory
keep_freed_memory(os.environ)
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def use(size):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(ctypes.c_size_t(size))
    ctypes.memset(block, 1, size)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(*(use(64 << 20) for _ in range(3)))
"""
"""Prints the page faults of three allocations of 64 MiB, one after another."""


def test_freed_memory_is_kept_for_the_next_forward() -> None:
    done = run_python(USE_MEMORY)

    first, *later = map(int, done.stdout.split())
    assert first > 1000 and max(later) < 100, done.stderr


def test_setting_of_the_allocator_in_the_environment_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1048576")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1048576")

    done = run_python(USE_MEMORY)

    assert min(map(int, done.stdout.split())) > 1000, done.stderr
