"""A process forked from one that has imported TensorFlow is like one that was started, only sooner."""

import os
import select
import signal
import socket
import subprocess
import sys

import pytest

from tests.testing import programs
from tfdist_ext.testing import start_processes
from tfdist_ext.testing.forked_process import ForkedProcess
from tfdist_ext.testing.worker_process import WorkerProcess

DEADLINE_SECONDS = 60.0


def start(**variables):
    """Returns a process that takes jobs, and our end of their socket: it ends when that is closed."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = ForkedProcess(theirs, num_devices=1, variables=variables)
    ours.settimeout(DEADLINE_SECONDS)
    assert ours.recv(1 << 16)
    return process, ours


def test_the_processes_of_a_group_differ_in_what_started_processes_differ_in(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with start_processes(programs.what_is_its_own, num_workers=4) as group:
        found = [outcome.result for outcome in group.outcomes()]
    assert [one["session"] for one in found] == [one["pid"] for one in found]
    # Streams of random numbers would be equal in all that one process has forked, hashes in all of them.
    for stream in ("random", "numpy", "tensorflow"):
        assert len({one[stream] for one in found}) == 4, stream
    assert len({one["hash"] for one in found}) == 2


def test_an_exit_code_is_told_whoever_waits():
    process, job = start()
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    job.close()
    assert process.wait(DEADLINE_SECONDS) == 0 and process.poll() == 0
    process.stdout.read()  # to the end of what it wrote: nobody else holds the other end
    process.stdout.close()


def test_a_signal_is_an_exit_code_and_disturbs_no_other():
    (first, job), (second, other_job) = start(), start()
    os.killpg(first.pid, signal.SIGKILL)
    assert first.wait(DEADLINE_SECONDS) == -signal.SIGKILL
    assert second.poll() is None
    job.close()
    other_job.close()
    assert second.wait(DEADLINE_SECONDS) == 0
    for process in (first, second):
        process.stdout.close()


def test_a_worker_that_ended_takes_no_more_signals():
    worker = WorkerProcess()
    worker.wait_until_ready()
    os.killpg(worker.pid, signal.SIGKILL)
    worker.send_signal(signal.SIGSTOP)  # before or after its end, which nobody has looked at
    assert worker.close() == -signal.SIGKILL
    worker.send_signal(signal.SIGKILL)


IMPORT_THAT_FAILS = """
import pathlib, sys
folder = pathlib.Path(sys.argv[1]) / "tensorflow"
folder.mkdir()
(folder / "__init__.py").write_text("raise ImportError('a library is missing')")
sys.path.insert(0, sys.argv[1])

from tfdist_ext.testing.worker_process import WorkerProcess

try:
    WorkerProcess().wait_until_ready(60)
except (RuntimeError, OSError) as error:
    print("refused:", error)
"""


def test_an_import_that_fails_is_an_error_with_its_reason_and_no_wait(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_THAT_FAILS, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith("refused: A worker process did not start"), done.stderr
    assert "a library is missing" in done.stderr


LEAVES_A_WORKER = """
from tfdist_ext.testing.worker_process import WorkerProcess

worker = WorkerProcess()
worker.wait_until_ready()
(parent,) = [line.split()[1] for line in open(f"/proc/{worker.pid}/status") if line.startswith("PPid")]
print(parent, worker.pid)
"""


def test_nothing_stays_when_the_process_ends():
    done = subprocess.run(
        [sys.executable, "-c", LEAVES_A_WORKER], capture_output=True, text=True, timeout=60, check=True
    )
    for pid in map(int, done.stdout.split()):
        assert _ends(pid), f"process {pid} stays"


def _ends(pid):
    """Whether a process that is no child of ours ends within ten seconds."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 10.0)[0])
    finally:
        os.close(descriptor)
