"""What is an address of a task?

`host:port`, with brackets around an IPv6 host: what both gRPC and a ZeroMQ TCP endpoint can use.
"""

from __future__ import annotations

import functools
import ipaddress
import re

from absl import logging

from tfdist_ext.errors import ClusterSpecError

SERVERS_LISTEN_EVERYWHERE = (
    "TensorFlow's servers, which carry parameter-server training, listen on every interface of the machine whatever "
    "address is given, without authentication or encryption: whoever reaches a port can run code there. Close the "
    "ports to other machines (a firewall, or a container that publishes none), or run on a trusted network only."
)
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://(.*)$")
_HOST = re.compile(r"^[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?$")


def split_address(address: str) -> tuple[str, int]:
    """Splits an address into host and port.

    Args:
        address: `"host:port"` or `"[ipv6]:port"`.

    Returns:
        The host, without brackets, and the port.

    Raises:
        ClusterSpecError: It is no such address; the message says what to change.

    Example:
        >>> split_address("[::1]:2222")
        ('::1', 2222)
    """
    if not isinstance(address, str):
        raise ClusterSpecError(f"An address must be a text such as '127.0.0.1:2222'; received {address!r}.")
    _refuse_decoration(address)
    host, colon, port = address.rpartition(":")
    if not colon or address.endswith("]"):
        raise ClusterSpecError(
            f"Address {address!r} has no port. Write 'host:port', for instance '{address}:2222'."
        )
    if not (port.isascii() and port.isdigit()) or not 1 <= int(port) <= 65535:
        raise ClusterSpecError(
            f"Address {address!r} has the port {port!r}; a port is a number from 1 to 65535, the same "
            "that the other tasks will connect to."
        )
    return _checked_host(host, address), int(port)


def is_loopback(address: str) -> bool:
    """Says whether an address can only be reached from the same machine.

    Args:
        address: `"host:port"`.

    Returns:
        True for `localhost`, 127.0.0.0/8 and `::1`. A name that merely resolves to loopback counts as remote.

    Raises:
        ClusterSpecError: It is no address.

    Example:
        >>> is_loopback("127.0.0.1:2222"), is_loopback("10.0.0.1:2222")
        (True, False)
    """
    host, _ = split_address(address)
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def same_place(address: str) -> tuple[str, int]:
    """Gives the key under which two spellings of one address are equal.

    Args:
        address: `"host:port"`.

    Returns:
        The lower-case host, with `localhost` as 127.0.0.1, and the port.

    Raises:
        ClusterSpecError: It is no address.
    """
    host, port = split_address(address)
    host = host.lower().rstrip(".")
    return ("127.0.0.1" if host == "localhost" else host), port


def _refuse_decoration(address: str) -> None:
    scheme = _SCHEME.match(address)
    if scheme:
        raise ClusterSpecError(
            f"Address {address!r} starts with {scheme[1]!r}://. Remove it: write {scheme[2].rstrip('/')!r}."
        )
    if address != address.strip():
        raise ClusterSpecError(f"Address {address!r} has spaces around it. Write {address.strip()!r}.")
    if "/" in address:
        raise ClusterSpecError(f"Address {address!r} has a path. Write {address.split('/')[0]!r}.")
    if not address:
        raise ClusterSpecError("An address is empty. Write 'host:port', for instance '127.0.0.1:2222'.")


def _checked_host(host: str, address: str) -> str:
    """Returns the host without brackets, or says what is wrong with it."""
    if host.startswith("[") and host.endswith("]"):
        try:
            ipaddress.IPv6Address(host[1:-1].split("%")[0])
        except ValueError:
            raise ClusterSpecError(
                f"Address {address!r} has brackets, but {host[1:-1]!r} is no IPv6 address."
            ) from None
        return host[1:-1]
    if ":" in host:
        raise ClusterSpecError(
            f"Address {address!r} has several colons. Put an IPv6 host in brackets, as in '[::1]:2222'."
        )
    if not host:
        raise ClusterSpecError(f"Address {address!r} has no host. Write for instance '127.0.0.1{address}'.")
    if not _HOST.match(host):
        raise ClusterSpecError(f"Address {address!r} has the host {host!r}, which is no host name.")
    return host


@functools.cache
def warn_that_servers_listen_everywhere() -> None:
    """Says once, when a server of TensorFlow is about to start, who can reach it.

    Runs on: every task of a job with parameter servers.
    """
    logging.warning("%s", SERVERS_LISTEN_EVERYWHERE)
