"""The page for Prometheus of a flow in this process: it follows the steps and ends no run."""

from __future__ import annotations

import logging
import socket
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spmdflow.config.schema import RunConfig
from spmdflow.controller.metrics_page import URL_FILE, MetricsPage
from spmdflow.controller.observer import StepRecord
from spmdflow.tracking.tracker import Tracker
from tests.unit import toy_flow

pytest.importorskip("prometheus_client", reason="extra prometheus is not installed")

TOKENS = {"rollout/prompt_tokens": 30.0, "rollout/response_tokens": 12.0}


@contextmanager
def page_of_toy_flow(run_dir: Path, *, port: int = 0) -> Iterator[MetricsPage]:
    """A page that is attached to a flow, as a run attaches it."""
    page = MetricsPage(RunConfig(dir=str(run_dir), metrics_port=port), run_dir, restarts=0)
    with toy_flow.rank_of_one(run_dir) as rank:
        page.attach(rank.flow)
        try:
            yield page
        finally:
            page.close()


def end_step(page: MetricsPage, number: int, **metrics: float) -> None:
    page.end_step(StepRecord(number, [], [], TOKENS | metrics, Counter(), Counter()))


def scrape(run_dir: Path) -> list[str]:
    """The samples of the page, without its comments."""
    url = (run_dir / URL_FILE).read_text().strip()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    return [line for line in lines if not line.startswith("#")]


def test_scrape_has_the_last_finished_step_and_the_tokens_of_all(tmp_path: Path) -> None:
    run_dir = tmp_path / "mine"
    with page_of_toy_flow(run_dir) as page:
        page.begin_steps(1, 9)
        end_step(page, 1, reward=0.5)
        end_step(page, 2, reward=0.75)

        lines = scrape(run_dir)

    assert 'spmdflow_step{run="mine"} 2.0' in lines
    assert 'spmdflow_steps{run="mine"} 9.0' in lines
    assert 'spmdflow_metric{key="reward",run="mine"} 0.75' in lines
    assert 'spmdflow_trained_tokens_total{run="mine"} 84.0' in lines
    assert not any(line.startswith("spmdflow_queue_rows") for line in lines)


def test_run_that_continues_counts_the_tokens_of_its_earlier_steps(tmp_path: Path) -> None:
    with page_of_toy_flow(tmp_path) as page:
        tracker = Tracker(tmp_path)
        tracker.write_metrics(1, TOKENS)
        tracker.write_metrics(2, TOKENS | {"rollout/response_tokens": float("nan")})
        page.begin_steps(3, 9)
        end_step(page, 3)

        lines = scrape(tmp_path)

    assert f'spmdflow_trained_tokens_total{{run="{tmp_path.name}"}} {42 + 30 + 42}.0' in lines


def test_closed_page_leaves_no_address_and_no_port(tmp_path: Path) -> None:
    with page_of_toy_flow(tmp_path):
        url = (tmp_path / URL_FILE).read_text()
        port = int(url.partition("127.0.0.1:")[2].partition("/")[0])

    assert not (tmp_path / URL_FILE).exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=60)


def test_port_that_was_taken_meanwhile_is_a_warning_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with caplog.at_level(logging.WARNING), page_of_toy_flow(tmp_path, port=port) as page:
            page.begin_steps(1, 2)
            end_step(page, 1)

    (message,) = caplog.messages
    assert message.startswith("warning: the run goes on without its metrics page: run.metrics_port")
    assert f"got {port} on 127.0.0.1 (Address already in use)" in message
    assert not (tmp_path / URL_FILE).exists()


def test_library_that_is_gone_is_a_warning_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with caplog.at_level(logging.WARNING), page_of_toy_flow(tmp_path) as page:
        end_step(page, 1)

    (message,) = caplog.messages
    assert message.startswith("warning: the run goes on without its metrics page: ")
    assert "prometheus_client" in message
