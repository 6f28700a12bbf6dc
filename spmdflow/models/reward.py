"""Reward and cost: a score for each response (paper Table 4).

It comes from a model, from functions, or from a weighted sum of both. Safe RLHF's second signal,
the cost (Dai et al. 2024), is the same code with other column names, so a batch can hold both.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.model_folder import own_vocabulary
from spmdflow.config.reward import MODEL, RewardTerm, reward_terms
from spmdflow.config.schema import RewardConfig
from spmdflow.data.ragged import is_ragged, lengths_of, pad, ragged, rows_of
from spmdflow.datasets.tokenizer import decode_responses, load_tokenizer, reencode
from spmdflow.errors import RewardError
from spmdflow.models.base import EngineWorker, axis_groups
from spmdflow.objectives.log_prob import ScalarOutput
from spmdflow.parallel.group import all_gather_plain
from spmdflow.parallel.layout import Layout
from spmdflow.rewards.distinct import distinct_share
from spmdflow.rewards.pool import Judgement, Result, RewardPool, combine_terms
from spmdflow.weights.architecture import Architecture
from spmdflow.worker_api.command import Command
from spmdflow.worker_api.metric import Mean, Metric, Sum
from spmdflow.worker_api.register import register
from spmdflow.worker_api.worker import Worker, WorkerContext
from spmdflow.workers.micro_batch import MicroBatch

READS = ("prompts", "responses", "prompt_text", "row")
_WRITES = ("scores", "token_level_rewards", "valid", "response_text", "score_terms")
_COST_WRITES = ("costs", "token_level_costs", "cost_valid")


class RewardWorker(Worker):
    """Scores responses with `cfg.model`, `cfg.function` or a sum of both, according to the
    settings.

    A function gets prompt and response as texts, which together are the text of all tokens
    (`datasets.tokenizer`), and `row`: the fields of the data row and `response_tokens`, a number.
    """

    role = "reward"

    @classmethod
    def layout_of(cls, cfg: RewardConfig, ranks: tuple[int, ...]) -> Layout:
        """Layout of the reward model. Functions alone are data-parallel."""
        if cfg.model:
            return _ModelScorer.layout_of(cfg, ranks)
        return Layout.data_parallel(ranks)

    @classmethod
    def needed_groups(cls, cfg: RewardConfig, layout: Layout) -> list[tuple[int, ...]]:
        """Groups of the reward model. Functions alone need only the pool's group."""
        if cfg.model:
            return _ModelScorer.needed_groups(cfg, layout)
        return [layout.ranks]

    @classmethod
    def host_groups(cls, cfg: RewardConfig, layout: Layout) -> list[tuple[int, ...]]:
        """Also tp_cp: one rank of each such group calls the functions and shares the results."""
        return axis_groups(layout, ("replica", "dp", "tp_cp"))

    def __init__(self, cfg: RewardConfig, context: WorkerContext) -> None:
        """Loads the reward model, if there is one, and starts processes for functions on one rank
        per tp_cp group."""
        super().__init__(cfg, context)
        self._tokenizer = load_tokenizer(cfg.tokenizer_path)
        terms = reward_terms(f"{self.role}.function", cfg.function) or (RewardTerm("", MODEL),)
        self._model_terms = [term for term in terms if term.is_model]
        self._model = _ModelScorer(cfg, context) if cfg.model else None
        self._has_functions = len(self._model_terms) < len(terms)
        coordinate = context.layout.coordinate(context.rank)
        # one rank of those with the same rows: a timeout may occur on one rank and not on another
        is_first = coordinate.tp == 0 and coordinate.cp == 0
        calls_functions = is_first and coordinate.pp == context.layout.pp_size - 1
        self._pool = (
            RewardPool.from_config(cfg) if self._has_functions and calls_functions else None
        )

    @register(
        transfer_mode="3D_PROTO",
        reads=READS,
        writes=_WRITES,
        early="judge",
    )
    def compute_reward(self, batch: TensorDict, *, prefix: str = "reward") -> TensorDict | None:
        """Return scores (B,) float32 and token_level_rewards (ragged float32) of the responses.

        token_level_rewards is the score at the last response token and 0 before it. With per_token
        it is the model's reward of each token plus what functions add at the last one, and scores
        are its sums. valid (B,) bool: False, and the score nan, where a function failed under
        on_error=drop; RewardError if too many failed. score_terms: the terms of each score, as
        JSON. response_text: the responses as text. prefix: of the metrics (means over valid rows,
        and distinct_2 of all responses); use another one for rows outside the training batch. None
        before the last pipeline stage.
        """
        if self._model is None:
            by_model = None
        else:
            by_model = self._model.scores(batch, self.call)
        if by_model is None and self._model is not None:
            return None  # before the last stage
        early_judgement = self.early_result
        self.early_result = None
        texts, judged = (
            self.judge(batch, self.call) if early_judgement is None else early_judgement.result()
        )
        judgement = self._share_judgement(judged)
        results = self._sum_up(judgement, by_model)
        drops = self.cfg.on_error == "drop"
        valid = torch.tensor([not (drops and result.get("errors")) for result in results]).bool()
        scores = torch.tensor([result["score"] for result in results], dtype=torch.float32)
        valid_results = []
        for result, counts in zip(results, valid.tolist()):
            if counts:
                valid_results.append(result)
        metrics: dict[str, Metric] = {
            "mean": Mean(float(scores[valid].double().sum()), len(valid_results))
        }
        different, num_rows = distinct_share(batch["responses"])
        if num_rows:
            metrics["distinct_2"] = Mean(different, num_rows)
        metrics |= average_terms(valid_results)
        if drops:
            metrics.pop("errors", None)
            metrics |= count_dropped(
                self.context,
                self.context.layout.axis_group(self.context.rank, "dp"),
                valid,
                most=self.cfg.max_failed_fraction,
                key=f"{self.role}.max_failed_fraction",
                first_failure=judgement.first_failure,
            )
        self.report({f"{prefix}/{name}": metric for name, metric in metrics.items()})
        scores[~valid] = torch.nan
        columns = {
            "scores": scores,
            "token_level_rewards": self._token_rewards(scores, by_model, batch),
            "valid": valid,
        }
        result_columns = TensorDict(columns, batch_size=batch.batch_size)
        result_columns.set_non_tensor("response_text", texts)
        terms = []
        for row in results:
            terms.append({name: x for name, x in row.items() if name != "score"})
        result_columns.set_non_tensor("score_terms", list(map(json.dumps, terms)))
        return result_columns

    def judge(self, batch: TensorDict, call: Command) -> tuple[list[str], Judgement | None]:
        """Return the text of each response and, on the rank that calls functions, their results.

        The second value is None on other ranks and if there are no functions. Runs in a separate
        thread while models generate or score (see `register`), so it changes no attribute.
        """
        texts = decode_responses(batch, self._tokenizer)
        if self._pool is None:
            return texts, None
        lengths = lengths_of(batch["responses"]).tolist()
        rows = []
        for row, length in zip(batch["row"], lengths, strict=True):
            rows.append(json.loads(row) | {"response_tokens": length})
        prompts = list(batch["prompt_text"])
        row_ids = call.row_ids.tolist()
        return texts, self._pool.score(prompts, texts, rows, row_ids=row_ids)

    @property
    def frozen_folder(self) -> Path | None:
        """Folder of the reward model, if there is one."""
        if self.cfg.model:
            return Path(self.cfg.model.path)
        return None

    def close(self) -> None:
        """Ends the worker processes of reward functions."""
        super().close()
        if self._pool is not None:
            self._pool.close()

    def _weigh(self, by_model: Tensor) -> list[Result]:
        """Return the weighted score of each row, with its terms: {"score": weight * score, ...}.

        by_model: the model's scores (B,), or ragged scores of tokens, whose sum is the row's score.
        """
        if is_ragged(by_model):
            by_model = pad(by_model).double().sum(-1)
        result = []
        for score in by_model.tolist():
            result.append(combine_terms(self._model_terms, {0: {"score": score}}))
        return result

    def _token_rewards(self, scores: Tensor, by_model: Tensor | None, batch: TensorDict) -> Tensor:
        """Return token_level_rewards, ragged float32, whose sums are the scores.

        Without per_token: each score at the last response token. Otherwise the model's weighted
        rewards of the tokens, to which the last token adds what the score has beyond their sum (of
        functions).
        """
        if by_model is None or not is_ragged(by_model):
            return put_at_last_token(scores, lengths_of(batch["responses"]).cpu())
        (unit,) = self._weigh(torch.ones(1))
        rewards = unit["score"] * by_model.values().double()
        if self._has_functions:
            sums = pad(ragged(rewards, lengths_of(by_model))).sum(-1)
            lengths = lengths_of(by_model).cpu()
            rewards = rewards + put_at_last_token((scores - sums).float(), lengths).values()
        return ragged(rewards.float(), lengths_of(by_model))

    def _share_judgement(self, judged: Judgement | None) -> Judgement:
        """Return the judgement of the rank that called the functions, on all ranks with its rows.

        The tp_cp group calls it together. An empty judgement if there are no functions.
        """
        if not self._has_functions:
            return Judgement(results=[])
        peers = self.context.layout.axis_group(self.context.rank, "tp_cp")
        if len(peers) > 1:
            group = self.context.groups.get(peers, backend="gloo")
            plain = None if judged is None else asdict(judged)
            shared = all_gather_plain(plain, group)[0]
            judged = None if shared is None else Judgement(**shared)
        assert judged is not None, "no rank of the group has called the functions"
        return judged

    def _sum_up(self, judgement: Judgement, by_model: Tensor | None) -> list[Result]:
        """Return each row's {"score": functions' score + model's weighted score, further terms}.

        If there are only functions or only a model, their results are returned alone.
        """
        model_results = [] if by_model is None else self._weigh(by_model)
        if not self._has_functions:
            return model_results
        if by_model is None:
            return judgement.results
        results = []
        for of_functions, of_model in zip(judgement.results, model_results, strict=True):
            score = of_functions["score"] + of_model["score"]
            results.append(of_functions | of_model | {"score": score})
        return results


class _ModelScorer(EngineWorker):
    """A sequence-classification model. Its output at the last token is the score.

    If the model's tokenizer has other ids than `cfg.tokenizer_path`, the texts are encoded again.
    """

    role = "reward"
    head = "scalar"

    def __init__(self, cfg: RewardConfig, context: WorkerContext) -> None:
        """Builds the engine, and compares the model's vocabulary with the actor's."""
        super().__init__(cfg, context)
        folder = Path(self.cfg.model.path)
        actor = Path(cfg.tokenizer_path)
        self._encodes = own_vocabulary(f"{context.name}.model.path", folder, actor) is not None
        self._max_positions = Architecture.sizes_from_folder(folder).max_positions

    def scores(self, batch: TensorDict, call: Command) -> Tensor | None:
        """Return the model's score of each row, (B,) float32 on the host.

        With per_token it is ragged, with one score for each response token. Sets `call`. If the
        model has its own vocabulary, the texts are encoded again and micro-batches counted again.
        None before the last pipeline stage. RewardError if a score is not finite.
        """
        self.call = call
        rows = batch.select("prompts", "responses")
        if self._encodes:
            rows = self._encode_again(rows)
            count = self.engine.count_micro_batches(rows)
            self.call = replace(self.call, num_micro_batches=count)

        def score(output: ScalarOutput, micro: MicroBatch) -> dict[str, Tensor]:
            """Return a micro-batch's scores: of each row's last token, or of response tokens."""
            if not self.cfg.per_token:
                return {"scores": output.at(micro.ends)}
            lengths = micro.response_lengths
            firsts = micro.ends + 1 - lengths.cumsum(0)  # by index among all response tokens
            positions = firsts.repeat_interleave(lengths) + torch.arange(len(micro.targets)).to(
                firsts
            )
            return {"scores": micro.spread(output.at(positions))}

        columns = self.score(rows, score)
        if columns is None:
            return None
        scores = columns["scores"].float().cpu()
        finite = (pad(scores) if self.cfg.per_token else scores[:, None]).isfinite().all(-1)
        if not finite.all():
            row = int(finite.int().argmin())
            path = self.cfg.model.path
            got = f"a score that is not finite for row {self.call.row_ids[row]}"
            do = f"check the weights of {path}, or set model.dtype=float32"
            raise RewardError.of("reward model", got, "finite scores", do)
        return scores

    def _encode_again(self, rows: TensorDict) -> TensorDict:
        """Encode the text of prompt and response with the model's own tokenizer.

        Returns rows whose prompt is the encoded text and whose response is empty. RewardError if a
        text has more tokens than the model has positions.
        """
        pairs = zip(rows_of(rows["prompts"]), rows_of(rows["responses"]), strict=True)
        tokens = []
        for prompt, response in pairs:
            tokens.append([*prompt.tolist(), *response.tolist()])
        path = self.cfg.model.path
        most = self._max_positions
        own = load_tokenizer(path)
        encoded = reencode(load_tokenizer(self.cfg.tokenizer_path), own, tokens)
        lengths = torch.tensor([len(ids) for ids in encoded], dtype=torch.int64)
        if most and bool((lengths > most).any()):
            got = f"a text of {int(lengths.max())} tokens by the tokenizer of {path}"
            do = "lower data.max_prompt_tokens or actor.rollout.max_new_tokens"
            raise RewardError.of("reward model", got, f"at most the model's {most} positions", do)
        values = torch.tensor([word for ids in encoded for word in ids], dtype=torch.int64)
        nothing = ragged(values[:0], torch.zeros_like(lengths))
        columns = {"prompts": ragged(values, lengths), "responses": nothing}
        return TensorDict(columns, batch_size=rows.batch_size)


def average_terms(results: list[Result]) -> dict[str, Metric]:
    """Return a mean for each number in the results, over the results that have it.

    "score" and "answer" are omitted. "errors" are added up instead.
    """
    names = sorted({name for result in results for name in result} - {"score", "answer"})
    metrics: dict[str, Metric] = {}
    for name in names:
        values = []
        for result in results:
            if name in result:
                values.append(result[name])
        metrics[name] = Sum(sum(values)) if name == "errors" else Mean(sum(values), len(values))
    return metrics


def put_at_last_token(scores: Tensor, lengths: Tensor) -> Tensor:
    """Return a ragged column (B,) with each score at the last token of its response, 0 before it.

    lengths (B,): tokens of each response. The score of an empty response is lost.
    """
    values = torch.zeros(int(lengths.sum()))
    ends = torch.cumsum(lengths, 0)
    values[ends[lengths > 0] - 1] = scores[lengths > 0]
    return ragged(values, lengths)


def count_dropped(
    context: WorkerContext,
    peers: tuple[int, ...],
    valid: Tensor,
    *,
    most: float,
    key: str,
    first_failure: str,
) -> dict[str, Metric]:
    """Return the metrics dropped (number) and dropped_share of this rank's failed rows.

    valid (B,): False for a failed row. All ranks in peers must call it together. RewardError if a
    larger fraction than `most` of the rows failed, over all peers; only the first peer with a
    failed row raises it. key: the setting with that fraction. first_failure: a text about this
    rank's rows, for the error.
    """
    counts = torch.zeros(2, len(peers))
    counts[:, peers.index(context.rank)] = torch.tensor([float((~valid).sum()), len(valid)])
    failed, rows = context.groups.reducer(peers)(counts).long()
    fraction = int(failed.sum()) / max(int(rows.sum()), 1)
    first = peers[int(failed.bool().int().argmax())]
    if fraction > most and first == context.rank:
        cause = f"\nthe first failure: {first_failure}" if first_failure else ""
        raise RewardError(
            f"{key}: got {int(failed.sum())} failed rows among the {int(rows.sum())} of one "
            f"call ({fraction:.3g}), expected at most {most:g}; fix the function, or set a "
            f"larger fraction, such as {key}={math.ceil(20 * fraction) / 20:g}{cause}"
        )
    count = float((~valid).sum())
    return {"dropped": Sum(count), "dropped_share": Mean(count, len(valid))}


class CostWorker(RewardWorker):
    """Scores how harmful responses are, with `cfg.model` or `cfg.function`."""

    role = "cost"

    @register(transfer_mode="3D_PROTO", reads=READS, writes=_COST_WRITES, early="judge")
    def compute_cost(self, batch: TensorDict, *, prefix: str = "cost") -> TensorDict | None:
        """Return costs (B,) and token_level_costs: what `compute_reward` returns as rewards.

        cost_valid (B,) bool is its column valid. None before the last pipeline stage.
        """
        rewards = self.compute_reward(batch, prefix=prefix)
        if rewards is None:
            return None
        source_names = ("scores", "token_level_rewards", "valid")
        columns = {}
        for name, column in zip(_COST_WRITES, source_names, strict=True):
            columns[name] = rewards[column]
        return TensorDict(columns, batch_size=batch.batch_size)
