"""The reward: a score for each response, from a model or a user's function (paper Table 4)."""

from __future__ import annotations

import json

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.schema import RewardConfig
from spmdflow.data.ragged import lengths_of, ragged, rows_of
from spmdflow.datasets.tokenizer import load_tokenizer
from spmdflow.models.base import EngineWorker
from spmdflow.parallel.layout import Layout
from spmdflow.rewards.pool import RewardPool
from spmdflow.transfer.register import register
from spmdflow.transfer.worker import Mean, Metric, Sum, Worker, WorkerContext
from spmdflow.workers.micro_batch import MicroBatch

READS = ("prompts", "responses", "prompt_text", "row")
_WRITES = ("scores", "token_level_rewards", "response_text")


class RewardWorker(Worker):
    """Scores responses with `cfg.model` or with `cfg.function`; the settings say which."""

    role = "reward"

    @classmethod
    def layout_of(cls, cfg: RewardConfig, ranks: tuple[int, ...]) -> Layout:
        """That of the reward model; a function is data-parallel."""
        return _ModelScorer.layout_of(cfg, ranks) if cfg.model else Layout.data_parallel(ranks)

    @classmethod
    def needed_groups(cls, cfg: RewardConfig, layout: Layout) -> list[tuple[int, ...]]:
        """Those of the reward model; a function needs none but the pool's."""
        return _ModelScorer.needed_groups(cfg, layout) if cfg.model else [layout.ranks]

    def __init__(self, cfg: RewardConfig, context: WorkerContext) -> None:
        super().__init__(cfg, context)
        self._tokenizer = load_tokenizer(context.config.data.tokenizer_path)
        self._scorer = _ModelScorer(cfg, context) if cfg.model else _FunctionScorer(cfg)

    @register(
        transfer_mode="3D_PROTO",
        reads=READS,
        writes=_WRITES,
    )
    def compute_reward(self, batch: TensorDict, *, prefix: str = "reward") -> TensorDict | None:
        """scores (B,); token_level_rewards: the score at the last response token.

        prefix: of the metrics, for rows that are not those of the training batch.
        """
        texts = [
            self._tokenizer.decode(row.tolist(), skip_special_tokens=True)
            for row in rows_of(batch["responses"])
        ]
        self._scorer.call = self.call
        scored = self._scorer.scores(batch, texts)
        if scored is None:
            return None
        scores, metrics = scored
        metrics = {"mean": Mean(float(scores.sum()), len(scores))} | metrics
        self.report({f"{prefix}/{name}": metric for name, metric in metrics.items()})
        columns = {"scores": scores, "token_level_rewards": _at_last_token(scores, batch)}
        made = TensorDict(columns, batch_size=batch.batch_size)
        made.set_non_tensor("response_text", texts)
        return made

    def close(self) -> None:
        """End the worker processes of a reward function."""
        self._scorer.close()


class _ModelScorer(EngineWorker):
    """A sequence-classification model: its output at the last token is the score."""

    role = "reward"

    def __init__(self, cfg: RewardConfig, context: WorkerContext) -> None:
        super().__init__(cfg, context, head="scalar")

    def scores(
        self, batch: TensorDict, texts: list[str]
    ) -> tuple[Tensor, dict[str, Metric]] | None:
        """(B,) scores; None before the last pipeline stage."""
        made = self.score(batch.select("prompts", "responses"), _last)
        return None if made is None else (made["scores"].float().cpu(), {})


class _FunctionScorer:
    """A user's function in worker processes, with a limit for each sample."""

    def __init__(self, cfg: RewardConfig) -> None:
        self._pool = RewardPool.from_config(cfg)
        self.call: object = None

    def scores(self, batch: TensorDict, texts: list[str]) -> tuple[Tensor, dict[str, Metric]]:
        rows = [json.loads(row) for row in batch["row"]]
        results = self._pool.score(list(batch["prompt_text"]), texts, rows)
        scores = torch.tensor([result["score"] for result in results], dtype=torch.float32)
        return scores, _means(results)

    def close(self) -> None:
        self._pool.close()


def _means(results: list[dict[str, float]]) -> dict[str, Metric]:
    """Means of the further numbers that the function returned; errors are counted."""
    names = sorted({name for result in results for name in result} - {"score"})
    metrics: dict[str, Metric] = {}
    for name in names:
        values = [result[name] for result in results if name in result]
        metrics[name] = Sum(sum(values)) if name == "errors" else Mean(sum(values), len(values))
    return metrics


def _last(output: Tensor, micro: MicroBatch) -> dict[str, Tensor]:
    return {"scores": micro.last(output)}


def _at_last_token(scores: Tensor, batch: TensorDict) -> Tensor:
    lengths = lengths_of(batch["responses"]).cpu()
    values = torch.zeros(int(lengths.sum()))
    ends = torch.cumsum(lengths, 0)
    values[ends[lengths > 0] - 1] = scores[lengths > 0]
    return ragged(values, lengths)
