"""Groups whose tasks are threads of one process, for tests."""

from __future__ import annotations

import concurrent.futures
import contextlib
import socket

from tfdist_ext.collectives import ProcessGroup

DEADLINE_SECONDS = 20.0


def free_addresses(count):
    """Loopback addresses whose ports were free a moment ago."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    return addresses


def names(count):
    """Task names by rank."""
    return [f"worker:{rank}" for rank in range(count)]


def each(groups, function):
    """Runs `function(group)` for all groups at once; returns results or exceptions by rank."""
    with concurrent.futures.ThreadPoolExecutor(len(groups)) as pool:
        futures = [pool.submit(function, group) for group in groups]
        concurrent.futures.wait(futures, DEADLINE_SECONDS)
        return [future.exception(0) or future.result(0) for future in futures]


@contextlib.contextmanager
def connected(count, *, per_rank=None, **options):
    """Connects groups; closes all at once, since each waits for the others to take its goodbye."""
    addresses = free_addresses(count)
    options.setdefault("start_timeout_seconds", DEADLINE_SECONDS)

    def connect(rank):
        extra = per_rank(rank) if per_rank else {}
        return ProcessGroup.connect(addresses, rank, task_names=names(count), **{**options, **extra})

    groups = each(range(count), connect)
    failures = [group for group in groups if isinstance(group, Exception)]
    try:
        if failures:
            raise failures[0]
        yield groups
    finally:
        each([group for group in groups if isinstance(group, ProcessGroup)], lambda group: group.close())
