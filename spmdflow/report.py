"""Print the results of runs as text and draw curve.png: `python -m spmdflow.report RUN_DIR ...`.

It prints the curve of each chosen metric, a table of first, lowest, highest and last values,
seconds by stage, predicted seconds, failures, and settings that differ between the runs. It reads
the same files as `spmdflow view`, also while a run is live or after it was killed.

--throughput prints what a claim of tokens per second needs instead (spmdflow/throughput).
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spmdflow.errors import DataError
from spmdflow.requirement import install_command
from spmdflow.throughput.measured_step import WARM_UP
from spmdflow.throughput.summary import summarize
from spmdflow.throughput.text import joined_blocks
from spmdflow.tracking.progress import Point, Sample, print_samples, stage_seconds, text_curve
from spmdflow.tracking.reading import RunFiles, failure_text, setting_differences

DEFAULT_KEYS = ("eval/accuracy", "reward/mean")
_TABLE_KEYS = (
    *DEFAULT_KEYS,
    "eval/mean",
    "actor/approx_kl",
    "actor/reference_kl_per_response",
    "actor/clip_fraction",
    "actor/entropy",
    "critic/explained_variance",
    "rollout/drift",
    "rollout/response_length",
    "perf/tokens_per_second",
    "time/step_seconds",
)
_MOST_SAMPLES = 4
"""Samples of one step that are printed."""
Records = Sequence[Mapping[str, Any]]  # Any: JSON values; null where a metric was not finite


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report of each run, and draw its curves into RUN_DIR/curve.png.

    Then print the settings that differ between the runs. --png sets the picture of the last run.
    With --throughput it prints a block for each run instead, and draws nothing. Returns 0, or 2
    (with the reason on stderr) if a run has no metrics or lacks a requested one, or if options do
    not go together.
    arguments: default: sys.argv.
    """
    options = _parser().parse_args(arguments)
    try:
        check_options(options)
        if options.throughput:
            sys.stdout.write(throughput_text(options))
            return 0
    except DataError as err:
        sys.stderr.write(f"{err}\n")
        return 2
    runs = list(map(RunFiles, options.run_dirs))
    wanted = options.keys and options.keys.split(",")
    try:
        drawn = []
        for run in runs:
            drawn.append((run, drawn_keys(run.needed_metrics(), wanted)))
    except DataError as err:
        sys.stderr.write(f"{err}\n")
        return 2
    for run, keys in drawn:
        sys.stdout.write(run_text(run.path, run.metrics, keys))
        sys.stdout.writelines(f"{line}\n" for line in _run_facts(run))
        if options.png and run is runs[-1]:
            png_path = options.png
        else:
            png_path = run.path / "curve.png"
        if keys:
            sys.stdout.write(f"\ncurve: {write_png(run.metrics, keys, png_path)}\n")
        if options.samples:
            for step, samples in first_and_last_samples(run.samples):
                sys.stdout.write("\n")
                print_samples(step, samples, file=sys.stdout)
    sys.stdout.writelines(f"{line}\n" for line in _settings_table(runs))
    return 0


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m spmdflow.report", description=__doc__)
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR")
    parser.add_argument(
        "--keys",
        help=f"metrics to draw, separated by commas (default: {','.join(DEFAULT_KEYS)}); "
        "docs/METRICS.md lists all of them",
    )
    parser.add_argument(
        "--png",
        type=Path,
        help="where to write the picture of the last run (default: RUN_DIR/curve.png)",
    )
    parser.add_argument(
        "--samples",
        action="store_true",
        help="also print samples of the first and of the last step that has them, held-out ones if "
        "there are any",
    )
    parser.add_argument(
        "--throughput",
        action="store_true",
        help="print tokens per second of whole steps, with everything that such a claim needs",
    )
    parser.add_argument(
        "--warm-up",
        type=int,
        metavar="N",
        help=f"with --throughput: do not measure the first N steps of each start ({WARM_UP})",
    )
    parser.add_argument("--json", action="store_true", help="with --throughput: print JSON")
    return parser


def check_options(options: argparse.Namespace) -> None:
    """Raise DataError for options that do not go together, or a negative warm-up."""
    if options.throughput:
        for name in ("keys", "png", "samples"):
            if getattr(options, name):
                got = f"--{name} with --throughput"
                do = f"omit --{name}, or call the report once without --throughput"
                raise DataError.of("report", got, "one of the two", do)
        if options.warm_up is not None and options.warm_up < 0:
            do = "write --warm-up 0 to measure all steps"
            raise DataError.of("report", f"--warm-up {options.warm_up}", "at least 0", do)
        return
    for name, is_given in (("--json", options.json), ("--warm-up", options.warm_up is not None)):
        if is_given:
            got = f"{name} without --throughput"
            raise DataError.of("report", got, "both", f"add --throughput, or omit {name}")


def throughput_text(options: argparse.Namespace) -> str:
    """Return the blocks of all runs or, with --json, a JSON list with an object for each.

    Raises DataError if one of them has no finished step.
    """
    warm_up = WARM_UP if options.warm_up is None else options.warm_up
    summaries = []
    for run_dir in options.run_dirs:
        summaries.append(summarize(RunFiles(run_dir), warm_up=warm_up))
    if options.json:
        return json.dumps([summary.to_plain() for summary in summaries], indent=1) + "\n"
    return joined_blocks(summaries)


def drawn_keys(records: Records, wanted: Sequence[str] | None) -> list[str]:
    """Return the metrics to draw: the wanted ones or, if None, the defaults that the run has.

    Raises DataError, with similar names, if no step has a wanted one.
    """
    present = set()
    for record in records:
        for name in record:
            if name != "step":
                present.add(name)
    if wanted is None:
        result = []
        for key in DEFAULT_KEYS:
            if key in present:
                result.append(key)
        return result
    unknown = []
    for key in wanted:
        if key not in present:
            unknown.append(key)
    if unknown:
        raise DataError(
            f"report: no step has {', '.join(unknown)}, expected names of metrics"
            f"{''.join(_nearest(key, present) for key in unknown)}; see docs/METRICS.md, or choose "
            f"among {', '.join(sorted(present))}"
        )
    return list(wanted)


def _nearest(key: str, present: Collection[str]) -> str:
    """Return " (did you mean NAME?)" for the metric that was probably meant; "" if none is near.

    A name spelled alike comes first, then one that contains all words of `key`.
    """
    words = set(key.replace("/", "_").split("_"))
    alike = []
    for name in sorted(present):
        if words <= set(name.replace("/", "_").split("_")):
            alike.append(name)
    near = difflib.get_close_matches(key, present, 1, 0.7) or alike
    if near:
        return f" (did you mean {near[0]}?)"
    return ""


def first_and_last_samples(records: Records) -> list[tuple[int, list[Sample]]]:
    """Return (step, samples) of the first and of the last step that has samples.

    At most 4 samples of a step, each of another prompt. If there are samples of evaluations, only
    these count. One step if all are of the same, and [] without samples. records: of samples.jsonl.
    """
    held_out = [record for record in records if record.get("phase") == "eval"]
    chosen = held_out or list(records)
    if not chosen:
        return []
    result = []
    for step in sorted({chosen[0]["step"], chosen[-1]["step"]}):
        by_prompt: dict[str, Sample] = {}
        for record in chosen:
            if record["step"] == step and record["prompt"] not in by_prompt:
                score = math.nan if record["score"] is None else float(record["score"])
                by_prompt[record["prompt"]] = Sample(record["prompt"], record["response"], score)
        result.append((int(step), list(by_prompt.values())[:_MOST_SAMPLES]))
    return result


def points_of(records: Records, key: str) -> list[Point]:
    """Return (step, value) of every step that has this metric and whose value is finite."""
    points = []
    for record in records:
        if record.get(key) is not None:
            points.append((record["step"], record[key]))
    return points


def run_text(run_dir: Path, records: Records, keys: Sequence[str]) -> str:
    """Return the report of a run as text: a curve per key, then tables of values and of stages."""
    steps = [record["step"] for record in records]
    lines = [f"{run_dir}: steps {min(steps)} to {max(steps)}", ""]
    for key in keys:
        lines += [*text_curve(key, points_of(records, key)), ""]
    shown = []
    for key in dict.fromkeys([*keys, *_TABLE_KEYS]):
        if points_of(records, key):
            shown.append(key)
    lines += _value_table(records, shown)
    lines += _stage_table(records)
    return "\n".join(lines) + "\n"


def _run_facts(run: RunFiles) -> Iterator[str]:
    """Yield lines about a run: seconds of a step, predicted and measured, failures, settings.

    Settings are those that an earlier start of the run had, where they differ from the last one's.
    """
    stages = {}
    for stage in run.prediction.get("stages", ()):
        stages[stage["stage"]] = stage
    step = stages.get("step", {})
    if step.get("predicted") and step.get("measured"):
        seconds = f"predicted {step['predicted']:.3g} s, measured {step['measured']:.3g} s"
        yield f"\na step: {seconds} (prediction.txt)"
    yield from (f"\n{name}: {failure_text(each)}" for name, each in run.failures.items())
    for name, before in run.earlier_settings.items():
        changed = setting_differences([before, run.settings]).items()
        yield from (f"\n{name}: {key}: {old} -> {new}" for key, (old, new) in changed)


def _settings_table(runs: Sequence[RunFiles]) -> Iterator[str]:
    """A block for each setting that differs between runs."""
    for key, values in setting_differences([run.settings for run in runs]).items():
        yield f"\n{key}"
        yield from (f"  {value!s:<24} {run.name}" for value, run in zip(values, runs, strict=True))


def write_png(records: Records, keys: Sequence[str], path: Path) -> str:
    """Draw the keys below one another into a PNG file; return its path.

    Returns why there is none if matplotlib is missing or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return f"no picture without matplotlib; {install_command('plot')}"
    figure = Figure(figsize=(8, 2.8 * len(keys)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(keys), 1, sharex=True, squeeze=False)[:, 0]
    for axis, key in zip(axes, keys, strict=True):
        points = points_of(records, key)
        steps = [x for x, _ in points]
        values = [y for _, y in points]
        axis.plot(steps, values, marker="o" if len(points) <= 60 else "", markersize=3)
        axis.set_ylabel(key)
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("step")
    axes[0].set_title(path.absolute().parent.name)
    try:
        figure.savefig(path, dpi=120)
    except OSError as err:
        return f"no picture: cannot write {path} ({err.strerror}); set a writable file with --png"
    return str(path)


def _value_table(records: Records, keys: Sequence[str]) -> list[str]:
    """Return the lines of a table: first, lowest, highest and last value of each metric."""
    lines = [f"{'metric':<34} {'first':>10} {'lowest':>10} {'highest':>10} {'last':>10}"]
    for key in keys:
        values = [value for _, value in points_of(records, key)]
        numbers = (values[0], min(values), max(values), values[-1])
        lines.append(f"{key:<34} " + " ".join(f"{number:>10.4g}" for number in numbers))
    return lines


def _stage_table(records: Records) -> list[str]:
    """Return the lines of a table: total seconds of each stage, longest first, with their share.

    The share is that of all steps' seconds. [] if the run has recorded no seconds.
    """
    totals: dict[str, float] = {}
    for record in records:
        numbers = {}
        for name, x in record.items():
            if isinstance(x, int | float):
                numbers[name] = x
        for stage, seconds in stage_seconds(numbers).items():
            totals[stage] = totals.get(stage, 0.0) + seconds
    step_seconds = sum(seconds for _, seconds in points_of(records, "time/step_seconds"))
    if not totals or not step_seconds:
        return []
    rows = [
        f"{stage:<34} {seconds:>10.1f} {100 * seconds / step_seconds:>9.1f}%"
        for stage, seconds in sorted(totals.items(), key=lambda item: -item[1])  # longest first
    ]
    return ["", f"{'stage':<34} {'seconds':>10} {'of steps':>10}", *rows]


if __name__ == "__main__":
    sys.exit(main())
