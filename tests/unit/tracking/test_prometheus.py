"""The page for Prometheus, read back by prometheus_client's own parser."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from spmdflow.tracking.prometheus import MAX_STATUS_BYTES, LastStep, RunFacts, page_text
from spmdflow.tracking.servers import ServerRecord, write_servers

parser = pytest.importorskip("prometheus_client.parser", reason="extra prometheus")

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
METRICS = {
    "reward/mean": 0.25,
    "time/step_seconds": 3.5,
    "rollout/age": 0.75,
    "rollout/age_max": 2.0,
    "rollout/weights_version": 6.0,
    'odd "name"\\\n': 1.0,
    "actor/loss": math.nan,
    "actor/kl": -math.inf,
}
STEP = LastStep.of(7, METRICS, ended_at=1790000100.0, queue_rows=32)
FACTS = RunFacts("my run", 1790000000.5, restarts=1, total_steps=40, tokens=2000, last_step=STEP)
BARE = RunFacts("my run", 1790000000.5, total_steps=40)


def read_page(run_dir: Path, facts: RunFacts) -> Samples:
    """(name, labels besides run) -> value of every sample; each has the label of the run."""
    samples: Samples = {}
    for family in parser.text_string_to_metric_families(page_text(run_dir, facts).decode()):
        assert family.documentation and family.type in ("gauge", "counter"), family
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("run") == facts.run
            key = (sample.name, frozenset(labels.items()))
            assert key not in samples, "Prometheus rejects a page that has a sample twice"
            samples[key] = sample.value
    return samples


def sample(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


def test_run_without_a_finished_step_has_its_start_and_its_length(tmp_path: Path) -> None:
    assert read_page(tmp_path, BARE) == {
        sample("spmdflow_start_timestamp_seconds"): 1790000000.5,
        sample("spmdflow_restarts_total"): 0.0,
        sample("spmdflow_steps"): 40.0,
    }


def test_last_step_has_its_numbers_and_one_gauge_for_each_metric_that_is_finite(
    tmp_path: Path,
) -> None:
    assert read_page(tmp_path, FACTS) == {
        sample("spmdflow_start_timestamp_seconds"): 1790000000.5,
        sample("spmdflow_restarts_total"): 1.0,
        sample("spmdflow_steps"): 40.0,
        sample("spmdflow_trained_tokens_total"): 2000.0,
        sample("spmdflow_step"): 7.0,
        sample("spmdflow_step_end_timestamp_seconds"): 1790000100.0,
        sample("spmdflow_queue_rows"): 32.0,
        sample("spmdflow_step_seconds"): 3.5,
        sample("spmdflow_token_age_mean"): 0.75,
        sample("spmdflow_token_age_max"): 2.0,
        sample("spmdflow_weights_version"): 6.0,
        sample("spmdflow_metric", key="reward/mean"): 0.25,
        sample("spmdflow_metric", key="time/step_seconds"): 3.5,
        sample("spmdflow_metric", key="rollout/age"): 0.75,
        sample("spmdflow_metric", key="rollout/age_max"): 2.0,
        sample("spmdflow_metric", key="rollout/weights_version"): 6.0,
        sample("spmdflow_metric", key='odd "name"\\\n'): 1.0,
    }


def test_script_without_a_queue_or_generator_has_no_such_samples(tmp_path: Path) -> None:
    step = LastStep.of(2, {"actor/loss": 1.5}, ended_at=3.0, queue_rows=None)

    names = {name for name, _ in read_page(tmp_path, replace(BARE, last_step=step))}

    assert {"spmdflow_step", "spmdflow_metric"} <= names
    assert not names & {
        "spmdflow_queue_rows",
        "spmdflow_token_age_mean",
        "spmdflow_weights_version",
        "spmdflow_trained_tokens_total",
        "spmdflow_step_seconds",
    }


def test_record_of_a_step_is_a_copy_that_later_changes_do_not_reach() -> None:
    metrics = {"reward/mean": 1.0}

    step = LastStep.of(1, metrics, ended_at=0.0, queue_rows=None)
    metrics["reward/mean"] = 2.0

    assert dict(step.metrics) == {"reward/mean": 1.0}


def test_status_of_a_live_run_has_its_ranks_and_the_calls_that_run(tmp_path: Path) -> None:
    status = {
        "written": 1790000200.0,
        "controller": 0,
        "ranks": {"0": [11, 5, "node", 0.0], "1": [12, 5, "node", 2.5]},
        "open": [
            ["actor.update_actor", "train", 4.5, 2],
            ["actor.update_actor", "train", 9.0, 1],
            ["actor.generate_sequences", "eval", 0.0, 2],
        ],
    }
    (tmp_path / "status.json").write_text(json.dumps(status))

    samples = read_page(tmp_path, BARE)

    assert samples[sample("spmdflow_ranks")] == 2.0
    assert samples[sample("spmdflow_rank_silent_seconds", rank="1")] == 2.5
    call = "spmdflow_open_call_seconds"
    assert samples[sample(call, call="actor.update_actor", phase="train")] == 9.0
    assert samples[sample(call, call="actor.generate_sequences", phase="eval")] == 0.0
    assert samples[sample("spmdflow_status_timestamp_seconds")] == 1790000200.0
    assert len(samples) == len(read_page(tmp_path / "none", BARE)) + 6


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[" * 100_000,
        "null",
        '{"written": 1.0',
        '{"written": "soon", "ranks": [0], "open": 3}',
        '{"written": NaN, "open": [[], "x", ["a.b", "train", "long"], ["a.b", "train", null]]}',
        '{"planning": "placement"}',
        '{"written": 5.0}' + " " * MAX_STATUS_BYTES,
    ],
)
def test_damaged_status_leaves_the_other_samples(tmp_path: Path, text: str) -> None:
    (tmp_path / "status.json").write_text(text)

    assert read_page(tmp_path, FACTS) == read_page(tmp_path / "none", FACTS)


def test_servers_have_their_state_versions_and_counters_by_rank(tmp_path: Path) -> None:
    one = ServerRecord("http://a:1", "ready", 12, 1, 5, 91000, 17)
    other = ServerRecord("http://b:1", "dead", 11, reason="refused")
    write_servers(tmp_path, 2, [one, other])
    (tmp_path / "servers" / "rank-3.json").write_text("torn")

    samples = read_page(tmp_path, BARE)

    at_a = {"rank": "2", "server": "http://a:1"}
    at_b = {"rank": "2", "server": "http://b:1"}
    states = {}
    for (name, labels), value in samples.items():
        if name == "spmdflow_server_state":
            states[dict(labels)["server"], dict(labels)["state"]] = value
    assert [key for key, value in states.items() if value == 1.0] == [
        ("http://a:1", "ready"),
        ("http://b:1", "dead"),
    ]
    assert len(states) == 12 and sum(states.values()) == 2.0
    assert samples[sample("spmdflow_server_weights_version", **at_a)] == 12.0
    assert samples[sample("spmdflow_server_weights_version", **at_b)] == 11.0
    assert samples[sample("spmdflow_server_running_rows", **at_a)] == 5.0
    assert samples[sample("spmdflow_server_restarts_total", **at_a)] == 1.0
    assert samples[sample("spmdflow_server_tokens_total", **at_a)] == 91000.0
    assert samples[sample("spmdflow_server_recomputed_tokens_total", **at_a)] == 17.0
    assert samples[sample("spmdflow_server_report_timestamp_seconds", **at_b)] > 1.7e9


def test_names_that_utf8_cannot_encode_are_on_the_page_with_a_question_mark(
    tmp_path: Path,
) -> None:
    step = LastStep.of(1, {"half \ud800": 1.0}, ended_at=0.0, queue_rows=None)
    facts = replace(BARE, last_step=step)
    (tmp_path / "status.json").write_text('{"open": [["a.\\udfff", "train", 1.0, 1]]}')

    samples = read_page(tmp_path, facts)

    assert samples[sample("spmdflow_metric", key="half ?")] == 1.0
    assert samples[sample("spmdflow_open_call_seconds", call="a.?", phase="train")] == 1.0
    assert b'run="odd ?"' in page_text(tmp_path, replace(BARE, run="odd \udc80"))


def test_server_that_a_rank_reports_twice_is_on_the_page_once(tmp_path: Path) -> None:
    record = ServerRecord("http://a:1", "ready", 1)
    write_servers(tmp_path, 0, [record, replace(record, weights_version=2)])

    samples = read_page(tmp_path, BARE)

    labels = {"rank": "0", "server": "http://a:1"}
    assert samples[sample("spmdflow_server_weights_version", **labels)] == 2.0


def test_every_name_of_the_page_is_in_the_documentation(tmp_path: Path) -> None:
    write_servers(tmp_path, 0, [ServerRecord("http://a:1", "ready")])
    status = {"written": 1.0, "ranks": {"0": [0.0]}, "open": [["a.b", "train", 1.0, 1]]}
    (tmp_path / "status.json").write_text(json.dumps(status))
    page = (Path(__file__).parents[3] / "docs" / "TRACKERS.md").read_text()

    names = {name for name, _ in read_page(tmp_path, FACTS)}

    assert len(names) == 23
    assert [name for name in sorted(names) if f"| `{name}" not in page] == []
