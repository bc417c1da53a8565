"""Does an address answer?"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import socket
import time
from collections.abc import Sequence

from tfdist_ext.cluster import Task
from tfdist_ext.cluster.addresses import split_address

ANSWERS = "answers"
REFUSED = "refused"
TIMEOUT = "timeout"
NAME_UNKNOWN = "name unknown"

ADVICE = {
    REFUSED: "the machine is there, but nothing listens on the port: start that task, or correct the port",
    TIMEOUT: "a firewall, a wrong address, or a machine that is off",
    NAME_UNKNOWN: "the host name does not resolve here: correct it, or use the IP address",
}


@dataclasses.dataclass(frozen=True)
class Probe:
    """What one address said.

    Attributes:
        task: Whose address it is.
        address: The `"host:port"`.
        outcome: `"answers"`, `"refused"`, `"timeout"`, `"name unknown"`, or the system's own words.
        seconds: How long it took.
    """

    task: Task
    address: str
    outcome: str
    seconds: float


def probe_all(members: Sequence[tuple[Task, str]], *, timeout_seconds: float) -> list[Probe]:
    """Tries a TCP connection to every address, all at the same time.

    Args:
        members: Tasks and their addresses.
        timeout_seconds: Deadline of each connection.

    Returns:
        One outcome each, in the same order.
    """
    if not members:
        return []
    with concurrent.futures.ThreadPoolExecutor(min(len(members), 64)) as pool:
        return list(pool.map(lambda member: _probe(member[0], member[1], timeout_seconds), members))


def _probe(task: Task, address: str, timeout_seconds: float) -> Probe:
    started = time.monotonic()
    try:
        with socket.create_connection(split_address(address), timeout=timeout_seconds):
            outcome = ANSWERS
    except socket.gaierror:
        outcome = NAME_UNKNOWN
    except ConnectionRefusedError:
        outcome = REFUSED
    except TimeoutError:
        outcome = TIMEOUT
    except OSError as error:
        outcome = error.strerror or str(error)
    return Probe(task, address, outcome, time.monotonic() - started)
