"""Settings of where the endpoint of episodes listens: address, port and TLS."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from spmdflow.config.leaf import setting
from spmdflow.errors import ConfigError

SELF_SIGNED = "self-signed"
LAST_PORT = 65535


@dataclass
class EndpointConfig:
    """Where the endpoint of each generating rank listens, and how clients reach it."""

    address: str = setting(
        "IP address or host name on which each endpoint listens; 0.0.0.0: all of its node. Beyond "
        "loopback every request needs the key of its episode.",
        "127.0.0.1",
    )
    port: int = setting(
        "Port of the first rank of each node, the next rank's is one higher; 0: the system chooses "
        "each.",
        0,
        at_least=0,
        at_most=LAST_PORT,
    )
    public_url: str | None = setting(
        "URL by which environments reach an endpoint, such as https://{host}:{port} or that of a "
        "tunnel; null: address and port, with this node's address for 0.0.0.0.",
        None,
    )
    certificate: str | None = setting(
        "PEM file of the certificate for TLS; self-signed: each endpoint makes one for the run; "
        "null: no TLS.",
        None,
    )
    private_key: str | None = setting(
        "PEM file of the certificate's key; null: the certificate's file has it.", None
    )
    plain_text: bool = setting(
        "Listen beyond loopback without TLS: everybody on the way reads and changes requests, "
        "replies and keys.",
        False,
    )


def is_loopback(address: str) -> bool:
    """Whether only this node reaches an address. A host name other than localhost counts as not."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def check_endpoint(key: str, endpoint: EndpointConfig) -> None:
    """Raise ConfigError for settings of an endpoint that cannot work together, or missing files.

    key: of the section, such as actor.rollout.episode.endpoint.
    """
    if endpoint.certificate is None and not (is_loopback(endpoint.address) or endpoint.plain_text):
        raise ConfigError.of(
            f"{key}.certificate",
            f"null with {key}.address={endpoint.address}",
            "TLS, because others can read and change what passes between the machines",
            f"set {key}.certificate to a PEM file or to {SELF_SIGNED}, or {key}.plain_text=true if "
            f"the network between them is yours alone",
        )
    if endpoint.private_key is not None and endpoint.certificate in (None, SELF_SIGNED):
        raise ConfigError.of(
            f"{key}.private_key",
            f"{endpoint.private_key} with {key}.certificate={endpoint.certificate or 'null'}",
            "the PEM file of the certificate that it belongs to",
            f"set {key}.certificate, or remove the key",
        )
    for name, path in (
        ("certificate", endpoint.certificate),
        ("private_key", endpoint.private_key),
    ):
        if path not in (None, SELF_SIGNED) and not Path(str(path)).is_file():
            got = f"{path!r}, which is no file"
            raise ConfigError.of(f"{key}.{name}", got, "a PEM file", "correct the path")
    if endpoint.public_url is not None:
        _check_public_url(f"{key}.public_url", endpoint.public_url)


def _check_public_url(key: str, text: str) -> None:
    """Raise ConfigError unless a text is an http or https URL with {host} and {port} in places."""
    form = "a URL such as https://{host}:{port}"
    try:
        url = urlsplit(text.format(host="127.0.0.1", port=LAST_PORT))
        is_url = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except (ValueError, LookupError):
        is_url = False
    if not is_url:
        do = "begin with http:// or https://; {host} and {port} become those of the rank"
        raise ConfigError.of(key, repr(text), form, do)
