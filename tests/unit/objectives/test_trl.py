"""Losses and gradients beside those of TRL's trainers: the same weights, the same rows of data.

The trainers are TRL's own, on its own batches; ours read the rows with our encoders. What differs
and why: docs/ALGORITHMS.md. The gaps are shown by
`pytest --log-cli-level=INFO tests/unit/objectives/test_trl.py`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from spmdflow.config.algorithm import SurrogateLossConfig
from spmdflow.config.offline import ExampleDataConfig, PreferenceDataConfig, PreferenceLossConfig
from spmdflow.config.schema import AdvantageConfig
from spmdflow.data.ragged import ragged_from_padded
from spmdflow.data.row_id import RowGroups, positions_in_groups
from spmdflow.models.rows import answer_rows, answer_tokens, example_rows, pair_rows
from spmdflow.objectives.estimator import Samples, grpo
from spmdflow.objectives.log_prob import CausalOutput, ScalarOutput
from spmdflow.objectives.loss import Loss
from spmdflow.objectives.policy import PolicyLoss
from spmdflow.objectives.preference import (
    LabelLoss,
    PairLoss,
    answer_log_probs,
    pair_losses,
    score_slopes,
)
from spmdflow.objectives.supervised import SupervisedLoss
from spmdflow.workers.micro_batch import MicroBatch, micro_batches
from tests.outputs import causal_output, scalar_output
from tests.unit.datasets.test_examples import source_of

logger = logging.getLogger(__name__)

TASK = Path(__file__).parents[3] / "algos" / "arithmetic"
NUM_ROWS = 12
LONGEST = 6
POLICY = 0.02  # noise of the policy; its reference has none
LOSS_GAP = 2e-6
GRADIENT_GAP = 2e-5
"""Largest relative gaps: float32 sums in another order, TRL's logits in chunks."""


@pytest.fixture(scope="module")
def trl() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        return pytest.importorskip("trl", reason="trl is not installed: pip install -e '.[dev]'")


def lines(name: str) -> list[dict[str, Any]]:
    """Rows whose answers have different lengths."""
    rows = [json.loads(line) for line in (TASK / name).read_text().splitlines()[:NUM_ROWS]]
    for number, row in enumerate(rows):
        row |= {"rejected": row["rejected"] + "1" * (number % 3)} if "rejected" in row else {}
    return rows


def model_of(*noises: float, auto: Any = AutoModelForCausalLM, **settings: Any) -> Any:
    """The bundled model, moved away from where it is by noise of these sizes, one upon another."""
    model = auto.from_pretrained(TASK / "model", dtype=torch.float32, **settings).eval()
    for noise in noises:
        generator = torch.Generator().manual_seed(int(1e6 * noise))
        for parameter in model.parameters():
            parameter.data += noise * torch.randn(parameter.shape, generator=generator)
    return model


def trainer_of(
    trl: ModuleType, kind: str, rows: list[dict[str, Any]], folder: Path, **settings: Any
) -> Any:
    """A trainer of TRL on the CPU, in evaluation mode, and its one batch."""
    datasets = pytest.importorskip("datasets")
    with_reference = {"ref_model": model_of()} if kind in ("DPO", "KTO") else {}
    functions = {"reward_funcs": settings.pop("reward_funcs")} if kind == "GRPO" else {}
    model = model_of(POLICY)
    if kind == "Reward":
        model = model_of(POLICY, auto=AutoModelForSequenceClassification, num_labels=1)
    args = getattr(trl, f"{kind}Config")(
        output_dir=str(folder),
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        per_device_train_batch_size=len(rows),
        disable_tqdm=True,
        **settings,
    )
    made = getattr(trl, f"{kind}Trainer")(
        model,
        args=args,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(TASK / "model"),
        **with_reference,
        **functions,
    )
    made.model.eval()
    return made


def theirs(trainer: Any, batch: Any = None) -> tuple[float, Tensor]:
    """Loss and gradient of a trainer on its batch."""
    batch = next(iter(trainer.get_train_dataloader())) if batch is None else batch
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    return float(loss.detach()), gradient_of(trainer.model)


def ours(model: Any, loss: Loss, rows: TensorDict, output: Callable[..., Any]) -> Any:
    """Loss and gradient over two micro-batches."""
    totals = loss.denominators(rows)
    value = 0.0
    for micro in cut(rows, 2):
        share, _ = loss(output(model, micro), micro, totals)
        share.backward()  # type: ignore[no-untyped-call]
        value += float(share.detach())
    return value, gradient_of(model)


def cut(rows: TensorDict, parts: int) -> list[MicroBatch]:
    cpu = torch.device("cpu")
    return micro_batches(rows, num_micro_batches=parts, by_tokens=False, device=cpu)


def logits(model: Any, micro: MicroBatch) -> CausalOutput:
    made = model(input_ids=micro.input_ids).logits  # causal: right padding needs no mask
    return causal_output(made, micro)


def scores(model: Any, micro: MicroBatch) -> ScalarOutput:
    hidden = model.model(input_ids=micro.input_ids)
    return scalar_output(model.score(hidden.last_hidden_state))


def gradient_of(model: Any) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def compare(name: str, their: tuple[float, Tensor], our: tuple[float, Tensor]) -> None:
    loss_gap = abs(their[0] - our[0]) / abs(their[0])
    gradient_gap = float((their[1] - our[1]).norm() / their[1].norm())
    logger.info("%s: loss %.1e, gradient %.1e", name, loss_gap, gradient_gap)
    assert float(their[1].norm()) > 1e-4
    assert loss_gap < LOSS_GAP and gradient_gap < GRADIENT_GAP


@torch.no_grad()
def answer_sums(model: Any, rows: TensorDict) -> Tensor:
    """(n, 2) log-probabilities of both answers."""
    (micro,) = cut(rows, 1)
    return answer_log_probs(logits(model, micro), micro).view(2, -1).T


def read(cfg: Any) -> TensorDict:
    return source_of(cfg).read_rows(list(range(NUM_ROWS)))


def written(path: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"train_path": str(path), "tokenizer_path": str(TASK / "model")}


@pytest.mark.parametrize(
    ("loss_type", "cfg"),
    [
        ("sigmoid", PreferenceLossConfig(beta=0.1)),
        ("sigmoid_norm", PreferenceLossConfig(beta=0.5, per_token=True)),
        ("ipo", PreferenceLossConfig(name="ipo", per_token=True)),
        ("hinge", PreferenceLossConfig(name="hinge", beta=0.05)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_losses_of_pairs_are_those_of_trl(
    trl: ModuleType, tmp_path: Path, loss_type: str, cfg: PreferenceLossConfig
) -> None:
    rows = lines("pairs_train.jsonl")
    trainer = trainer_of(trl, "DPO", rows, tmp_path, loss_type=loss_type, beta=cfg.beta)
    their = theirs(trainer)

    batch = answer_rows(read(PreferenceDataConfig(**written(tmp_path / "p.jsonl", rows))))
    model = model_of(POLICY)
    found = answer_sums(model, batch)
    ref = answer_sums(model_of(), batch)
    losses, slopes = pair_losses(found, ref, answer_tokens(batch), cfg)
    batch["pair_losses"] = torch.cat([losses, losses])
    batch["score_slopes"] = torch.cat([slopes[:, 0], slopes[:, 1]])

    compare(loss_type, their, ours(model, PairLoss(answer_log_probs), batch, logits))


def test_kto_with_its_kl_is_that_of_trl(trl: ModuleType, tmp_path: Path) -> None:
    rows = [
        {
            "prompt": row["prompt"],
            "completion": row["chosen"] if number % 2 else row["rejected"],
            "label": bool(number % 2),
        }
        for number, row in enumerate(lines("pairs_train.jsonl"))
    ]
    loss = PreferenceLossConfig("kto", beta=0.1, desirable_weight=1.3, undesirable_weight=0.8)
    trainer = trainer_of(
        trl,
        "KTO",
        rows,
        tmp_path,
        train_sampling_strategy="sequential",
        beta=loss.beta,
        desirable_weight=loss.desirable_weight,
        undesirable_weight=loss.undesirable_weight,
    )
    their = theirs(trainer)

    cfg = PreferenceDataConfig(label_column="label", **written(tmp_path / "l.jsonl", rows))
    batch = read(cfg)
    before = source_of(cfg).read_rows(np.roll(np.arange(NUM_ROWS), 1).tolist())
    batch["answers"] = before["answers"]
    both = answer_rows(batch)
    model = model_of(POLICY)
    found = answer_sums(model, both)
    ref = answer_sums(model_of(), both)
    own = example_rows(batch)
    own["desirable"] = batch["desirable"]
    own["ref_answer_log_probs"] = ref
    own["kl_log_ratios"] = found[:, 1] - ref[:, 1]

    compare("kto", their, ours(model, LabelLoss(loss), own, logits))
    shown = trainer._metrics["eval"]["kl"][0]
    assert shown > 0.1 and shown == pytest.approx(float(own["kl_log_ratios"].mean()), rel=1e-5)


GRPO_LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"loss_type": "grpo"}, {"aggregation": "sequence-mean-token-mean"}),
    "bnpo": ({"loss_type": "bnpo"}, {"aggregation": "token-mean"}),
    "dapo": (
        {"loss_type": "dapo", "epsilon_high": 0.28},
        {"aggregation": "token-mean", "clip_ratio_high": 0.28},
    ),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"aggregation": "sequence-mean-token-sum-by-budget"}),
    "with KL": (
        {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": False},
        {"aggregation": "sequence-mean-token-mean", "kl_coef": 0.3, "kl_estimator": "k3"},
    ),
    "two-sided clip": (
        {"loss_type": "bnpo", "delta": 1.5},
        {"aggregation": "token-mean", "dual_clip": 1.5},
    ),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.01},
        {"surrogate": "gspo", "aggregation": "sequence-mean-token-mean", "clip_ratio": 0.01},
    ),
}


@pytest.fixture(scope="module")
def samples(trl: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Responses that TRL's trainer generated and scored, with log-probs of two other models."""
    seen: list[float] = []

    def reward(completions: list[str], **_: Any) -> list[float]:
        seen[:] = [float(sum(map(ord, text)) % 5) for text in completions]
        return seen

    prompts = [{"prompt": row["prompt"]} for row in lines("train.jsonl")[:3] for _ in range(4)]
    trainer = trainer_of(
        trl,
        "GRPO",
        prompts,
        tmp_path_factory.mktemp("grpo"),
        reward_funcs=reward,
        num_generations=4,
        max_completion_length=LONGEST,
        temperature=1.0,
    )
    inputs = trainer._generate_and_score_completions(prompts)
    inputs["rewards"] = torch.tensor(seen)
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    there = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    for name, noise in (("old_per_token_logps", 0.004), ("ref_per_token_logps", 0.003)):
        with torch.no_grad():  # log-ratios stay far below 20, where ours are clamped
            found = model_of(POLICY, noise)(input_ids=ids, attention_mask=there).logits.log_softmax(
                -1
            )
        picked = found[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
        inputs[name] = picked[:, inputs["prompt_ids"].shape[1] - 1 :]
    return dict(inputs)


@pytest.mark.parametrize("name", GRPO_LOSSES)
def test_policy_losses_are_those_of_trl(
    trl: ModuleType, tmp_path: Path, samples: dict[str, Any], name: str
) -> None:
    their_settings, our_settings = GRPO_LOSSES[name]
    count = len(samples["rewards"])
    trainer = trainer_of(
        trl,
        "GRPO",
        [{"prompt": "1+1="}] * count,
        tmp_path,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        num_generations=4,
        max_completion_length=LONGEST,
        temperature=1.0,
        **{"epsilon": 0.2, "beta": 0.0, **their_settings},
    )
    trainer.current_gradient_accumulation_steps = 1
    their = theirs(trainer, samples)

    mask = samples["completion_mask"].bool()
    lengths = mask.sum(-1)
    prompts = samples["prompt_mask"].bool()
    columns = {
        "prompts": ragged_from_padded(
            samples["prompt_ids"].masked_select(prompts).view(count, -1), prompts.sum(-1)
        ),
        "responses": ragged_from_padded(samples["completion_ids"], lengths),
        "response_mask": ragged_from_padded(mask, lengths),
        "old_log_probs": ragged_from_padded(samples["old_per_token_logps"], lengths),
        "ref_log_probs": ragged_from_padded(samples["ref_per_token_logps"], lengths),
        "advantages": ragged_from_padded(samples["advantages"][:, None] * mask, lengths),
    }
    loss = PolicyLoss(SurrogateLossConfig(**our_settings), 1.0, budget=LONGEST)

    compare(name, their, ours(model_of(POLICY), loss, TensorDict(columns, [count]), logits))


def test_group_advantages_differ_from_trl_by_the_floor_of_the_deviation(
    samples: dict[str, Any],
) -> None:
    rewards = samples["rewards"].double()
    groups = np.arange(len(rewards)) // 4
    places, largest = positions_in_groups(groups)
    index = torch.from_numpy(groups)
    place = torch.from_numpy(places)
    columns = {"token_level_rewards": rewards[:, None]}
    mask = torch.ones(len(rewards), 1, dtype=torch.bool)
    rows = RowGroups(index, 3, lambda x: x, place, largest)

    found, _ = grpo(Samples(columns, mask, rows, lambda x: x), AdvantageConfig())

    deviations = rewards.view(3, 4).std(dim=1).repeat_interleave(4)
    rescaled = found[:, 0] * (deviations + 1e-6) / (deviations + 1e-4)
    logger.info("advantages: %.1e", float((found[:, 0] - samples["advantages"]).abs().max()))
    assert float(rewards.std()) > 0.5
    torch.testing.assert_close(rescaled.float(), samples["advantages"], rtol=1e-5, atol=1e-5)


def test_supervised_loss_is_that_of_trl(trl: ModuleType, tmp_path: Path) -> None:
    rows = [{"prompt": r["prompt"], "completion": r["answer"]} for r in lines("train.jsonl")]
    their = theirs(trainer_of(trl, "SFT", rows, tmp_path, completion_only_loss=True))

    cfg = ExampleDataConfig(response_column="completion", **written(tmp_path / "e.jsonl", rows))

    compare("sft", their, ours(model_of(POLICY), SupervisedLoss(), example_rows(read(cfg)), logits))


def test_bradley_terry_loss_is_that_of_trl(trl: ModuleType, tmp_path: Path) -> None:
    rows = lines("pairs_train.jsonl")
    trainer = trainer_of(trl, "Reward", rows, tmp_path)
    model = model_of(auto=AutoModelForSequenceClassification, num_labels=1)
    model.load_state_dict(trainer.model.state_dict())
    their = theirs(trainer)

    batch = pair_rows(read(PreferenceDataConfig(**written(tmp_path / "p.jsonl", rows))))
    with torch.no_grad():
        (micro,) = cut(batch, 1)
        ends = scores(model, micro).at(micro.ends)
    losses, batch["score_slopes"] = score_slopes(ends[:NUM_ROWS], ends[NUM_ROWS:])
    batch["pair_losses"] = torch.cat([losses, losses])

    compare("bradley-terry", their, ours(model, PairLoss(), batch, scores))
