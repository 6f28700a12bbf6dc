"""Models by name on four ranks: a hub on the loopback device counts what a node downloads."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.algos.runs import ROOT, SMALL, finish, log_of, start, steps_of
from tests.distributed.drill import TORCHRUN
from tests.hub import COMMIT, PATIENT, files_of, serve

pytestmark = pytest.mark.drill

SETTINGS = [word for word in SMALL if not word.startswith(("critic", "advantage"))]


REWARD = """\
def score(prompt, response, row):
    return float(row["source"] == "local")
"""


def test_four_ranks_of_a_node_download_a_model_and_a_data_set_once(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    model = files_of(ROOT / "algos" / "arithmetic" / "model")
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    words = [*TORCHRUN, "--standalone", "--nproc-per-node=4", "-m", "spmdflow.run"]
    words += [str(ROOT / "algos" / "grpo.py"), *SETTINGS, f"run.dir={run_dir}"]
    words += ["actor.model.path=org/tiny", "total_steps=2", "eval_every=0", "save_every=1"]
    words += ["data.train_path={named: 'org/sums:train', local: 3 * algos/arithmetic/eval.jsonl}"]
    words += [f"reward.function={reward}:score"]
    sums = {"train.jsonl": (ROOT / "algos" / "arithmetic" / "train.jsonl").read_bytes()}
    hub_has = {
        "models/org/tiny": model | {"pytorch_model.bin": b"twice"},
        "datasets/org/sums": sums,
    }
    with serve(hub_has) as hub:
        variables = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        status = finish(start(words, log_of(run_dir), variables | PATIENT), seconds=840)

    assert status == 0, log_of(run_dir).read_text()[-3000:]
    fetched = {name: count for name, count in hub.asked.items() if name.startswith("GET")}
    names = [f"models/org/tiny/{name}" for name in model] + ["datasets/org/sums/train.jsonl"]
    assert fetched == {f"GET {name}": 1 for name in names}
    assert hub.asked["revision models/org/tiny"] == hub.asked["revision datasets/org/sums"] == 1
    written = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert written["actor"]["model"]["path"] == f"org/tiny@{COMMIT}"
    assert written["data"]["train_path"]["named"] == f"org/sums:train@{COMMIT}"
    for step in steps_of(run_dir):
        drawn = [step["data/named"], step["data/local"]]
        assert sum(drawn) == 16 and drawn[1] > drawn[0] > 0
        assert step["reward/mean"] == pytest.approx(drawn[1] / 16)  # each row knows its source
