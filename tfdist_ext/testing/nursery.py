"""Which process, with TensorFlow imported once, forks a worker as soon as it is asked?

Started as `python -m tfdist_ext.testing.nursery SOCKET`, where SOCKET is the number of an inherited file descriptor.
Forking is safe here: the process has one thread, and TensorFlow starts its own only when it is first used, which is
in the workers. (`OMP_NUM_THREADS=1` keeps NumPy from starting some.) It ends when the other end of the socket does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import selectors
import signal
import socket
import sys

from tfdist_ext.cluster import environment
from tfdist_ext.testing import worker

_MAX_REQUEST_BYTES = 65_536


@dataclasses.dataclass(frozen=True)
class _Order:
    """What a worker is to be.

    Attributes:
        job: File descriptor of the socket from which it takes its jobs.
        output: File descriptor of what it writes to.
        status: File descriptor of the pipe that takes its number and its exit code.
        num_devices: Its logical CPU devices.
        variables: Its own environment variables, beside those of the nursery.
    """

    job: int
    output: int
    status: int
    num_devices: int
    variables: dict[str, str]


def main() -> None:
    """Forks until the other end of the socket is closed."""
    control = socket.socket(fileno=int(sys.argv[1]))
    worker.import_tensorflow()
    # What is imported is not looked at by any collection of any worker, and stays one copy in memory.
    gc.collect()
    gc.freeze()
    order = _fork_on_request(control)
    if order is not None:
        _become(order)
        worker.serve(order.job, order.num_devices)


def _fork_on_request(control: socket.socket) -> _Order | None:
    """Returns in each worker, with what it is to be; in the nursery itself only at its end."""
    running: dict[int, int] = {}
    woken, wakes = socket.socketpair()
    woken.setblocking(False)
    wakes.setblocking(False)
    # A handler has to be there for the wake-up to be sent.
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    with selectors.DefaultSelector() as selector, control, woken, wakes:
        selector.register(control, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if woken in ready:
                woken.recv(4096)
                _report_ends(running)
            if control not in ready:
                continue
            text, descriptors, _, _ = socket.recv_fds(control, _MAX_REQUEST_BYTES, 3)
            if not text:
                return None
            job, output, status = descriptors
            order = _Order(job=job, output=output, status=status, **json.loads(text))
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for status in running.values():
                    os.close(status)
                return order
            os.close(order.job)
            os.close(order.output)
            running[pid] = order.status


def _report_ends(running: dict[int, int]) -> None:
    """Writes the exit codes of the workers that have ended, and forgets them."""
    for pid in list(running):
        ended, code = os.waitpid(pid, os.WNOHANG)
        if ended:
            status = running.pop(pid)
            # Where the other end was closed, nobody wants to know.
            with contextlib.suppress(BrokenPipeError):
                os.write(status, f"code {os.waitstatus_to_exitcode(code)}\n".encode())
            os.close(status)


def _become(order: _Order) -> None:
    """Makes a process of its own of what was forked: session, output, variables, and random streams."""
    os.setsid()
    for number in (1, 2):
        os.dup2(order.output, number)
    os.close(order.output)
    for name, value in order.variables.items():
        environment.set_variable(name, value)
    worker.forget_seeds()
    os.write(order.status, f"pid {os.getpid()}\n".encode())
    os.close(order.status)


if __name__ == "__main__":
    main()
