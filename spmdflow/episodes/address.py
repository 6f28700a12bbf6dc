"""Where an endpoint listens, the URL by which clients reach it, and its certificate.

A self-signed certificate is made with the program openssl, for one start of one endpoint. Its
private key is read into this process and deleted at once. The certificate stays in a file, which
environments get the path of, until the endpoint is closed.
"""

from __future__ import annotations

import errno
import ipaddress
import shutil
import socket
import ssl
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from spmdflow.config.endpoint import LAST_PORT, SELF_SIGNED, EndpointConfig, is_loopback
from spmdflow.errors import ConfigError

_KEY = "actor.rollout.episode.endpoint"
_OPENSSL_SECONDS = 60.0
_DAYS = 365
_FORM_OF_CERTIFICATE = """
[req]
prompt = no
distinguished_name = subject
x509_extensions = extensions
[subject]
CN = spmdflow episodes
[extensions]
basicConstraints = critical, CA:true
keyUsage = critical, digitalSignature, keyCertSign
extendedKeyUsage = serverAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = {names}
"""
"""What openssl reads instead of the system's settings, which may be missing."""


@dataclass(frozen=True)
class EndpointAddress:
    """Where an endpoint listens, and what its clients are told."""

    listener: socket.socket
    """Bound, not yet listening."""
    url: str
    """By which clients reach it: scheme, host and port."""
    needs_key: bool
    """Whether a request without a key is refused: clients of other machines can connect."""
    tls: ssl.SSLContext | None = None
    certificate_path: str | None = None
    """Of a self-signed certificate, which clients must be given."""
    folder: Path | None = None
    """Holds that file; deleted by `close`."""

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return int(self.listener.getsockname()[1])

    def close(self) -> None:
        """Deletes the certificate of a self-signed address. May be called repeatedly."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def open_address(cfg: EndpointConfig, index: int = 0) -> EndpointAddress:
    """Binds the port of a rank, and reads or makes its certificate.

    index: number of the rank on its node, which is added to a port that is not 0. ConfigError if
    the address cannot be bound, the certificate cannot be read, or openssl is needed and missing.
    """
    listener = _bind(cfg, index)
    port = int(listener.getsockname()[1])
    host = _public_host(cfg.address, listener)
    scheme = "http" if cfg.certificate is None else "https"
    form = cfg.public_url or f"{scheme}://{{host}}:{{port}}"
    url = form.format(host=f"[{host}]" if ":" in host else host, port=port).rstrip("/")
    needs_key = not is_loopback(cfg.address) or cfg.public_url is not None
    if cfg.certificate is None:
        return EndpointAddress(listener, url, needs_key)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        if cfg.certificate != SELF_SIGNED:
            _load(tls, cfg.certificate, cfg.private_key)
            return EndpointAddress(listener, url, needs_key, tls)
        public = urlsplit(url).hostname or host
        names = [host, cfg.address, public, socket.gethostname(), "localhost", "127.0.0.1"]
        certificate = _load_self_signed(tls, names)
    except ConfigError:
        listener.close()
        raise
    return EndpointAddress(listener, url, needs_key, tls, str(certificate), certificate.parent)


def _bind(cfg: EndpointConfig, index: int) -> socket.socket:
    """A socket that is bound to the rank's address and port. ConfigError if that is impossible."""
    port = cfg.port + index if cfg.port else 0
    if port > LAST_PORT:
        got = f"{cfg.port} for rank {index} of its node, whose port would be {port}"
        do = f"set {_KEY}.port lower"
        raise ConfigError.of(f"{_KEY}.port", got, f"ports up to {LAST_PORT}", do)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            cfg.address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as err:  # also socket.gaierror
        raise _unusable(cfg.address, port, err) from err
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
    except OSError as err:
        listener.close()
        raise _unusable(cfg.address, port, err) from err
    return listener


def _unusable(address: str, port: int, err: OSError) -> ConfigError:
    """The error of an address or port that cannot be bound."""
    if err.errno == errno.EADDRINUSE:
        got = f"{port}, which another program uses"
        do = f"set {_KEY}.port=0, or to the first of as many free ports as the node has ranks"
        return ConfigError.of(f"{_KEY}.port", got, "a free port", do)
    got = f"{address}:{port} ({err.strerror or err})"
    expected = "an address of this node and a port that this user may bind"
    do = f"set {_KEY}.address=0.0.0.0 for all addresses of the node, or correct it"
    return ConfigError.of(f"{_KEY}.address", got, expected, do)


def _public_host(address: str, listener: socket.socket) -> str:
    """The host by which others reach a listener: its address, or this node's for 0.0.0.0 and ::.

    This node's address is the one from which it would reach the internet; without a route, its
    host name. Nothing is sent.
    """
    try:
        is_any = ipaddress.ip_address(address).is_unspecified
    except ValueError:
        return address  # a host name
    if not is_any:
        return address
    is_v6 = listener.family == socket.AF_INET6
    with socket.socket(listener.family, socket.SOCK_DGRAM) as probe:
        try:
            # addresses for documentation (RFC 5737, 3849): only the route is looked up
            probe.connect(("2001:db8::1" if is_v6 else "198.51.100.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()


def _load_self_signed(tls: ssl.SSLContext, names: list[str]) -> Path:
    """Makes a certificate for these names, and reads it. Returns its file, in a folder of its own.

    The folder is readable for this user only, and has no other file. ConfigError as `_sign` raises.
    """
    folder = Path(tempfile.mkdtemp(prefix="spmdflow-endpoint-"))
    try:
        certificate = _sign(folder, names)
        private_key = folder / "key.pem"
        _load(tls, str(certificate), str(private_key))
        private_key.unlink()
    except ConfigError:
        shutil.rmtree(folder)
        raise
    return certificate


def _sign(folder: Path, names: list[str]) -> Path:
    """Makes cert.pem and key.pem in a folder with openssl; returns the certificate's path.

    names: hosts and IP addresses that it is valid for; empty and unspecified ones are omitted.
    """
    entries = []
    for name in dict.fromkeys(names):
        try:
            address = ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            if name:
                entries.append(f"DNS:{name}")
            continue
        if not address.is_unspecified:
            entries.append(f"IP:{address}")
    form = folder / "form.cnf"
    form.write_text(_FORM_OF_CERTIFICATE.format(names=", ".join(entries)), encoding="utf-8")
    certificate = folder / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-sha256", "-days", str(_DAYS), "-config", str(form)]
    command += ["-keyout", str(folder / "key.pem"), "-out", str(certificate)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=_OPENSSL_SECONDS)
    except (OSError, subprocess.SubprocessError) as err:
        error_output = getattr(err, "stderr", None) or str(err).encode()
        why = error_output.decode(errors="replace").strip().splitlines()[-1:]
        got = f"{SELF_SIGNED}, but openssl failed ({' '.join(why)})"
        do = "install openssl on every node, or name the PEM file of a certificate"
        raise ConfigError.of(f"{_KEY}.certificate", got, "the program openssl", do) from err
    form.unlink()
    return certificate


def _load(tls: ssl.SSLContext, certificate: str, private_key: str | None) -> None:
    """Reads a certificate and its key. ConfigError if they cannot be read or do not fit."""
    try:
        tls.load_cert_chain(certificate, private_key, password="")
    except (OSError, ValueError) as err:  # ssl.SSLError is an OSError
        got = f"{certificate} and {private_key or 'the key in it'}, which cannot be used ({err})"
        expected = "a certificate and its key without a password, in PEM"
        do = f"correct {_KEY}.certificate or {_KEY}.private_key"
        raise ConfigError.of(f"{_KEY}.certificate", got, expected, do) from err
