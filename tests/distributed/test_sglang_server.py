"""Weights to a stand-in for an SGLang server in another process, and a run that generates on it."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from spmdflow.rollout.generator import NEVER
from spmdflow.serving.client import ServerFault
from spmdflow.serving.link import UpdateReport
from spmdflow.serving.mirror import SharedMirror, WeightMirror, trained_shapes
from spmdflow.serving.sglang import SglangClient
from spmdflow.serving.sglang_link import SglangLink
from tests.algos.runs import FEW_SUMS, ROOT, check_prediction, run_ranks, steps_of
from tests.forked import fork_server
from tests.sglang_server import serve

MODEL = str(ROOT / "algos" / "arithmetic" / "model")
EPOCH = "00ff00ff"
OPENED = ["end_weight_update", "destroy_weights_update_group", "init_weights_update_group"]
PAUSED = ["pause_generation", "update_weight_version none"]
SENT = ["begin_weight_update", "update_weights_from_distributed", "end_weight_update"]
CHECKED = ["flush_cache", "weights_checker"]
SECONDS = 20.0


@dataclass
class Remote:
    """The stand-in in its process."""

    url: str

    def ask(self, **body: str) -> dict[str, Any]:
        """Its events and version; fault="...": misbehave from now on."""
        data = json.dumps(body).encode()
        with urllib.request.urlopen(f"{self.url}/stand_in", data, timeout=SECONDS) as answer:
            value: dict[str, Any] = json.loads(answer.read())
        return value

    def events_since(self, number: int) -> list[str]:
        """Routes that were asked after the first `number`, in order."""
        events: list[str] = self.ask()["events"]
        return events[number:]


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[Remote]:
    place = tmp_path / "address"
    process = fork_server().Process(target=serve, args=(MODEL, place), daemon=True)
    process.start()
    limit = time.monotonic() + 120
    while not place.exists():
        assert process.is_alive() and time.monotonic() < limit
        time.sleep(0.02)
    yield Remote(place.read_text())
    process.kill()
    process.join()


def new_mirror() -> WeightMirror:
    """A mirror with random weights, as version 0."""
    mirror = WeightMirror(trained_shapes(MODEL), torch.float32)
    write(mirror, torch.Generator().manual_seed(1))
    mirror.commit(0)
    return mirror


def write(mirror: WeightMirror, draws: torch.Generator, only: str = "") -> None:
    """Receive weights; only: the one tensor that differs from the version before."""
    for name, tensor, _ in mirror.next_blocks():
        if only and name != only:
            tensor.copy_(mirror._front[name])
        else:
            tensor.normal_(generator=draws)


async def bring(link: SglangLink, shared: SharedMirror, since: int) -> UpdateReport:
    return await link.bring(shared, since=since, epoch=EPOCH, waits=False)


def test_servers_weights_are_the_runs_after_each_sync_and_what_changed_is_sent(
    remote: Remote,
) -> None:
    mirror = new_mirror()
    reports = []

    async def sync() -> None:
        client = SglangClient(remote.url, key="", vocab_size=16)
        link = await SglangLink.open(client, "gloo", SECONDS)
        reports.append(await bring(link, SharedMirror(mirror), NEVER))
        write(mirror, torch.Generator().manual_seed(2), only="lm_head.weight")
        mirror.commit(1)
        reports.append(await bring(link, SharedMirror(mirror), 0))
        reports.append(await bring(link, SharedMirror(mirror), 1))
        link.close()
        await client.close()

    asyncio.run(sync())

    full = 4 * mirror.num_elements
    changed = 4 * mirror.shapes["lm_head.weight"].numel()
    assert [report.num_bytes for report in reports] == [full, changed, 0]
    assert [report.is_full for report in reports] == [True, False, False]
    assert [report.difference for report in reports] == [None] * 3
    assert remote.ask()["version"] == f"{EPOCH}:1"
    ends = ["update_weight_version 1", "continue_generation"]
    assert remote.events_since(0) == [
        *(*OPENED, *PAUSED, *SENT, *CHECKED, "update_weight_version 0", "continue_generation"),
        *(*PAUSED, *SENT, *CHECKED, *ends),
        *(*PAUSED, *CHECKED, *ends),  # nothing had changed
    ]


def test_weights_that_differ_are_reported_and_get_no_version(remote: Remote) -> None:
    mirror = new_mirror()
    remote.ask(fault="checksum")

    async def sync() -> UpdateReport:
        client = SglangClient(remote.url, key="", vocab_size=16)
        link = await SglangLink.open(client, "gloo", SECONDS)
        report = await bring(link, SharedMirror(mirror), NEVER)
        link.close()
        await client.close()
        return report

    report = asyncio.run(sync())

    assert "tensor model.norm.weight: got checksum '0000000000000000'" in str(report.difference)
    assert remote.events_since(3) == [*PAUSED, *SENT, *CHECKED, "continue_generation"]


def test_update_that_fails_leaves_no_version_and_the_next_connection_ends_it(
    remote: Remote,
) -> None:
    mirror = new_mirror()
    remote.ask(fault="refuse")

    async def sync() -> UpdateReport:
        client = SglangClient(remote.url, key="", vocab_size=16)
        link = await SglangLink.open(client, "gloo", 3.0)
        with pytest.raises(ServerFault, match="out of memory"):
            await bring(link, SharedMirror(mirror), NEVER)
        link.close()
        assert remote.events_since(3) == [*PAUSED, *SENT[:2], "continue_generation"]
        assert (await client.facts(seconds=SECONDS)).weights_version == NEVER
        remote.ask(fault="")
        again = await SglangLink.open(client, "gloo", SECONDS)
        report = await bring(again, SharedMirror(mirror), NEVER)
        again.close()
        await client.close()
        return report

    report = asyncio.run(sync())

    assert report.difference is None
    assert remote.ask()["version"] == f"{EPOCH}:0"


def test_run_trains_on_rows_of_an_sglang_server(tmp_path: Path, remote: Remote) -> None:
    run_dir = tmp_path / "run"
    words = (
        *FEW_SUMS,
        "placement={a: {roles: [actor, reference, reward], ranks: [0, 1]}, "
        "b: {roles: [generator], ranks: [2]}}",
        "actor.rollout.engine=served",
        "actor.rollout.sampler=server",
        "actor.rollout.server.dialect=sglang",
        f"actor.rollout.server.addresses=[{remote.url}]",
        f"actor.rollout.server.transfer_seconds={SECONDS}",
        "actor.rollout.temperature=2.5",
        "actor.rollout.max_new_tokens=8",
        "actor.update.old_log_probs=recompute",
        "actor.update.mini_batch_size=8",
        "actor.optimizer.schedule=constant",
        "actor.optimizer.warmup_steps=0",
        "data.prompts_per_step=4",
        "data.samples_per_prompt=4",
        "run.sample_every=0",
        "run.save_last=false",
        "save_every=0",
        "eval_every=0",
        "total_steps=3",
    )

    run_ranks(run_dir, *words, num_ranks=3, script=ROOT / "algos" / "grpo_async.py", small=())

    check_prediction(run_dir)
    lines = [json.loads(each) for each in (run_dir / "metrics.jsonl").read_text().splitlines()]
    own = [name for name in lines[0] if name.startswith("servers/")]
    steps = steps_of(run_dir, own=own)
    first, second, _ = steps
    assert first["rollout/drift"] < 1e-5  # the same weights, float32
    assert second["rollout/drift"] > first["rollout/drift"]  # one update older
    for step in steps:
        assert step["rollout/weights_verified"] == 1
        assert step["servers/lost_updates"] == step["servers/wrong_answers"] == 0
        assert step["servers/moved_rows"] == 0
    check_switches(remote.events_since(3))


def check_switches(events: list[str]) -> None:
    """Each update is whole and in order, but the last one, which the run's end may cut off."""
    starts = [number for number, event in enumerate(events) if event == PAUSED[0]]
    assert starts[0] == 0 and len(starts) >= 3
    assert "generate" in events[: starts[1]]
    for index, start in enumerate(starts):
        stop = starts[index + 1] if index + 1 < len(starts) else len(events)
        switch = [event for event in events[start:stop] if event != "generate"]
        version = f"update_weight_version {2 * index}"  # two optimizer steps a step
        whole = [*PAUSED, *SENT, *CHECKED, version, "continue_generation"]
        is_last = stop == len(events)
        assert switch == whole or (is_last and switch[:-1] == whole[: len(switch) - 1])
    assert events.count("continue_generation") == len(starts)
