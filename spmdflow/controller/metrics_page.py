"""`MetricsPage`: hands the records of a run to its page for Prometheus (run.metrics_port).

The page is served by a thread of its own (tracking/scrape.py). The script's thread hands it
immutable records and never waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import replace
from pathlib import Path

from spmdflow.config.schema import RunConfig
from spmdflow.controller.observer import ObservedFlow, Observer, StepRecord
from spmdflow.controller.queue import RolloutQueue
from spmdflow.tracking.prometheus import LastStep, RunFacts, import_library, page_text, step_tokens
from spmdflow.tracking.scrape import ScrapeServer, address_problem
from spmdflow.tracking.tracker import METRICS, read_lines

logger = logging.getLogger(__name__)

URL_FILE = "metrics-url"
"""In RUN_DIR while the page is served: its address."""


class MetricsPage(Observer):
    """Serves the page while the run lives. If it cannot, the run goes on without it, and warns."""

    def __init__(self, run: RunConfig, run_dir: Path, *, restarts: int) -> None:
        """restarts: by torchrun, in this launch."""
        self._run = run
        self._run_dir = run_dir
        self._facts = RunFacts(run_dir.name, time.time(), restarts=restarts)
        self._server: ScrapeServer | None = None
        self._flow: ObservedFlow | None = None

    def attach(self, flow: ObservedFlow) -> None:
        """Start to serve the page."""
        self._flow = flow
        port = self._run.metrics_port
        assert port is not None
        address = self._run.metrics_address
        try:
            import_library()
            self._server = ScrapeServer(address, port, self._write_text)
        except OSError as err:
            problem = address_problem(err, address=address, port=port)
            logger.warning("warning: the run goes on without its metrics page: %s", problem)
            return
        except ImportError as err:
            logger.warning("warning: the run goes on without its metrics page: %s", err)
            return
        with contextlib.suppress(OSError):  # the log has the address too
            (self._run_dir / URL_FILE).write_text(self._server.url + "\n", encoding="utf-8")
        logger.info("metrics page: %s", self._server.url)

    def begin_steps(self, first: int, last: int) -> None:
        """Count the tokens of the steps before the first one, from metrics.jsonl."""
        tokens = 0
        for record in read_lines(self._run_dir / METRICS):
            tokens += step_tokens(record)
        self._facts = replace(self._facts, total_steps=last, tokens=tokens)

    def end_step(self, step: StepRecord) -> None:
        """Hand over the records of a step."""
        record = LastStep.of(
            step.number, step.metrics, ended_at=time.time(), queue_rows=self._num_queue_rows()
        )
        tokens = self._facts.tokens + step_tokens(record.metrics)
        self._facts = replace(self._facts, tokens=tokens, last_step=record)

    def close(self) -> None:
        """Stop serving the page."""
        if self._server is not None:
            self._server.close()
            with contextlib.suppress(OSError):
                (self._run_dir / URL_FILE).unlink(missing_ok=True)

    def _write_text(self) -> bytes:
        """Return the page; called by the thread that serves it."""
        return page_text(self._run_dir, self._facts)

    def _num_queue_rows(self) -> int | None:
        """Return the rows of later steps that are begun, over all queues; None without a queue."""
        assert self._flow is not None
        queues = []
        for thing in self._flow.kept.values():
            if isinstance(thing, RolloutQueue):
                queues.append(thing.num_begun_rows)
        if queues:
            return sum(queues)
        return None
