"""Placement: which role lives on which ranks. Integers and names only (paper section 4.1).

A placement is `colocate` (every role on all ranks), `split` (actor and reference on the first half,
the rest on the second; a separate generator is alone on the second half),
`standalone` (a pool per role, ranks shared out evenly) or a map `pool -> {roles: [...], ranks:
[...]}`. Roles on one pool take turns; pools are disjoint and run at the same time.

Every section of the settings that has an `engine` is a role, under the section's name, and gets a
place. A model runs on the pool that names it: its own name first (`flow.spawn(RewardWorker,
cfg.second, name="second")` on the pool of `second`), then the role of its class (`reward`). A model
whose settings have no engine, such as a custom worker of the script, needs no place: it shares the
pool of `reward`, otherwise the last pool, unless a map names its section or role, or it is spawned
with pool=. Where only actor and reference have engines, `split` gives the second half to sections
of the script's own classes. A settings class that lacks a section says so with
`reward: ClassVar[None] = None`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from spmdflow.errors import ConfigError

_POLICY_ROLES = ("actor", "reference")
_PRESETS = ("colocate", "split", "standalone")


@dataclass(frozen=True)
class Pool:
    """A set of ranks and the roles that live there."""

    roles: tuple[str, ...]
    ranks: tuple[int, ...]
    """Global ranks, ascending."""


def roles_of(cfg: Any) -> tuple[str, ...]:
    """Return the names of the models of a settings object: the fields that have an engine.

    They are followed by `more_roles` of its class: models that are spawned with another role's
    settings.
    """
    models = []
    for field in fields(cfg):
        if has_engine(getattr(cfg, field.name)):
            models.append(field.name)
    return (*models, *getattr(cfg, "more_roles", ()))


def has_engine(part: Any) -> bool:
    """Whether settings are those of a model with an engine (Any: a section, or plain settings)."""
    return is_dataclass(part) and any(field.name == "engine" for field in fields(part))


def pools_of(cfg: Any, ranks: Sequence[int]) -> dict[str, Pool]:
    """Return pool name -> pool of a settings object, with global ranks.

    Its placement counts from 0: number i means ranks[i]. A placement that is a map may also place
    sections without an engine, such as a reward function. With placement=split and no model besides
    actor and reference, the sections that the script's own class adds get the second half of the
    ranks. ConfigError as in `resolve_placement`.
    """
    parts = {}
    for field in fields(cfg):
        parts[field.name] = getattr(cfg, field.name)
    others = []
    for name, part in parts.items():
        if is_dataclass(part):
            others.append(name)
    roles = roles_of(cfg)
    if cfg.placement == "split" and set(roles) <= set(_POLICY_ROLES):
        # no model with an engine is left for the second half: take sections of the script's own
        own = []
        for name in others:
            if not type(parts[name]).__module__.startswith("spmdflow."):
                own.append(name)
        roles = (*roles, *(name for name in own if name not in roles))
    placed = resolve_placement(cfg.placement, roles, len(ranks), others=others)
    pools = {}
    for name, pool in placed.items():
        pools[name] = Pool(pool.roles, tuple(ranks[i] for i in pool.ranks))
    return pools


def pool_name_of(pools: Mapping[str, Pool], name: str, role: str, cfg: Any) -> str:
    """Return the name of the pool that a model runs on.

    It is the pool with the model's name among its roles, otherwise the one with its role. A model
    without an engine falls back to the pool of `reward`, then to the last pool; ConfigError for one
    with an engine.
    cfg: what it is spawned with (Any: its class).
    """
    for wanted in (name, role):
        for pool, content in pools.items():
            if wanted in content.roles:
                return pool
    if has_engine(cfg):
        roles = sorted(role for pool in pools.values() for role in pool.roles)
        raise ConfigError(
            f"model {name!r}: got no pool for this name or its role {role!r}, expected one of the "
            f"placement's models ({', '.join(roles)}); give Config a section {name} with these "
            f"settings, or choose a pool: flow.spawn(..., pool=flow.pool({next(iter(pools))!r}))"
        )
    return next((p for p, content in pools.items() if "reward" in content.roles), [*pools][-1])


def resolve_placement(
    placement: Any, roles: Sequence[str], world_size: int, *, others: Sequence[str] = ()
) -> dict[str, Pool]:
    """Return pool name -> Pool for a placement: a preset's name or a map.

    Every role is in exactly one pool. colocate makes one pool "all", split two and standalone one
    per role. ConfigError for an unknown name, placement=auto, or a map whose ranks or roles do not
    fit.
    others: sections without an engine, which a map may place too.
    """
    roles = tuple(roles)
    if isinstance(placement, Mapping):
        pools = {}
        for name, pool in placement.items():
            pools[str(name)] = _read_pool(str(name), pool)
        _check_ranks(pools, world_size)
        _check_roles(pools, roles, others)
        return pools
    if placement == "auto":
        do = "start the script with spmdflow.run, or take them from spmdflow.plan "
        do += "--auto"
        raise ConfigError.of("placement", "auto", "pools, which the planner finds before a run", do)
    if placement == "colocate":
        return {"all": Pool(roles, tuple(range(world_size)))}
    if placement == "split":
        return _share_out(_halves(roles), world_size, "split")
    if placement == "standalone":
        return _share_out([(role,) for role in roles], world_size, "standalone")
    raise ConfigError(
        f"placement: got {placement!r}, expected {', '.join(_PRESETS)} or a map "
        f"pool -> {{roles: [...], ranks: [...]}}{_suggest(str(placement), _PRESETS)}"
    )


def _halves(roles: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the roles of the two halves of a split; ConfigError if one would be empty.

    A generator is alone in the second half, with all others in the first. Without a generator,
    actor and reference are in the first half and all others in the second.
    """
    aside = ("generator",) if "generator" in roles else ()
    second = aside or tuple(role for role in roles if role not in _POLICY_ROLES)
    first = tuple(role for role in roles if role not in second)
    if not first or not second:
        raise ConfigError(
            f"placement: split got only the roles {', '.join(roles)}, expected roles on both "
            f"sides ({', '.join(_POLICY_ROLES)} | the rest); set placement=colocate"
        )
    return [first, second]


def _share_out(role_sets: list[tuple[str, ...]], world_size: int, preset: str) -> dict[str, Pool]:
    """Return one pool per role set, on neighbouring ranks of 0 to world_size - 1.

    Pool sizes differ by at most one, larger ones first. A pool's name is its roles joined by "+".
    ConfigError if there are fewer ranks than sets. preset: for the message.
    """
    count = len(role_sets)
    if world_size < count:
        raise ConfigError(
            f"placement: {preset} got {world_size} rank{'s' * (world_size > 1)}, expected at least "
            f"{count} (a pool each for {' | '.join(', '.join(roles) for roles in role_sets)}); "
            f"start more processes (--nproc-per-node {count}) or set placement=colocate"
        )
    size, extra = divmod(world_size, count)
    starts = []
    for index in range(count + 1):
        starts.append(index * size + min(index, extra))
    result = {}
    for roles, start, stop in zip(role_sets, starts, starts[1:]):
        result["+".join(roles)] = Pool(roles, tuple(range(start, stop)))
    return result


def _read_pool(name: str, pool: Any) -> Pool:
    """Return one pool of a map: {roles: [names], ranks: [integers]}, neither of them empty.

    ConfigError if it has any other form (Any: what a file holds).
    """
    keys = sorted(map(str, pool)) if isinstance(pool, Mapping) else pool
    if not isinstance(pool, Mapping) or set(pool) != {"roles", "ranks"}:
        where = f"placement.{name}"
        do = f"write {name}: {{roles: [actor], ranks: [0, 1]}}"
        raise ConfigError.of(where, keys, "the two keys roles and ranks", do)
    roles = pool["roles"]
    ranks = pool["ranks"]
    if not (isinstance(roles, list) and roles and all(isinstance(role, str) for role in roles)):
        raise ConfigError.of(
            f"placement.{name}.roles", repr(roles), "a list of role names", "write roles: [actor]"
        )
    if not (isinstance(ranks, list) and ranks and all(type(rank) is int for rank in ranks)):
        raise ConfigError.of(
            f"placement.{name}.ranks", repr(ranks), "a list of integers", "write ranks: [0, 1]"
        )
    return Pool(tuple(roles), tuple(ranks))


def _check_ranks(pools: Mapping[str, Pool], world_size: int) -> None:
    """Raise ConfigError unless every pool's ranks ascend and exist, and no rank is in two pools."""
    for name, pool in pools.items():
        if list(pool.ranks) != sorted(set(pool.ranks)):
            raise ConfigError(
                f"placement.{name}.ranks: got {list(pool.ranks)}, expected ascending ranks without "
                f"repeats; write {sorted(set(pool.ranks))}"
            )
        outside = []
        for rank in pool.ranks:
            if not 0 <= rank < world_size:
                outside.append(rank)
        if outside:
            raise ConfigError(
                f"placement.{name}.ranks: got {outside[0]}, expected ranks of the world "
                f"0-{world_size - 1}; start {max(pool.ranks) + 1} processes or use other ranks"
            )
    do = "expected disjoint pools; put roles that share ranks into one pool"
    _check_once("rank", {name: pool.ranks for name, pool in pools.items()}, do)


def _check_roles(pools: Mapping[str, Pool], roles: tuple[str, ...], others: Sequence[str]) -> None:
    """Raise ConfigError unless every role is in exactly one pool.

    Pools may also have names from `others`, but no unknown ones.
    """
    for name, pool in pools.items():
        for role in pool.roles:
            if role not in roles and role not in others:
                raise ConfigError(
                    f"placement.{name}.roles: got {role}, expected roles of this script "
                    f"({', '.join(roles)}){_suggest(role, roles)}"
                )
    do = "expected each role once; remove it from one"
    placed = _check_once("role", {name: pool.roles for name, pool in pools.items()}, do)
    missing = []
    for role in roles:
        if role not in placed:
            missing.append(role)
    if missing:
        got = f"no pool for {', '.join(missing)}"
        expected = f"each role of {', '.join(roles)} once"
        raise ConfigError.of("placement", got, expected, "add it to a pool's roles")


def _check_once(
    noun: str, members: Mapping[str, Sequence[object]], ending: str
) -> dict[object, str]:
    """Return member -> the name of its pool; ConfigError if a member is there twice.

    members: pool name -> its ranks or roles. noun, ending: parts of the message.
    """
    owner: dict[object, str] = {}
    for name, in_pool in members.items():
        for member in in_pool:
            if owner.setdefault(member, name) != name or in_pool.count(member) > 1:
                raise ConfigError(
                    f"placement: {noun} {member} is in pools {owner[member]} and {name}, {ending}"
                )
    return owner


def _suggest(word: str, choices: Sequence[str]) -> str:
    """Return the end of an error: "; did you mean X?" for the most similar choice.

    Without a similar one: "; choose one, such as" and the first choice.
    """
    near = difflib.get_close_matches(word, choices, 1)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; choose one, such as {choices[0]}"
