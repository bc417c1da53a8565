"""Which ports are free, and stay free until the tasks bind them?"""

from __future__ import annotations

import collections
import pathlib
import random
import socket
import sys

_EPHEMERAL_RANGE = pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 10_000
_MAX_TRIES = 2_000
# The names by which this process keeps others from drawing what it drew, the latest only: each is an open file.
_NAMES: collections.deque[socket.socket] = collections.deque(maxlen=200)


class ReservedPorts:
    """Distinct free ports, held by bound sockets until `release`.

    Between release and the moment when a task binds its port, seconds pass: TensorFlow is imported first. The
    ports are therefore drawn from below the range from which the kernel takes ports for outgoing connections
    and for `bind` to port 0, so that nothing takes one by accident meanwhile. SO_REUSEADDR, and never
    listening, let the task bind at once after the release. Two launchers on one machine do not draw the same
    port, even after the release: a process keeps the last 200 it drew (on Linux).

    Attributes:
        ports: The port numbers.
    """

    def __init__(self, num_ports: int, *, chooser: random.Random | None = None):
        chooser = chooser or random.SystemRandom()
        self.ports: list[int] = []
        self._sockets: list[socket.socket] = []
        for _ in range(_MAX_TRIES):
            if len(self.ports) == num_ports:
                return
            self._try(chooser.randrange(_FIRST_PORT, _first_ephemeral_port()))
        self.release()
        raise OSError(f"No {num_ports} free ports found below {_first_ephemeral_port()} on this machine.")

    def release(self) -> None:
        """Closes the sockets: call it right before the tasks start."""
        while self._sockets:
            self._sockets.pop().close()

    def _try(self, port: int) -> None:
        if port in self.ports:
            return
        # All interfaces, where TensorFlow's servers bind: a port that is free only on loopback will not do.
        holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            if sys.platform == "linux":
                # An abstract name: it ends with the process, and is as wide as ports are.
                name.bind(f"\0tfdist_ext-port-{port}")
            holder.bind(("", port))
        except OSError:
            name.close()
            holder.close()
            return
        self.ports.append(port)
        self._sockets.append(holder)
        _NAMES.append(name)


def _first_ephemeral_port() -> int:
    """Where the kernel's own choice of ports begins; 32768 unless this machine says otherwise."""
    try:
        first = int(_EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768
    # A machine that leaves no room below has to share the range.
    return first if first > _FIRST_PORT + 1_000 else 60_000
