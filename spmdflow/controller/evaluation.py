"""Evaluation between two steps: the held-out rows through the models of the script.

Script thread. Its calls are ordinary calls of the script, marked with the phase "eval".
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from spmdflow.checkpoint.disk import write_atomically
from spmdflow.config.reward import knows_right
from spmdflow.controller.batch import Batch
from spmdflow.controller.caller import Caller
from spmdflow.controller.group import WeightLink, WorkerGroup
from spmdflow.controller.prompts import PromptStream
from spmdflow.data.row_id import seed_of
from spmdflow.errors import ProtocolError, RewardError
from spmdflow.log import print_text
from spmdflow.tracking.estimate import (
    estimate_metrics,
    estimates,
    evaluation_table,
    prompt_accuracies,
)

Generate = Callable[..., Batch]
"""A script's own generation: generate(rows) or generate(rows, greedy=...) -> rows."""

logger = logging.getLogger(__name__)

EVALUATION_FILE = "evaluation.jsonl"


class Evaluation:
    """Judges held-out rows, at most once a step."""

    def __init__(self, caller: Caller, links: Sequence[WeightLink], config: Any) -> None:
        """links: the flow's list, to which `flow.connect` appends."""
        self._caller = caller
        self._links = links
        self._config = config
        self._seed = seed_of(config.run.seed, "bootstrap")
        self._evaluated_at = -1

    def run(
        self,
        stream: PromptStream,
        model: WorkerGroup,
        others: Sequence[WorkerGroup],
        generate: Generate | None,
        number: int,
    ) -> dict[str, float]:
        """Evaluate on the held-out prompts; return estimates as metrics. See `Flow.evaluate`.

        A second call in one step does nothing and returns {}. The calls of an evaluation have the
        phase "eval".
        number: of the step, 0 before the first.
        others: the reward that scores the model's responses, or the groups whose columns the
        model's `evaluation` reads; none: the model runs episodes.
        """
        if self._evaluated_at == number:
            return {}
        self._evaluated_at = number
        self._caller.phase = "eval"
        try:
            return self._judge(stream, model, others, generate)
        finally:
            self._caller.phase = "train"

    def _judge(
        self,
        stream: PromptStream,
        model: WorkerGroup,
        others: Sequence[WorkerGroup],
        generate: Generate | None,
    ) -> dict[str, float]:
        """Evaluate like `run`, without its check and phase.

        If the model's class names a method in `evaluation`, adds the columns of the others'
        `evaluation_columns` to the rows, calls the method, which reports the metrics itself, and
        returns {}. Otherwise returns what `_score` does.
        """
        method = getattr(model.target.worker_class, "evaluation", None)
        if method is None:
            return self._score(stream, model, others, generate)
        rows = stream.eval_batch()
        for group in others:
            columns = getattr(group.target.worker_class, "evaluation_columns", None)
            if columns is not None:
                rows |= getattr(group, columns)(rows)
        getattr(model, method)(rows, prefix="eval")
        return {}

    def _score(
        self,
        stream: PromptStream,
        model: WorkerGroup,
        others: Sequence[WorkerGroup],
        generate: Generate | None,
    ) -> dict[str, float]:
        """Score greedy and sampled responses to the held-out prompts; return estimates as metrics.

        Syncs the weights of all links first. The reward's call reports the metrics of the greedy
        responses itself. The result has pass@k and maj@n of the samples, with intervals, over the
        prompts without a failed response; {} without samples. A model with an environment and no
        reward runs episodes instead (`_play`). ProtocolError unless `others` is exactly one group.
        """
        rollout = getattr(model.target.settings, "rollout", None)
        if not others and getattr(rollout, "episode", None) is not None:
            return self._play(stream, model)
        if len(others) != 1:
            got = f"{model} and {len(others)} more groups"
            expected = "the reward that scores its responses"
            do = "write flow.evaluate(actor, reward, every=cfg.eval_every)"
            raise ProtocolError.of("flow.evaluate", got, expected, do)
        (reward,) = others
        for link in self._links:
            link.sync()
        reward.compute_reward(_respond(model, generate, stream.eval_batch(), greedy=True))
        samples = stream.eval_samples()
        if not len(samples):
            return {}
        sampled = _respond(model, generate, samples, greedy=False)
        sampled |= reward.compute_reward(sampled, prefix="eval/sampled")
        rows = judged_samples(sampled)
        shares = _shares([rows[index] for index in _complete_indices([rows])])
        return estimate_metrics(estimates(shares, seed=self._seed), "eval")

    def _play(self, stream: PromptStream, model: WorkerGroup) -> dict[str, float]:
        """Sync the weights of all links; run an episode of greedy replies for each held-out row.

        The call reports its metrics itself; returns {}.
        """
        for link in self._links:
            link.sync()
        model.run_episodes(stream.eval_batch(), greedy=True)
        return {}

    def report(self, greedy: Batch, sampled: Batch, run_dir: Path | None) -> dict[str, float]:
        """Return estimates as metrics, print them as a table, and write RUN_DIR/evaluation.jsonl.

        See `Flow.report`. Estimates the greedy score, its accuracy if the reward has a function,
        and pass@k and maj@n if there are samples. Counts only prompts without a failed response;
        RewardError if there is none. If standard output fails, only warns.
        run_dir: None in a dry run, which reads the scores, writes nothing and returns {}.
        """
        if run_dir is None:
            for batch in (greedy, sampled):
                if len(batch):
                    batch.fetch_for("filter", *({"scores"} & set(batch.columns)))
            return {}
        by_prompt = judged_samples(greedy)
        samples = judged_samples(sampled)
        whole = _complete_indices([by_prompt, samples] if samples else [by_prompt])
        firsts = [by_prompt[index][0] for index in whole]
        numbers: dict[str, list[float]] = {"score": [row.score or 0.0 for row in firsts]}
        if knows_right(self._config.reward):
            numbers = {"accuracy": [row.right for row in firsts]} | numbers
        shares = _shares([samples[index] for index in whole]) if samples else {}
        by_place = {}
        for name, of_prompts in shares.items():
            by_place[name] = dict(zip(whole, of_prompts))
        write_judged(run_dir / EVALUATION_FILE, greedy, by_prompt, samples, by_place)
        estimated = estimates(numbers | shares, seed=self._seed)
        lengths = [row[0].num_tokens for row in by_prompt]
        facts: dict[str, float] = {"prompts": len(whole)}
        if len(whole) < len(by_prompt):
            facts["prompts skipped (failed)"] = len(by_prompt) - len(whole)
        facts["samples of each"] = len(samples[0]) if samples else 0
        facts["mean tokens, greedy"] = mean(lengths)
        if samples:
            facts["mean tokens, sampled"] = mean(s.num_tokens for row in samples for s in row)
        try:
            print_text(
                evaluation_table("evaluation (accuracy and score: greedy)", estimated, facts)
            )
        except OSError as err:
            logger.warning(
                "standard output does not take the table of the evaluation (%s); its numbers are "
                "in metrics.jsonl, its samples in %s",
                err,
                run_dir / EVALUATION_FILE,
            )
        return estimate_metrics(estimated, "eval") | {
            "eval/response_length": facts["mean tokens, greedy"]
        }


def _respond(model: WorkerGroup, generate: Generate | None, rows: Batch, *, greedy: bool) -> Batch:
    """Return responses to held-out rows, in the order of the rows.

    Calls `generate` if the script gives one, with `greedy` only if it has such a parameter;
    otherwise the model's generate_sequences. ProtocolError unless generate returns a Batch with the
    same row ids.
    """
    if generate is None:
        generated: Any = model.generate_sequences(rows, greedy=greedy)
        return generated
    takes_greedy = "greedy" in inspect.signature(generate).parameters
    generated = generate(rows, greedy=greedy) if takes_greedy else generate(rows)
    if not isinstance(generated, Batch) or set(generated.ids) != set(rows.ids):
        raise ProtocolError(
            f"evaluate: {getattr(generate, '__name__', 'generate')} returned {generated!r}, "
            f"expected a Batch of the {len(rows)} rows that it was given; return all of them, "
            f"with the column responses"
        )
    return generated.ordered_like(rows)


def _complete_indices(batches: Sequence[Sequence[Sequence[Judged]]]) -> list[int]:
    """Return the indices of the prompts that have no failed response in any of the batches.

    batches: each has, for each prompt, a list of its samples. RewardError if there is no such
    prompt.
    """
    whole = []
    for index, rows in enumerate(zip(*batches, strict=True)):
        if all(sample.score is not None for row in rows for sample in row):
            whole.append(index)
    if not whole:
        raise RewardError(
            f"evaluate: got {len(batches[0])} prompts, each with a response whose reward function "
            f"failed, expected at least one without; fix reward.function"
        )
    return whole


def _shares(samples: Sequence[Sequence[Judged]]) -> dict[str, list[float]]:
    """Return pass@k and maj@n: name -> a number per prompt. samples: a list for each prompt."""
    return prompt_accuracies(
        [[sample.answer for sample in row] for row in samples],
        [[sample.right for sample in row] for row in samples],
    )


ACCURACY = "accuracy"
ANSWER = "answer"
"""Names under which a reward function says whether a response is right, and what it answers."""


class Judged(NamedTuple):
    """One scored response."""

    text: str
    score: float | None
    """None: the reward function failed, and the row was dropped."""
    right: float
    """accuracy if the function reports it, else 1 for a score of at least 1, else 0."""
    answer: str | None
    """answer if the function reports it (None: there is none), else the text, single-spaced."""
    num_tokens: int

    @classmethod
    def of(cls, text: str, score: float, terms: Mapping[str, Any], num_tokens: int) -> Judged:
        """Build from the columns of a row.

        terms: what the reward function returned besides the score.
        right: terms["accuracy"], else 1.0 for a score of at least 1, else 0.0. answer:
        terms["answer"], which may be None, else the text with single spaces. A nan score means that
        the function failed: score and answer are then None, and right is 0.0.
        """
        right = terms[ACCURACY] if ACCURACY in terms else float(score >= 1)
        answer = terms[ANSWER] if ANSWER in terms else " ".join(text.split())
        if score != score:  # nan
            return cls(text, None, 0.0, None, num_tokens)
        return cls(text, score, right, None if answer is None else str(answer), num_tokens)


def judged_samples(scored: Batch) -> list[list[Judged]]:
    """Fetch scored rows, and return the list of samples of each prompt; waits for the rows.

    Prompts are in the order of their first rows, the samples of a prompt in the order of its rows.
    """
    values = scored.fetch_for("evaluation", "response_text", "scores", "score_terms")
    rows = zip(*map(list, values.values()), scored.lengths("responses").tolist(), strict=True)
    groups: dict[int, list[Judged]] = {}
    for group, (text, score, terms, num_tokens) in zip(scored.parents.tolist(), rows, strict=True):
        sample = Judged.of(str(text), float(score), json.loads(str(terms)), num_tokens)
        groups.setdefault(group, []).append(sample)
    return list(groups.values())


def write_judged(
    path: Path,
    greedy_rows: Batch,
    greedy: Sequence[Sequence[Judged]],
    sampled: Sequence[Sequence[Judged]],
    numbers: Mapping[str, Mapping[int, float]],
) -> None:
    """Write one JSON line for each prompt: prompt, row, greedy, samples and its `numbers`.

    Replaces the file atomically. greedy: only the first response of each prompt is written. If
    `sampled` is empty, so is the line's list of samples. numbers: name -> index of the prompt ->
    number; prompts with a failed response have none. Fetches the prompts' texts, and waits for
    them.
    """
    values = greedy_rows.fetch_for("evaluation", "prompt_text", "row")
    lines = []
    for index, (prompt, row) in enumerate(zip(values["prompt_text"], values["row"], strict=True)):
        record = {
            "prompt": str(prompt),
            "row": json.loads(str(row)),
            "greedy": greedy[index][0]._asdict(),
            "samples": [sample._asdict() for sample in (sampled[index] if sampled else ())],
            **{
                name: of_prompts[index]
                for name, of_prompts in numbers.items()
                if index in of_prompts
            },
        }
        lines.append(json.dumps(record) + "\n")
    write_atomically(path, "".join(lines).encode())
