"""Where does a task listen, and is that address reachable from other machines?"""

from __future__ import annotations

import dataclasses
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
        family = socket.AF_INET6 if self.ipv6 else socket.AF_INET
        try:
            resolved = socket.getaddrinfo(self.host, self.port, family, socket.SOCK_STREAM)
        except OSError:
            resolved = []
        # ZeroMQ binds to numeric addresses only. A name of this host may resolve to 127.0.1.1 (Debian's
        # /etc/hosts), where no other machine could reach it.
        hosts = dict.fromkeys(
            info[4][0] for info in resolved if not ipaddress.ip_address(info[4][0]).is_loopback
        )
        if self.ipv6:
            return [f"tcp://[{host}]:{self.port}" for host in hosts] + [f"tcp://[::]:{self.port}"]
        return [f"tcp://{host}:{self.port}" for host in hosts] + [f"tcp://0.0.0.0:{self.port}"]
