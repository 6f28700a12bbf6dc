"""Sampling parameters and stop strings of one call of generate_sequences."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from spmdflow.config.load import load
from spmdflow.config.objective import PolicyUpdateConfig
from spmdflow.config.schema import ActorConfig, EngineConfig, ModelConfig, RolloutConfig
from spmdflow.controller.batch import Batch
from spmdflow.controller.draw_count import DrawCounts
from spmdflow.data.ragged import rows_of
from spmdflow.datasets.tokenizer import load_tokenizer, response_texts
from spmdflow.errors import ConfigError, ProtocolError, SpmdflowError
from spmdflow.models.policy import ActorWorker
from spmdflow.plan.trace import trace
from tests.unit.planned import settings_of, write_script
from tests.unit.toy_flow import TASK, Rank, rank_of_one

ROWS = 64


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    with rank_of_one(tmp_path / "run", prompts_per_step=ROWS) as made:
        yield made


def spawned(rank: Rank, **rollout: Any) -> tuple[Any, Batch]:
    """An actor with these rollout settings, and the rows of step 1."""
    cfg = ActorConfig(
        model=ModelConfig(path=str(TASK / "model")),
        engine=EngineConfig(),
        rollout=RolloutConfig(tokenizer_path=str(TASK / "model"), **rollout),
        update=PolicyUpdateConfig(old_log_probs="recompute"),
    )
    actor = rank.flow.spawn(ActorWorker, cfg, pool=rank.flow.pool("all"))
    prompts = rank.flow.prompts(rank.config.data)
    next(rank.flow.steps(1))
    return actor, next(prompts)


def redrawn(rank: Rank, actor: Any, batch: Batch, **arguments: Any) -> dict[str, list[list[Any]]]:
    """The columns of a first generation of the step."""
    rank.flow.caller._draws = DrawCounts()
    values = actor.generate_sequences(batch, **arguments).fetch("responses", "rollout_log_probs")
    return {name: [row.tolist() for row in rows_of(column)] for name, column in values.items()}


SETTINGS = {"temperature": 9.0, "top_p": 0.5, "top_k": 2, "max_new_tokens": 3}


@pytest.mark.parametrize("names", [(name,) for name in SETTINGS] + [tuple(SETTINGS)])
def test_parameters_of_a_call_take_the_tokens_that_settings_take(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    asked = {name: SETTINGS[name] for name in names}
    base = {"max_new_tokens": 6, "temperature": 4.0}
    drawn = []
    for place, (settings, arguments) in enumerate([(base, asked), (base | asked, {}), (base, {})]):
        with rank_of_one(tmp_path / str(place), prompts_per_step=ROWS) as rank:
            actor, batch = spawned(rank, **settings)
            drawn.append(redrawn(rank, actor, batch, **arguments)["responses"])

    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]


def test_log_probs_fit_the_trainer_whatever_temperature_a_call_has(rank: Rank) -> None:
    actor, batch = spawned(rank, max_new_tokens=6, temperature=1.5)

    for arguments in ({}, {"temperature": 0.5}, {"temperature": 4.0, "top_k": 9}, {"greedy": True}):
        made = actor.generate_sequences(batch, **arguments)
        made |= actor.compute_log_prob(made)
        values = made.fetch("rollout_log_probs", "old_log_probs")
        gap = values["rollout_log_probs"].values() - values["old_log_probs"].values()
        assert float(gap.abs().max()) < 1e-4  # float32, two implementations


@pytest.mark.parametrize("stop", [["7"], ["12", "0"], ["33", "4"], ["99999"]])
def test_response_ends_with_the_token_that_completes_a_stop_string(
    rank: Rank, stop: list[str]
) -> None:
    actor, batch = spawned(rank, max_new_tokens=12, temperature=3.0, max_batch_size=16)
    free = redrawn(rank, actor, batch)
    prompts = [row.tolist() for row in rows_of(batch.fetch("prompts")["prompts"])]  # type: ignore[arg-type]

    ended = redrawn(rank, actor, batch, stop=stop)

    tokenizer = load_tokenizer(str(TASK / "model"))
    num_ended = 0
    for row, (tokens, prompt) in enumerate(zip(free["responses"], prompts, strict=True)):
        texts = [response_texts(tokenizer, [prompt], [tokens[:n]])[0] for n in range(len(tokens))]
        texts.append(response_texts(tokenizer, [prompt], [tokens])[0])
        hits = [n for n, text in enumerate(texts) if any(string in text for string in stop)]
        length = hits[0] if hits else len(tokens)
        assert ended["responses"][row] == tokens[:length]
        torch.testing.assert_close(
            torch.tensor(ended["rollout_log_probs"][row]),
            torch.tensor(free["rollout_log_probs"][row][:length]),
        )
        num_ended += length < len(tokens)
    assert (num_ended > ROWS / 8) == (stop != ["99999"])


REFUSED = [
    ({"temperature": 0}, r"temperature: got 0, expected more than 0; set greedy=True"),
    ({"temperature": -1.0}, r"temperature: got -1.0, expected more than 0"),
    ({"temperature": "hot"}, r"temperature: got 'hot', expected float"),
    ({"temperature": float("nan")}, r"temperature: got nan, expected float"),
    ({"top_p": 0}, r"top_p: got 0, expected more than 0"),
    ({"top_p": 1.5}, r"top_p: got 1.5, expected at most 1"),
    ({"top_k": -1}, r"top_k: got -1, expected at least 0"),
    ({"top_k": True}, r"top_k: got True, expected int"),
    ({"max_new_tokens": 0}, r"max_new_tokens: got 0, expected at least 1"),
    ({"max_new_tokens": 2.5}, r"max_new_tokens: got 2.5, expected int"),
    (
        {"max_new_tokens": 64},
        r"max_new_tokens: got 64, expected less than the model's 64 positions",
    ),
    ({"stop": "</tool>"}, r"stop: got '</tool>', expected a list of texts that are not empty"),
    ({"stop": [""]}, r"stop: got \[''\], expected a list of texts"),
    ({"stop": ["a", 3]}, r"stop: got \['a', 3\], expected a list of texts"),
]


def test_what_cannot_be_sampled_is_refused_at_the_call_and_the_script_may_go_on(rank: Rank) -> None:
    actor, batch = spawned(rank, max_new_tokens=4)
    sent = len(rank.flow.caller.records)

    for arguments, message in REFUSED:
        with pytest.raises(ConfigError, match=r"^actor\.generate_sequences: " + message):
            actor.generate_sequences(batch, **arguments)
    with pytest.raises(ProtocolError, match=r"got greedy='perhaps' \(str\), expected a bool"):
        actor.generate_sequences(batch, greedy="perhaps")
    with pytest.raises(ProtocolError, match="min_p"):
        actor.generate_sequences(batch, min_p=0.1)

    assert len(rank.flow.caller.records) == sent
    assert len(redrawn(rank, actor, batch)["responses"]) == ROWS


def test_prompt_and_tokens_of_a_call_beyond_the_model_are_refused(rank: Rank) -> None:
    actor, batch = spawned(rank, max_new_tokens=4)

    with pytest.raises(
        ConfigError, match=r"max_new_tokens=63, together .* the model's 64 positions"
    ):
        actor.generate_sequences(batch, max_new_tokens=63)


def test_plan_takes_the_parameters_of_a_call_and_refuses_what_a_run_refuses(tmp_path: Path) -> None:
    call = (
        "actor.generate_sequences(next(prompts), temperature=0.9, top_k=4, stop=['7'], greedy={})"
    )
    settings = [f"data.train_path={TASK}/train.jsonl", f"data.eval_path={TASK}/eval.jsonl"]
    settings += [f"actor.model.path={TASK}/model", "eval_every=0"]
    for greedy, message in (("False", ""), ("'perhaps'", r"got greedy='perhaps' \(str\)")):
        loaded = load(write_script(tmp_path, call.format(greedy)), None, settings)
        if not message:
            assert trace(loaded.script, loaded.cfg, settings_of(2)).calls
            continue
        with pytest.raises(SpmdflowError, match=message):
            trace(loaded.script, loaded.cfg, settings_of(2))
