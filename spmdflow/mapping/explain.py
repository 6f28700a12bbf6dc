"""A mapping as text: the best placements, their ratios, what limits each and why it loses."""

from __future__ import annotations

from spmdflow.mapping.auto import TIE, Mapping
from spmdflow.mapping.placed import Placed


def explain(mapping: Mapping, *, count: int = 10) -> str:
    """A line for each of the best `count` placements, and the verdict.

    Each line: ratio to the best, seconds of a step, pools, seconds of each stage, what limits it
    (stage, call, cause), and where it loses most against the best.
    """
    best = mapping.best[0]
    lines = [
        f"{_counted(mapping.num_partitions, 'partition')} of {_counted(_count(best), 'model')} on "
        f"{_counted(mapping.num_ranks, 'rank')}, pools in multiples of {mapping.unit}; searched in "
        f"{mapping.seconds_searched:.2f} s",
        _verdict(mapping),
    ]
    for number, placed in enumerate(mapping.best[:count], 1):
        lines.append(_line(number, placed, best))
        lines.append(f"      {_strategies(placed)}")
    return "\n".join(lines)


def reason(placed: Placed, best: Placed) -> str:
    """Where a placement loses most against the best, in words; what it gains beside."""
    losses = {
        stage: seconds - best.stage_seconds.get(stage, 0.0)
        for stage, seconds in placed.stage_seconds.items()
    }
    stage = max(losses, key=lambda name: losses[name])
    if losses[stage] <= 0:
        return "the same"
    gains = -sum(loss for loss in losses.values() if loss < 0)
    pool, call, cause = _slowest(placed, stage)
    gained = f", gains {gains:.3g} s elsewhere" if gains > 0 else ""
    return f"loses {losses[stage]:.3g} s in {stage} ({call} on {pool}: {cause}){gained}"


def _verdict(mapping: Mapping) -> str:
    best = mapping.best[0]
    equals = [placed for placed in mapping.best if placed.seconds <= TIE * best.seconds]
    if len(equals) > 1:
        titles = "; ".join(placed.title for placed in equals)
        return f"a tie: {len(equals)} placements within 1 %, the first is taken: {titles}"
    if mapping.num_partitions == 1:
        return f"one model: there is one way to share ranks, {best.title}"
    if len(mapping.best) == 1:
        return f"only {best.title} fits"
    ratio = mapping.best[1].seconds / best.seconds
    return f"best: {best.title}; the next costs {100 * (ratio - 1):.1f} % more"


def _line(number: int, placed: Placed, best: Placed) -> str:
    stages = ", ".join(f"{name} {seconds:.3g}" for name, seconds in placed.stage_seconds.items())
    stage, _, call, cause = placed.limit
    why = f"limit: {cause} of {call} in {stage}"
    if placed is not best:
        why += f"; {reason(placed, best)}"
    ratio = placed.seconds / best.seconds
    return f"{number:4d}. x{ratio:.3f}  {placed.seconds:.4g} s  {placed.title}  [{stages}]  {why}"


def _strategies(placed: Placed) -> str:
    return ", ".join(
        f"{role} {strategy}" for pool in placed.pools for role, strategy in pool.strategies.items()
    )


def _slowest(placed: Placed, stage: str) -> tuple[str, str, str]:
    """(pool, call, cause) of the largest call of the pool that decides a stage."""
    pool = max(placed.pools, key=lambda one: one.stage_seconds.get(stage, 0.0))
    calls = {n: e for n, e in pool.estimates.items() if placed.stages[n] == stage}
    number = max(calls, key=lambda n: calls[n].seconds)
    return str(pool), placed.titles[number], calls[number].limit


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _count(placed: Placed) -> int:
    return sum(len(pool.roles) for pool in placed.pools)
