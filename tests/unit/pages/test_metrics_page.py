"""docs/METRICS.md names every metric that the code writes, and every word of the step's line."""

from __future__ import annotations

import re
from pathlib import Path

from spmdflow.tracking.progress import FIELDS
from tests.metrics_page import PAGE, unknown_metrics

ROOT = Path(__file__).parents[3]
PREFIXES = (
    "reward|eval|actor|critic|rollout|publish|time|perf|transfer|controller|sampling|advantage|"
    "guards"
)
INNER = {
    "actor/ratio_square",
    "critic/return_square",
    "critic/error_square",
    "critic/error_mean",
}
"""Sums from which a role makes the metrics that it reports."""


def test_every_metric_that_the_code_names_is_on_the_page() -> None:
    written = set()
    for folder in (
        "objectives",
        "models",
        "hybrid_engine",
        "serving",
        "rewards",
        "controller",
        "workers",
    ):
        for file in (ROOT / "spmdflow" / folder).glob("*.py"):
            written |= set(re.findall(rf'"((?:{PREFIXES})/[a-z_@]+)"', file.read_text()))
    written -= INNER | {"eval/sampled"}

    assert len(written) > 40
    assert unknown_metrics(written, exactly=True) == []


def test_every_word_of_the_line_is_explained() -> None:
    for name, label, _ in FIELDS:
        assert re.search(rf"^\| `{label}` \| .*`{name}`", PAGE.read_text(), re.M), label


def test_metric_that_nobody_describes_is_found() -> None:
    assert unknown_metrics({"actor/loss", "actor/nonsense"}) == ["actor/nonsense"]
