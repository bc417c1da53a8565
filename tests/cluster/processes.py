"""Real tasks for the tests of this folder: each a process, told what to do line by line."""

from __future__ import annotations

import collections
import json
import os
import signal
import subprocess
import sys
import threading
import time

from tfdist_ext.cluster import ClusterSpecification, Task, environment, to_tf_config
from tfdist_ext.cluster.ports import ReservedPorts

DEADLINE_SECONDS = 60.0


def environment_of_a_task():
    """The variables that every task has."""
    return {
        **environment.inherited(),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "-1",
        # A task finds what this process finds.
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "PYTHONUNBUFFERED": "1",
    }


class TaskProcess:
    """One task that runs `tests.cluster.tasks`."""

    def __init__(self, specification, *arguments):
        self.lines = collections.deque()
        self._news = threading.Condition()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.tasks", *arguments],
            env={**environment_of_a_task(), "TF_CONFIG": to_tf_config(specification)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self):
        return self._process.pid

    @property
    def text(self):
        with self._news:
            return "\n".join(self.lines)

    def tell(self, line):
        """Gives the chief its next command."""
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def read(self, start, timeout_seconds=DEADLINE_SECONDS):
        """Waits for a line that begins so, removes what came before it, and returns its rest."""
        deadline = time.monotonic() + timeout_seconds
        with self._news:
            while True:
                while self.lines:
                    line = self.lines.popleft()
                    if line.startswith(start):
                        return line.removeprefix(start)
                left = deadline - time.monotonic()
                assert left > 0 and self._process.poll() is None, f"no line {start!r} from {self.pid}"
                self._news.wait(min(left, 0.5))

    def send_signal(self, signum):
        self._process.send_signal(signum)

    def wait(self, timeout_seconds=DEADLINE_SECONDS):
        """Waits for the end; returns the exit code."""
        code = self._process.wait(timeout_seconds)
        self._reader.join(5)
        return code

    def kill(self):
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._reader.join(5)
        self._process.stdin.close()

    def _read(self):
        for line in self._process.stdout:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()


class Job:
    """Some tasks of a cluster on free ports; what runs at the end of the `with` is killed."""

    def __init__(self, **counts):
        reserved = ReservedPorts(sum(counts.values()))
        ports = iter(reserved.ports)
        self.jobs = {job: [f"127.0.0.1:{next(ports)}" for _ in range(count)] for job, count in counts.items()}
        reserved.release()
        self._started = []

    def specification(self, job, index=0):
        return ClusterSpecification.from_jobs(self.jobs, task=Task(job, index))

    def start(self, job, index=0, **arguments):
        process = TaskProcess(self.specification(job, index), json.dumps(arguments))
        self._started.append(process)
        return process

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for process in self._started:
            process.kill()
