"""How does a test hold a process that another process has forked?"""

from __future__ import annotations

import atexit
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping

from tfdist_ext.cluster import environment

# Two that hash texts differently, as processes do that are started one by one: what depends on the order of a set
# differs between the workers of a group, and is seen.
_HASH_SEEDS = ("1", "2")
START_SECONDS = 120.0
_CLOSE_SECONDS = 5.0
_CODE_OF_A_LOST_NURSERY = 1


class ForkedProcess:
    """A worker process with the methods of `subprocess.Popen` that `WorkerProcess` uses.

    Attributes:
        stdout: What it writes, as text.
        returncode: Its exit code, negative for a signal; None while it runs, or as long as nobody has asked.
    """

    def __init__(self, job: socket.socket, *, num_devices: int, variables: Mapping[str, str]):
        """Asks for a process; it begins once the process that forks it has imported TensorFlow.

        Args:
            job: The worker's end of the socket from which it takes its jobs.
            num_devices: Its logical CPU devices.
            variables: Its own environment variables, beside those that this process has.
        """
        self.returncode: int | None = None
        self._pid: int | None = None
        self._lock = threading.Lock()
        self._text = b""
        output, its_output = os.pipe()
        self._status, its_status = os.pipe()
        self.stdout = os.fdopen(output, errors="replace")
        order = {"num_devices": num_devices, "variables": dict(variables)}
        try:
            _NURSERIES.send(json.dumps(order).encode(), [job.fileno(), its_output, its_status])
        finally:
            os.close(its_output)
            os.close(its_status)

    def __del__(self) -> None:
        os.close(self._status)

    @property
    def pid(self) -> int:
        """Number of the process, and of its process group; waits until it began.

        Raises:
            ProcessLookupError: It never began.
            TimeoutError: It has not begun for two minutes.
        """
        deadline = time.monotonic() + START_SECONDS
        while self._pid is None and self.returncode is None:
            if not self._read(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"TensorFlow was not imported for a worker within {START_SECONDS:.0f} s.")
        if self._pid is None:
            raise ProcessLookupError(
                "The process that imports TensorFlow for the workers ended; see its output."
            )
        return self._pid

    def poll(self) -> int | None:
        """Returns the exit code; None if the process still runs."""
        while self.returncode is None and self._read(0.0):
            pass
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end of the process.

        Args:
            timeout: Seconds, at most.

        Returns:
            Its exit code.

        Raises:
            subprocess.TimeoutExpired: It still runs.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            rest = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._read(rest) and rest == 0.0:
                raise subprocess.TimeoutExpired("a worker process", timeout or 0.0)
        return self.returncode

    def _read(self, timeout_seconds: float | None) -> bool:
        """Takes in what was told of the process; returns whether there was something."""
        if not select.select([self._status], [], [], timeout_seconds)[0]:
            return False
        with self._lock:
            # Another thread may have read it meanwhile.
            if self.returncode is None and select.select([self._status], [], [], 0.0)[0]:
                self._take(os.read(self._status, 4096))
        return True

    def _take(self, data: bytes) -> None:
        *lines, self._text = (self._text + data).split(b"\n")
        for line in lines:
            what, value = line.split()
            if what == b"pid":
                self._pid = int(value)
            else:
                self.returncode = int(value)
        if not data:
            self.returncode = _CODE_OF_A_LOST_NURSERY


class _Nurseries:
    """The processes that fork workers, started when they are first needed; they end with this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._environment: dict[str, str] = {}
        self._running: list[tuple[subprocess.Popen, socket.socket]] = []
        self._num_orders = 0

    def send(self, order: bytes, descriptors: list[int]) -> None:
        """Hands an order to the nursery whose turn it is."""
        variables = _environment()
        with self._lock:
            # What was imported under other variables may be another TensorFlow.
            if variables != self._environment or any(one.poll() is not None for one, _ in self._running):
                self._close()
                self._environment = variables
                self._running = [_start({"PYTHONHASHSEED": seed, **variables}) for seed in _HASH_SEEDS]
            _, control = self._running[self._num_orders % len(self._running)]
            self._num_orders += 1
            socket.send_fds(control, [order], descriptors)

    def close(self) -> None:
        """Ends them; workers go on until their own sockets are closed."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        for _, control in self._running:
            control.close()
        for process, _ in self._running:
            try:
                process.wait(_CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._running = []


def _start(variables: dict[str, str]) -> tuple[subprocess.Popen, socket.socket]:
    # A message stays one message.
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tfdist_ext.testing.nursery", str(theirs.fileno())],
            env=variables,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    return process, ours


def _environment() -> dict[str, str]:
    variables = environment.inherited()
    # Set by pytest anew for every test.
    variables.pop("PYTEST_CURRENT_TEST", None)
    variables.pop(environment.TF_CONFIG, None)
    variables.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    return {
        **variables,
        # The worker finds what this process finds, wherever it was started.
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": "-1",
        "OMP_NUM_THREADS": "1",
    }


_NURSERIES = _Nurseries()
atexit.register(_NURSERIES.close)
