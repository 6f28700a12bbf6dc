"""Models by name on four ranks: a hub on the loopback device counts what a node downloads."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.algos.runs import ROOT, SMALL, finish, log_of, start, steps_of
from tests.distributed.drill import TORCHRUN
from tests.hub import COMMIT, files_of, serve

SETTINGS = [word for word in SMALL if not word.startswith(("critic", "advantage"))]


def test_four_ranks_of_a_node_download_a_model_once(tmp_path: Path) -> None:
    run_dir, model = tmp_path / "run", files_of(ROOT / "algos" / "arithmetic" / "model")
    words = [*TORCHRUN, "--standalone", "--nproc-per-node=4", "-m", "spmdflow.run"]
    words += [str(ROOT / "algos" / "grpo.py"), *SETTINGS, f"run.dir={run_dir}"]
    words += ["actor.model.path=org/tiny", "total_steps=1", "eval_every=0"]
    with serve({"models/org/tiny": model | {"pytorch_model.bin": b"twice"}}) as hub:
        variables = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        status = finish(start(words, log_of(run_dir), variables), seconds=120)

    assert status == 0, log_of(run_dir).read_text()[-3000:]
    fetched = {name: count for name, count in hub.asked.items() if name.startswith("GET")}
    assert fetched == {f"GET models/org/tiny/{name}": 1 for name in model}
    assert hub.asked["revision models/org/tiny"] == 1
    assert len(steps_of(run_dir)) == 1
    written = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert written["actor"]["model"]["path"] == f"org/tiny@{COMMIT}"
