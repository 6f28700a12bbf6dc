"""Logging of a rank: `[rank 3] HH:MM:SS level text`, one line per event, on stderr.

`print_text` is for the few results that go to standard output.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings

PLANNING = "spmdflow.planning"
"""Logger to which planners tell what they do (`plan.showing`)."""

_CHATTY_MODULES = ("megatron", "vllm", r"torch\.distributed")
"""Libraries that warn on every rank about settings which users of spmdflow cannot change."""
_CHATTY_LOGGERS = ("torch.fx._symbolic_trace", "torch._library.triton")


class _OneLine(logging.Formatter):
    """Joins the lines of a record (a traceback, a wrapped message) with " | "."""

    def format(self, record: logging.LogRecord) -> str:
        return " | ".join(line for line in super().format(record).splitlines() if line.strip())


def print_text(text: str) -> None:
    """Write text to standard output and flush it; OSError if that fails, as on a full disk.

    A reader that has gone (`| head`) is no error: then standard output is redirected to /dev/null,
    which drops this text and all that follow.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # Python writes what it still holds when it ends: that goes nowhere
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def set_up_logging(rank: int, *, level: int = logging.INFO) -> logging.Handler:
    """Send the records of every spmdflow logger to stderr, one line each; return the handler.

    A line starts with "[rank N] HH:MM:SS LEVEL". Calling it again replaces the handler (a second
    run in the same process). Records no longer reach the root logger.
    """
    logger = logging.getLogger("spmdflow")
    for old in [handler for handler in logger.handlers if isinstance(handler.formatter, _OneLine)]:
        logger.removeHandler(old)
    handler = logging.StreamHandler(sys.stderr)
    text = f"[rank {rank}] %(asctime)s %(levelname)s %(message)s"
    handler.setFormatter(_OneLine(text, datefmt="%H:%M:%S"))
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    return handler


def quiet_libraries() -> None:
    """Hide warnings of Megatron, vLLM and torch.distributed, in the whole process.

    They are addressed to developers of these libraries. Also limits two chatty loggers of torch to
    errors.
    """
    for module in _CHATTY_MODULES:
        warnings.filterwarnings("ignore", module=module, category=UserWarning)
        warnings.filterwarnings("ignore", module=module, category=FutureWarning)
    for name in _CHATTY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
