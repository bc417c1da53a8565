"""Where does a task listen, and is that address reachable from other machines?"""

from __future__ import annotations

import dataclasses
import functools
import ipaddress
import socket

from tfdist_ext.cluster.addresses import is_loopback, split_address


@dataclasses.dataclass(frozen=True)
class Address:
    """A `host:port` pair; IPv6 literals are written in brackets, `[::1]:2222`.

    Attributes:
        host: Host name or literal, without brackets.
        port: TCP port, 1 to 65535.
        ipv6: True if the host was written in brackets.
    """

    host: str
    port: int
    ipv6: bool = False

    @classmethod
    def parse(cls, text: str) -> Address:
        """Reads `host:port` or `[ipv6]:port`.

        Raises:
            ClusterSpecError: If `text` has another form.
        """
        host, port = split_address(text)
        return cls(host, port, ipv6=text.startswith("["))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if self.ipv6 else f"{self.host}:{self.port}"

    @functools.cached_property
    def uses_ipv6(self) -> bool:
        """True for an IPv6 literal, and for a name that has addresses of that kind only."""
        if self.ipv6 or self.is_loopback:
            return self.ipv6
        return not self._resolved(socket.AF_INET) and bool(self._resolved(socket.AF_INET6))

    def _resolved(self, family) -> list[str]:
        try:
            return [
                str(info[4][0])
                for info in socket.getaddrinfo(self.host, self.port, family, socket.SOCK_STREAM)
            ]
        except OSError:
            return []

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can reach it; names other than `localhost` are not resolved."""
        return is_loopback(str(self))

    @property
    def connect_endpoint(self) -> str:
        """The ZeroMQ endpoint that other tasks connect to."""
        # "localhost" may resolve to ::1 first while the task listens on 127.0.0.1.
        host = "127.0.0.1" if self.host.lower() == "localhost" else self.host
        return f"tcp://[{host}]:{self.port}" if self.ipv6 else f"tcp://{host}:{self.port}"

    def bind_endpoints(self) -> list[str]:
        """ZeroMQ endpoints to try in order when listening here.

        In clouds the advertised name often belongs to no local interface (it is translated on the way), hence
        the last resort of all interfaces. It is never used for loopback: that would open a private port.
        """
        if self.is_loopback:
            return [self.connect_endpoint]
        resolved = self._resolved(socket.AF_INET6 if self.uses_ipv6 else socket.AF_INET)
        # ZeroMQ binds to numeric addresses only. A name of this host may resolve to 127.0.1.1 (Debian's
        # /etc/hosts), where no other machine could reach it.
        hosts = dict.fromkeys(host for host in resolved if not ipaddress.ip_address(host).is_loopback)
        if self.uses_ipv6:
            return [f"tcp://[{host}]:{self.port}" for host in hosts] + [f"tcp://[::]:{self.port}"]
        return [f"tcp://{host}:{self.port}" for host in hosts] + [f"tcp://0.0.0.0:{self.port}"]
