"""Data sets by name and by folder, renamed columns, mixtures: the same rows as from JSONL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from tensordict import TensorDict

from spmdflow.config.check import check
from spmdflow.config.data_source import data_sources
from spmdflow.config.load import load
from spmdflow.config.location import to_yaml
from spmdflow.config.schema import DataConfig
from spmdflow.datasets.scan import PromptSource, ScanReport, scan
from spmdflow.datasets.stream import PromptOrder
from spmdflow.datasets.tokenizer import load_tokenizer
from spmdflow.errors import CheckpointError, ConfigError, DataError
from tests.hub import COMMIT, PATIENT, serve, write_cached

ROOT = Path(__file__).parents[3]
MODEL = str(ROOT / "algos" / "arithmetic" / "model")
SUMS = [
    {"prompt": f"{n}+{n}=", "answer": str(2 * n), "n": n, "share": n / 7, "more": {"a": [n, None]}}
    for n in range(40)
]
OTHERS = [{"question": f"9{n}-1=", "prompt": n, "label": None} for n in range(25)]
README = b"""---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: other
  data_files: other/*
---
"""
NAME = "org/sums:main/train"


def jsonl(path: Path, rows: Sequence[Mapping[str, Any]] = SUMS) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def scanned(setting: Any) -> ScanReport:
    cfg = DataConfig(train_path=setting, tokenizer_path=MODEL)
    return scan(cfg, setting, load_tokenizer(MODEL))


def rows_of(setting: Any, numbers: Sequence[int] | None = None) -> TensorDict:
    """The rows as ranks read them."""
    report = scanned(setting)
    cfg = DataConfig(train_path=setting, tokenizer_path=MODEL)
    source = PromptSource(report.files, cfg)
    return source.read_rows(report.rows.tolist() if numbers is None else numbers)


def plain(batch: TensorDict) -> list[tuple[list[int], str, str]]:
    """(token ids, text, other fields) of each row."""
    ids = [row.tolist() for row in batch["prompts"].unbind()]
    return list(zip(ids, batch["prompt_text"], batch["row"], strict=True))


def parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    target = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(list(rows)), target)
    return target.getvalue().to_pybytes()


def repository() -> dict[str, bytes]:
    """A data set with two shards of sums, two configs."""
    return {
        "README.md": README,
        "main/train-00000-of-00002.parquet": parquet(SUMS[:30]),
        "main/train-00001-of-00002.parquet": parquet(SUMS[30:]),
        "main/test-00000-of-00001.parquet": parquet(SUMS[:3]),
        "other/rows.parquet": parquet(OTHERS),
    }


def settings(*words: str) -> Any:
    return load("ppo.py", None, words).cfg


def test_name_of_the_hub_gives_the_rows_of_the_same_jsonl(cache: Path) -> None:
    folder = write_cached(cache, "datasets/org/sums", repository())

    cfg = settings(f"data.train_path={NAME}", "data.eval_path=org/sums:main/test")
    check(cfg, 4)

    assert cfg.data.train_path == f"{folder}:main/train"
    assert plain(rows_of(cfg.data.train_path)) == plain(rows_of(jsonl(Path("sums.jsonl"))))
    assert plain(rows_of(cfg.data.eval_path)) == plain(rows_of("sums.jsonl"))[:3]
    other = settings("data.train_path=org/sums:other/train(prompt=question, old=prompt)").data
    assert plain(rows_of(other.train_path))[1][1:] == ("91-1=", '{"old": 1, "label": null}')


def test_run_names_data_with_their_commit_and_resumes_with_it(cache: Path) -> None:
    folder = write_cached(cache, "datasets/org/sums", repository())
    words = [f"data.train_path={{a: '2 * {NAME}(prompt=answer, own=prompt)', b: train.jsonl}}"]
    cfg = settings(*words)
    run_dir = Path("runs/ppo")
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text(to_yaml(cfg))
    write_cached(cache, "datasets/org/sums", repository(), commit="f" * 40)

    written = yaml.safe_load(to_yaml(cfg))["data"]["train_path"]["a"]
    assert written == f"2 * {NAME}@{COMMIT}(prompt=answer, own=prompt)"
    assert settings(*words) == cfg
    assert load("ppo.py", run_dir / "config.yaml", []).cfg == cfg
    assert str(folder) not in settings(*words, "run.name=new").data.train_path["a"]
    assert settings(f"data.eval_path={NAME}@main").data.eval_path.endswith(f"{'f' * 40}:main/train")


@pytest.mark.parametrize("missing", ["main/train-00001-of-00002.parquet", "README.md"])
def test_name_that_offline_is_not_whole_is_refused_with_the_command(
    cache: Path, missing: str
) -> None:
    files = repository()
    del files[missing]
    if missing != "README.md":
        write_cached(cache, "datasets/org/sums", files)

    with pytest.raises(ConfigError) as refused:
        settings(f"data.train_path={NAME}")

    assert f"not in the hub's cache {cache} (HF_HUB_OFFLINE is set)" in str(refused.value)
    command = f"hf download org/sums --repo-type dataset --revision {COMMIT} --include "
    command += "'main/train-*' --include 'main/test-*' --include README.md"
    whole = "hf download org/sums --repo-type dataset"
    assert str(refused.value).endswith(whole if missing == "README.md" else command)


def test_download_takes_the_files_of_the_config_alone(cache: Path) -> None:
    code = (
        f"from spmdflow.config.load import load; load('ppo.py', None, ['data.train_path={NAME}'])"
    )
    own = {"PYTHONPATH": str(ROOT), "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "0"}
    with serve({"datasets/org/sums": repository()}) as hub:
        own["HF_ENDPOINT"] = hub.endpoint
        for _ in range(2):
            subprocess.run(
                [sys.executable, "-c", code], env={**os.environ, **own, **PATIENT}, check=True
            )

    fetched = {name: count for name, count in hub.asked.items() if name.startswith("GET")}
    wanted = [name for name in repository() if not name.startswith("other")]
    assert fetched == {f"GET datasets/org/sums/{name}": 1 for name in wanted}
    found = settings(f"data.train_path={NAME}").data.train_path
    assert plain(rows_of(found)) == plain(rows_of(jsonl(Path("sums.jsonl"))))


def test_folders_that_datasets_saved_give_the_rows_of_the_same_jsonl(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_list(SUMS)
    rows.save_to_disk(tmp_path / "saved")
    splits = {"train": rows, "test": rows.select(range(3))}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "splits")
    expected = plain(rows_of(jsonl(tmp_path / "sums.jsonl")))

    assert plain(rows_of(f"{tmp_path}/saved")) == expected
    assert plain(rows_of(f"{tmp_path}/splits:train")) == expected
    assert plain(rows_of(f"{tmp_path}/splits:test")) == expected[:3]
    for wrong, said in (("saved:test", "without splits"), ("splits:dev", "are train, test")):
        with pytest.raises(DataError, match=said):
            rows_of(f"{tmp_path}/{wrong}")


def test_renamed_columns_give_the_rows_of_a_file_with_those_names(tmp_path: Path) -> None:
    renamed = [
        {"old": row["prompt"], "prompt": row["question"], "l": row["label"]} for row in OTHERS
    ]
    renamed = [{name: row[name] for name in ("prompt", "old", "l")} for row in renamed]
    expected = plain(rows_of(jsonl(tmp_path / "new.jsonl", renamed)))

    found = rows_of(
        jsonl(tmp_path / "old.jsonl", OTHERS) + "(prompt=question, old=prompt, l=label)"
    )

    assert plain(found) == expected


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (
            "(prompt=text)",
            "old.jsonl:1 has no column 'text' (it has 'question', 'prompt', 'label')",
        ),
        (
            "(prompt=question)",
            "old.jsonl:1 has 'prompt' in addition to the column that gets this name",
        ),
    ],
)
def test_column_that_cannot_be_renamed_is_refused_with_its_row(
    columns: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as refused:
        rows_of(jsonl(tmp_path / "old.jsonl", OTHERS) + columns)

    assert said in str(refused.value)


@pytest.fixture
def mixture(tmp_path: Path) -> dict[str, str]:
    others = [{"prompt": row["question"], "label": row["label"]} for row in OTHERS]
    jsonl(tmp_path / "a.jsonl"), jsonl(tmp_path / "b.jsonl", others)
    return {"sums": f"3 * {tmp_path}/a.jsonl", "others": f"{tmp_path}/b.jsonl"}


def test_mixture_gives_each_row_of_its_members_once_an_epoch(mixture: dict[str, str]) -> None:
    report = scanned(mixture)
    stream = PromptOrder(report, prompts_per_step=16, seed=5)
    drawn = [number for _ in range(30) for number in stream.next_rows()]
    rows = plain(rows_of(mixture, drawn))
    files = report.file_of(drawn).tolist()

    for place, (name, setting) in enumerate(mixture.items()):
        alone = setting.removeprefix("3 * ")
        numbers = scanned(alone).rows.tolist()
        expected = [
            (ids, text, json.dumps(json.loads(row) | {"source": name}))
            for ids, text, row in plain(rows_of(alone, numbers))
        ]
        given = [row for row, file in zip(rows, files, strict=True) if file == place]
        for start in range(0, len(given) - len(numbers) + 1, len(numbers)):
            epoch = given[start : start + len(numbers)]
            assert sorted(map(repr, epoch)) == sorted(map(repr, expected))
    assert 0.7 < files.count(0) / len(files) < 0.8  # 3 of 4, of 480 draws
    assert "sums 40 (drawn 75%), others 25 (drawn 25%)" in report.describe()


def test_members_of_equal_length_are_permuted_differently_and_whatever_the_others_are(
    tmp_path: Path,
) -> None:
    for name in ("a", "b", "c"):
        jsonl(tmp_path / f"{name}.jsonl")
    settings = {name: f"{tmp_path}/{name}.jsonl" for name in ("a", "b", "c")}

    orders = [_first_epochs(settings), _first_epochs({"c": settings["c"], "a": settings["a"]})]

    assert sorted(orders[0]["a"]) == sorted(orders[0]["b"])  # the same lines
    assert len({tuple(order) for order in orders[0].values()}) == 3
    assert [orders[0][name] for name in ("a", "c")] == [orders[1][name] for name in ("a", "c")]


def _first_epochs(settings: dict[str, str]) -> dict[str, list[int]]:
    """Line numbers within each member, in the order of its first epoch."""
    report = scanned(settings)
    stream = PromptOrder(report, prompts_per_step=8, seed=5)
    drawn: dict[str, list[int]] = {name: [] for name in settings}
    while stream.epoch == 0:
        for number in stream.next_rows():
            file = report.files[report.file_of([number])[0]]
            drawn[file.name].append(number - file.first)
    return {name: numbers[:40] for name, numbers in drawn.items()}


def test_mixture_saved_before_members_had_orders_of_their_own_goes_on_in_its_order(
    mixture: dict[str, str],
) -> None:
    report = scanned(mixture)
    started = PromptOrder(report, prompts_per_step=7, seed=0)
    old = started.state_dict()
    del old["has_own_orders"]
    resumed = PromptOrder(report, prompts_per_step=7, seed=0)
    resumed.load_state_dict(old)
    rows = [resumed.next_rows() for _ in range(4)]

    again = PromptOrder(report, prompts_per_step=7, seed=0)
    again.load_state_dict(json.loads(json.dumps(resumed.state_dict())))

    assert rows != [started.next_rows() for _ in range(4)]
    alone = PromptOrder(
        scanned(f"{mixture['sums'].removeprefix('3 * ')}"), prompts_per_step=1, seed=0
    )
    of_first = [number for step in rows for number in step if report.file_of([number])[0] == 0]
    assert of_first == [alone.next_rows()[0] for _ in of_first]
    assert again.next_rows() == resumed.next_rows()


def test_mixture_that_resumes_goes_on_with_the_same_rows(mixture: dict[str, str]) -> None:
    report = scanned(mixture)
    whole = PromptOrder(report, prompts_per_step=7, seed=0)
    for _ in range(11):
        whole.next_rows()
    state = json.loads(json.dumps(whole.state_dict()))

    resumed = PromptOrder(report, prompts_per_step=7, seed=0)
    resumed.load_state_dict(state)

    assert [whole.next_rows() for _ in range(40)] == [resumed.next_rows() for _ in range(40)]
    assert whole.epoch > 2
    other = PromptOrder(
        scanned(mixture | {"others": "2 * " + mixture["others"]}), prompts_per_step=7, seed=0
    )
    with pytest.raises(CheckpointError, match="with weights"):
        other.load_state_dict(state)


def test_mixture_is_read_from_yaml_and_from_the_command_line(cache: Path) -> None:
    jsonl(Path("a.jsonl"))
    file = Path("deep/mix.yaml")
    file.parent.mkdir()
    jsonl(file.parent / "b.jsonl")
    text = Path("ppo.yaml").read_text().replace("train.jsonl", "{x: 2 * b.jsonl, y: a.jsonl}")
    file.write_text(text)

    cfg = load("ppo.py", file, ["data.train_path.y=0.5 * a.jsonl(prompt=n)"]).cfg
    check(cfg, 4)

    assert cfg.data.train_path == {"x": "2 * deep/b.jsonl", "y": "0.5 * a.jsonl(prompt=n)"}
    (first, second) = data_sources("data.train_path", cfg.data.train_path)
    assert (first.name, first.location, first.weight) == ("x", "deep/b.jsonl", 2.0)
    assert (second.weight, second.columns) == (0.5, (("prompt", "n"),))
    assert settings("data.train_path={y: a.jsonl, z: null}").data.train_path["y"] == "a.jsonl"


REFUSED = {
    "data.train_path=[a.jsonl]": "data.train_path: got ['a.jsonl'] (list), expected a path or a "
    "map name -> path; write data.train_path=train.jsonl or data.train_path='{easy: 3 * "
    "easy.jsonl, hard: hard.jsonl}'",
    "data.train_path={}": "data.train_path: got an empty map, expected a source; write name: path",
    "data.train_path={a-b: train.jsonl}": "data.train_path: got the source 'a-b', expected a name "
    "of letters, digits and _, as its metric is data/name; rename it",
    "data.train_path={a: 0 * train.jsonl}": "data.train_path.a: got the weight '0', expected a "
    "number above 0; write 3 * train.jsonl",
    "data.train_path=train.jsonl(prompt)": "data.train_path: got the columns (prompt), expected "
    "name=column, each name once; write for example (prompt=question, answer=solution)",
    "data.train_path={a: nope.jsonl}": "data.train_path.a: no file nope.jsonl in {folder}, "
    "expected prompts; correct the path",
    "data.eval_path=nope:train": "data.eval_path: no folder nope in {folder}, expected a data set; "
    "correct the path",
    "data.train_path=org/sums": "data.train_path: got org/sums, expected a name that ends in "
    ".jsonl or .jsonl.gz or .jsonl.zst or .parquet, a folder, or owner/name:split of the hub; "
    "convert the file",
    "data.train_path=org/sums:odd/train": "data.train_path: got the config 'odd' of org/sums, "
    "expected one of main, other; write org/sums:main/train",
}


@pytest.mark.parametrize("words", REFUSED)
def test_source_that_cannot_be_read_is_refused(words: str, cache: Path) -> None:
    write_cached(cache, "datasets/org/sums", repository())

    with pytest.raises(ConfigError) as refused:
        check(settings(words), 4)

    assert str(refused.value) == REFUSED[words].replace("{folder}", str(Path.cwd()))
