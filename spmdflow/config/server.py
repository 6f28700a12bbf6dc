"""Checks of actor.rollout.server: what a run that generates on servers needs. Before any rank."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from spmdflow.errors import ConfigError
from spmdflow.kind.generator import generator_kind
from spmdflow.requirement import install_command


def check_servers(key: str, rollout: Any, *, here: bool) -> None:
    """Raise ConfigError for settings of servers that cannot work together.

    key: of the rollout section. rollout: its settings (Any: a class of config.schema). here: files
    and packages of this node are looked at.
    """
    if not generator_kind(rollout.generator).is_served:
        return
    server = rollout.server
    if server.dialect == "sglang":
        _check_sglang(key, rollout)
    if server.exact and rollout.max_batch_size != 1:
        raise ConfigError.of(
            f"{key}.server.exact",
            f"true with {key}.max_batch_size={rollout.max_batch_size}",
            "1, because rows that are computed together change each other's last bits",
            f"set {key}.max_batch_size=1, or {key}.server.exact=false",
        )
    _check_addresses(f"{key}.server", server, here=here)
    if server.devices and not server.addresses and len(server.devices) != server.count:
        raise ConfigError.of(
            f"{key}.server.devices",
            f"{len(server.devices)} entries for {server.count} servers on each rank",
            "one entry for each server",
            f"set {key}.server.count={len(server.devices)}",
        )
    names = ("nixl_cu12", "nixl_cu13")
    if here and server.transport == "nixl" and not any(map(importlib.util.find_spec, names)):
        raise ConfigError.of(
            f"{key}.server.transport",
            "nixl, which is not installed",
            "NIXL for one-sided writes",
            f"{install_command('nixl')}, or set {key}.server.transport=gloo",
        )


def _check_sglang(key: str, rollout: Any) -> None:
    """Raise ConfigError for what servers of SGLang cannot do: spmdflow is not installed in them."""
    server = rollout.server
    if server.exact:
        raise ConfigError.of(
            f"{key}.server.exact",
            f"true with {key}.server.dialect=sglang",
            "false, because SGLang draws tokens with random numbers of its own",
            f"set {key}.server.exact=false, or use servers of spmdflow serve",
        )
    if not server.addresses:
        raise ConfigError.of(
            f"{key}.server.addresses",
            f"none with {key}.server.dialect=sglang",
            "servers that run already, because a run starts none of SGLang",
            f"start them, and set {key}.server.addresses=['http://host:30000']",
        )
    if rollout.sampler != "server":
        raise ConfigError.of(
            f"{key}.sampler",
            f"{rollout.sampler} with {key}.server.dialect=sglang",
            "server, because SGLang draws tokens with random numbers of its own",
            f"set {key}.sampler=server",
        )
    if server.transport != "gloo":
        raise ConfigError.of(
            f"{key}.server.transport",
            f"{server.transport} with {key}.server.dialect=sglang",
            "gloo, the one that both have",
            f"set {key}.server.transport=gloo",
        )


def _check_addresses(key: str, server: Any, *, here: bool) -> None:
    """Raise ConfigError for addresses that no server can have, or a key file that is missing."""
    for address in server.addresses:
        check_address(f"{key}.addresses", address)
    if len(set(server.addresses)) < len(server.addresses):
        raise ConfigError.of(
            f"{key}.addresses", server.addresses, "each server once", "remove the others"
        )
    if server.key_file and not server.addresses:
        raise ConfigError.of(
            f"{key}.key_file",
            f"{server.key_file} without addresses",
            "none, as servers of the run get a key of their own",
            f"remove it, or set {key}.addresses",
        )
    if here and server.key_file and not Path(server.key_file).is_file():
        raise ConfigError.of(
            f"{key}.key_file",
            f"{server.key_file}, which is no file",
            "the key of the servers",
            "check the path",
        )


def check_address(key: str, address: str) -> None:
    """Raise ConfigError unless an address is http://host:port or https://host:port, and no more."""
    parts = urlsplit(address)
    has_more = parts.path not in ("", "/") or parts.query or parts.fragment or parts.username
    if parts.scheme not in ("http", "https") or not parts.hostname or has_more:
        do = "write the address of a generation server"
        raise ConfigError.of(key, repr(address), "http://host:port", do)
