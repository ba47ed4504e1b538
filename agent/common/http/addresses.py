"""Read and write the addresses of TCP servers: HOST:PORT, which hosts are this machine alone, and URLs."""

from __future__ import annotations

import ipaddress


def split_address(text: str) -> tuple[str, int] | None:
    """Return host and port of `HOST:PORT`, where an IPv6 address stands in brackets; None for anything else.

    The host of `:PORT` is empty.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and port.isascii() and port.isdigit() and int(port) <= 65535):
        return None
    return host, int(port)


def http_url(host: str, port: int) -> str:
    """Return the URL of a server, without a path."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str | None) -> bool:
    """Return whether only this machine reaches this address; None is the embedded broker's."""
    if host is None or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, which a resolver could lead anywhere
        return False


def is_unspecified(host: str) -> bool:
    """Return whether a server at this address listens on all addresses of the machine."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
