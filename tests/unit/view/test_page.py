"""`python -m spmdflow.view`: the page's elements and the data in them.

Slow: what a headless Chromium makes of it, if one is installed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from spmdflow.checkpoint.lock import claim_run_dir
from spmdflow.tracking.progress import Sample
from spmdflow.tracking.servers import ServerRecord, write_servers
from spmdflow.tracking.trace import Span, TraceWriter
from spmdflow.tracking.tracker import Tracker
from spmdflow.view import content
from spmdflow.view.__main__ import main
from tests.unit.view.page import Page

EVIL = "</script><img src=x onerror=alert(1)><!--<script>{{parts}}&amp;"


BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)


def page_of(*run_dirs: Path, words: tuple[str, ...] = ()) -> Page:
    assert main([*map(str, run_dirs), *words]) == 0
    return Page(run_dirs[0] / "view.html")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of three steps, as it writes itself."""
    folder = tmp_path / "one"
    tracker = Tracker(folder)
    trace = TraceWriter(folder / "trace.json")
    for step in range(1, 4):
        tracker.write_metrics(step, {"reward/mean": step / 4, "x": float("nan")})
        facts = {"phase": "train", "group": 0, "advantage": 1.5}
        facts |= {"lengths": [len(EVIL), 0], "log_probs": [0, -0.5]}
        facts |= {"calls": [[["add", '{"a": 1}']]]}
        tracker.write_samples(step, [Sample("1+1=", EVIL, 1.0, {"accuracy": 1.0}, facts)])
        spans = [
            Span(rank, "compute", "actor.update_actor", 100.0 + step, 100.5 + step, step, 0, 2**30)
            for rank in (0, 1)
        ]
        trace.write([*spans, Span(1, "transfer", "transfer 1 of a.b", 100.1, 100.2, step, 4096)])
    (folder / "config.yaml").write_text("run:\n  seed: 0\nactor:\n  optimizer:\n    lr: 0.1\n")
    prediction = {"stages": [{"stage": "step", "predicted": 1.0, "measured": 2.0}]}
    (folder / "prediction.json").write_text(json.dumps(prediction))
    return folder


def test_page_holds_curves_samples_timeline_settings_and_prediction(run_dir: Path) -> None:
    page = page_of(run_dir)

    (run,) = page.runs
    assert run["steps"] == [1, 2, 3] and run["missing"] == []
    assert run["metrics"] == {"reward/mean": [0.25, 0.5, 0.75], "x": [None] * 3}
    (sample,) = page.samples(run, 2)
    assert sample["score"] == 1.0 and sample["log_probs"] == [0, -0.5]
    assert page.part(run["spans"]["3"])["3"] == [
        [0, "compute", "actor.update_actor", 2.9, 3.4, 0, 2**30],
        [1, "compute", "actor.update_actor", 2.9, 3.4, 0, 2**30],
        [1, "transfer", "transfer 1 of a.b", 0.0, 0.1, 4096, 0],
    ]
    assert run["settings"] == {"run.seed": "0", "actor.optimizer.lr": "0.1"}
    assert run["prediction"]["stages"][0]["measured"] == 2.0


def test_page_holds_the_servers_that_ranks_report(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert page_of(run_dir).runs[0]["servers"] == []
    one = ServerRecord("http://a:1", "ready", 12, 1, 5, 91000, 17)
    other = ServerRecord(EVIL, "dead", 11, reason=EVIL)
    write_servers(run_dir, 2, [one, other])

    (run,) = page_of(run_dir).runs

    reported_at = run["servers"][0][-1]
    assert run["servers"] == [
        ["http://a:1", "ready", 12, 5, 1, 17, "", 2, reported_at],
        [EVIL, "dead", 11, 0, 0, 0, EVIL, 2, reported_at],
    ]
    monkeypatch.setattr(content, "MOST_SERVERS", 1)
    (run,) = page_of(run_dir).runs
    assert len(run["servers"]) == 1 and run["notes"] == ["servers: 1 of 2 are shown"]


def test_text_of_a_model_is_data_and_never_markup(run_dir: Path) -> None:
    (run_dir / "failure.json").write_text(json.dumps({"cause": EVIL}))
    (run_dir / "stacks-rank0.txt").write_text(EVIL)
    plain = [tag for tag, _ in page_of(run_dir).tags]
    worse = run_dir.rename(run_dir.with_name("<script>"))

    page = page_of(worse)

    assert [tag for tag, _ in page.tags] == plain and "img" not in plain
    assert page.samples(page.runs[0], 1)[0]["response"] == EVIL
    assert page.runs[0]["failures"]["failure.json"]["cause"] == EVIL
    assert page.runs[0]["stacks"] == {"stacks-rank0.txt": EVIL}


def test_page_asks_no_server(run_dir: Path) -> None:
    page = page_of(run_dir)

    names = {name for _, attributes in page.tags for name in attributes}
    assert not names & {"src", "href", "srcset", "action", "data"}
    policy = [attributes.get("content") or "" for tag, attributes in page.tags if tag == "meta"]
    assert any("default-src 'none'" in text for text in policy)
    assert "plotly.js" in page.part("plotly")[:100], "its script is in the page"


def test_run_of_an_earlier_layout_is_shown_and_what_it_lacks_is_named(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    (old / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 1.0}\n{"step": 2, "rew')
    (old / "samples.jsonl").write_text('{"step": 1, "prompt": "a", "response": "b", "score": 0}\n')
    event = {"name": "actor.spawn", "ph": "X", "ts": 5, "dur": 10, "pid": 0, "tid": 0}
    (old / "trace.json").write_text("[\n" + json.dumps(event) + ',\n{"name": "torn')

    page = page_of(old)

    (run,) = page.runs
    assert run["missing"] == ["config.yaml", "prediction.json"]
    assert run["steps"] == [1] and page.samples(run, 1)[0]["response"] == "b"
    assert page.part(run["spans"]["0"]) == {"0": [[0, "", "actor.spawn", 0.0, 1e-05, 0, 0]]}


def test_runs_are_shown_together_with_their_own_settings(run_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "two"
    Tracker(other).write_metrics(1, {"reward/mean": 1.0})
    (other / "config.yaml").write_text("run:\n  seed: 1\n")

    page = page_of(run_dir, other)

    assert [run["name"] for run in page.runs] == ["one", "two"]
    assert [run["settings"]["run.seed"] for run in page.runs] == ["0", "1"]
    table = json.loads(page.texts["summary"])["table"]
    assert table == {"settings": ["run.seed", "actor.optimizer.lr"], "metrics": ["reward/mean"]}


def test_long_run_is_thinned_in_whole_steps_and_says_so(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "MOST_SAMPLES", 2)
    monkeypatch.setattr(content, "MOST_STEPS", 2)

    (run,) = page_of(run_dir).runs

    assert list(run["samples"]) == ["1", "3"] and run["steps"] == [1, 3]
    assert run["notes"] == [
        "samples.jsonl: 2 of 3 steps are shown (2 of 3 lines)",
        "metrics.jsonl: every 2th of 3 steps is shown",
    ]


def test_page_of_a_live_run_loads_itself_again_until_the_run_has_ended(run_dir: Path) -> None:
    page = run_dir / "view.html"
    lock = claim_run_dir(run_dir)
    words = [str(run_dir), "--follow", "--every", "0.05"]
    following = threading.Thread(target=main, args=(words,), daemon=True)
    following.start()
    until = time.monotonic() + 300
    while not page.exists() and time.monotonic() < until:
        time.sleep(0.01)
    first = json.loads(Page(page).texts["summary"])

    Tracker(run_dir, last_step=3).write_metrics(4, {"reward/mean": 1.0})
    lock.release()
    following.join(300)

    last = json.loads(Page(page).texts["summary"])
    assert (first["refresh"], first["runs"][0]["live"]) == (0.05, True)
    assert (last["refresh"], last["runs"][0]["live"]) == (0, False)
    assert last["runs"][0]["steps"] == [1, 2, 3, 4] and not following.is_alive()


def test_folder_without_a_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2

    error = capsys.readouterr().err
    assert "got none of config.yaml, metrics.jsonl" in error and "give the folder" in error
    assert list(tmp_path.iterdir()) == []


def test_without_plotly_the_command_says_what_to_install(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)

    assert main([str(run_dir)]) == 2

    error = capsys.readouterr().err
    assert error.startswith("view: got no plotly (") and "pip install 'plotly>=" in error
    assert not (run_dir / "view.html").exists()


def shown_by_browser(page: Path, view: str, folder: Path) -> str:
    """What stands in a view, once its scripts have run for some seconds."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=8000"]
    words = [str(BROWSER), *flags, f"--user-data-dir={folder}/profile", "--dump-dom"]
    words.append(f"{page.as_uri()}#view={view}")
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    shown = done.stdout.partition("<main")[2].partition("</main>")[0]
    assert shown, done.stderr
    return shown


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(BROWSERS)} is installed")
@pytest.mark.parametrize(
    ("view", "texts"),
    [
        ("metrics", ["reward/mean", 'class="sketch"', '<path class="curve" d="M', "<circle"]),
        (
            "samples",
            ["+1.5", "1+1=", "mean log-prob -0.25", "&lt;img src=x", ': calls add({"a": 1})'],
        ),
        ("timeline", ["rank 1 transfer", "4.1 kB", "actor.update_actor", "main-svg"]),
        ("prediction", ["predicted / measured", "0.5"]),
        ("servers", ["http://a:1", "&lt;img src=x", ">dead<", "recomputed tokens"]),
        ("failures", ["no judge", "the stacks of rank 0"]),
        ("", ["no judge"]),  # where a failed run's page opens
        ("settings", ["actor.optimizer.lr", "0.1"]),
    ],
)
def test_browser_shows_what_the_run_wrote(
    run_dir: Path, tmp_path: Path, view: str, texts: list[str]
) -> None:
    (run_dir / "failure.json").write_text('{"rank": 0, "cause": "no judge"}')
    (run_dir / "stacks-rank0.txt").write_text("the stacks of rank 0")
    write_servers(run_dir, 0, [ServerRecord("http://a:1", "dead", reason=EVIL)])
    page_of(run_dir)

    shown = shown_by_browser(run_dir / "view.html", view, tmp_path)

    assert [text for text in texts if text not in shown] == []
    assert "<img" not in shown and not (view == "metrics" and "main-svg" in shown)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(BROWSERS)} is installed")
def test_curve_that_the_pointer_comes_to_is_one_to_zoom_into(run_dir: Path, tmp_path: Path) -> None:
    page_of(run_dir)
    page = run_dir / "view.html"
    come = "document.querySelector('.area').dispatchEvent(new Event('pointerenter'))"
    html = page.read_text().replace(
        "</body>", f"<script>setTimeout(() => {come}, 500)</script></body>"
    )
    page.write_text(html)

    shown = shown_by_browser(page, "metrics", tmp_path)

    assert "main-svg" in shown and "sketch" not in shown
