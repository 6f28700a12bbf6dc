"""torchrun without its own messages: `python -m spmdflow.torchrun RUN_DIR TORCHRUN-ARGUMENTS`.

`spmdflow run` becomes this program after its checks (see `start`). It starts torchrun's agent in
this process. The ranks print what happens, and a rank that could not is reported here in one line.

Exit codes: that of the rank that failed first (1 failed, 2 settings rejected, 3 stopped after a
checkpoint); 3 too if a signal stopped the run and it was saved; 1 for everything else.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from spmdflow.tracking.reading import RunFiles, RunState

FINISHED = 0
FAILED = 1
STOPPED = 3
_CODES_OF_RANKS = (FAILED, 2, STOPPED)


def main(words: Sequence[str] | None = None) -> int:
    """Start the ranks, wait for their end, and return the exit code.

    words: RUN_DIR, then torchrun's arguments; default: sys.argv.
    """
    run_dir, *arguments = sys.argv[1:] if words is None else words
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun does it too, with six lines
    logging.disable(logging.CRITICAL)  # of this process only

    try:
        run(parse_args(arguments))
    except ChildFailedError as err:
        return _code_of_ranks(err)
    except SignalException as err:
        return _code_after_signal(err.sigval, Path(run_dir))
    except Exception as err:  # the rendezvous: an address that is taken, a node that does not come
        cause = ": ".join(text for text in (type(err).__name__, str(err)) if text)
        sys.stderr.write(
            f"spmdflow: torchrun cannot start the ranks ({cause}); check that all nodes are there, "
            f"and the addresses and ports in: {' '.join(arguments)}\n"
        )
        return FAILED
    return FINISHED


def _code_of_ranks(err: ChildFailedError) -> int:
    """Return the exit code of the rank that failed first; report a rank that was killed."""
    rank, failure = err.get_first_failure()
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        sys.stderr.write(
            f"spmdflow: rank {rank} was killed by {name}; the run failed (SIGKILL often means that "
            f"the machine had no memory left)\n"
        )
    return failure.exitcode if failure.exitcode in _CODES_OF_RANKS else FAILED


def _code_after_signal(number: int, run_dir: Path) -> int:
    """Return the exit code after a signal that torchrun passed on to the ranks."""
    state = RunFiles(run_dir).run_state
    if state is RunState.FINISHED:
        return FINISHED
    if state is RunState.STOPPED:
        return STOPPED
    name = signal.Signals(number).name
    sys.stderr.write(f"spmdflow: ended by {name}; of the run in {run_dir}: {state.value}\n")
    return FAILED


if __name__ == "__main__":
    sys.exit(main())
