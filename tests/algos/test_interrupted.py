"""Runs that are harmed again and again, anywhere, end as an undisturbed run does, in every bit.

A chain is one run with 12 points at which a rank or torchrun gets a signal: while ranks start,
generate, prepare, learn, evaluate or save, under --max-restarts (which goes on by itself) or
without (the command is given again). The points are drawn from the chain's number. By default there
is a chain of one point, and as a drill one of six.

    scripts/slow.sh tests/algos/test_interrupted.py     # 17 more chains, 204 points
"""

from __future__ import annotations

import json
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.algos.programs.interrupted import PHASES, Point
from tests.algos.runs import (
    SCRIPT,
    SMALL,
    finish,
    last_checkpoint,
    log_of,
    numbers_of,
    ranks_of,
    run_ranks,
    start,
    wait_until,
)

PROGRAM = Path(__file__).parent / "programs" / "interrupted.py"
DRILL = 27
CHAINS = range(100, 117)
NUM_POINTS = dict.fromkeys(CHAINS, 2 * len(PHASES)) | {DRILL: len(PHASES)}
"""No point is more than three steps behind the one before, and SIGTERM lets two seconds pass."""
SETTINGS = (
    *SMALL,
    "save_every=1",
    "eval_every=2",
    "run.start_seconds=300",
)
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGABRT)


def points_of(chain: int) -> list[Point]:
    """Each phase equally often, in any order."""
    draw = random.Random(chain)
    phases = list(PHASES) * (NUM_POINTS[chain] // len(PHASES))
    draw.shuffle(phases)
    found = []
    for phase in phases:
        occurrence = 0 if phase == "start-up" else draw.choice((1, 2))
        seconds = draw.uniform(0, 4) if phase == "start-up" else draw.choice((0, 0.01, 0.1))
        victim = draw.choice(("rank", "rank", "rank", "launcher"))
        number = draw.choice(SIGNALS[:3] if victim == "launcher" else SIGNALS)
        found.append(Point(phase, occurrence, seconds, draw.randrange(2), victim, int(number)))
    return found


def settings_of(chain: int) -> tuple[str, ...]:
    """Of its run."""
    return (*SETTINGS, f"total_steps={4 * NUM_POINTS[chain]}")


def harmed(run_dir: Path, chain: int) -> list[dict[str, Any]]:
    """Carry out a chain; what was hit."""
    draw = random.Random(chain)
    points = run_dir.with_suffix(".points")
    hits = run_dir.with_suffix(".hits")
    points.write_text(json.dumps([vars(point) for point in points_of(chain)]))
    hits.touch()
    status = 1
    for _ in range(NUM_POINTS[chain] + 1):
        before = len(hits.read_text().splitlines())
        restarts = draw.choice((0, 3))
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node=2", f"--max-restarts={restarts}", str(PROGRAM)]
        words = [str(points), str(hits), str(SCRIPT), f"run.dir={run_dir}", *settings_of(chain)]
        status = finish(start([*launcher, *words], log_of(run_dir)))
        wait_until(lambda: ranks_of(run_dir) == [], run_dir)
        if status == 0:
            break
        assert len(hits.read_text().splitlines()) > before, log_of(run_dir).read_text()[-4000:]
    assert status == 0, log_of(run_dir).read_text()[-4000:]
    return [json.loads(line) for line in hits.read_text().splitlines()]


Undisturbed = Callable[[int], Path]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """RUN_DIR of a chain's run that is left alone."""

    @cache
    def run(settings: tuple[str, ...]) -> Path:
        run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
        run_ranks(run_dir, *settings, num_ranks=2, small=())
        return run_dir

    return lambda chain: run(settings_of(chain))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "chain",
    [
        pytest.param(DRILL, marks=pytest.mark.drill),
        *(pytest.param(chain, marks=pytest.mark.slow) for chain in CHAINS),
    ],
)
def test_a_run_harmed_again_and_again_anywhere_ends_in_the_same_bits(
    chain: int, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"

    hits = harmed(run_dir, chain)
    alone = undisturbed(chain)

    print(f"\nchain {chain}:", dict(Counter(hit["reached"] for hit in hits)), end=" ")
    print("restarted:", sum(hit["attempt"] > 0 for hit in hits))
    assert len(hits) == NUM_POINTS[chain]
    assert last_checkpoint(run_dir) == last_checkpoint(alone)
    assert numbers_of(run_dir) == numbers_of(alone)


def test_the_points_of_all_chains_cover_each_phase() -> None:
    drawn = Counter(point.phase for chain in CHAINS for point in points_of(chain))

    assert sum(drawn.values()) >= 200
    assert min(drawn[phase] for phase in PHASES) >= 15
