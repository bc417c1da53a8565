"""What the others see when a real process dies, stops, or simply ends."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.collectives.groups import free_addresses, names

_PROGRAM = """
import sys, time
import numpy as np
from tfdist_ext import errors
from tfdist_ext.collectives import ProcessGroup

rank, addresses, mode = int(sys.argv[1]), sys.argv[2].split(","), sys.argv[3]
task_names = [f"worker:{index}" for index in range(len(addresses))]
group = ProcessGroup.connect(
    addresses, rank, task_names=task_names, peer_timeout_seconds=1.0, start_timeout_seconds=30
)
group.barrier("ready")
print("ready", flush=True)
try:
    if mode == "train":
        for group.step in range(1_000_000):
            group.all_reduce(np.ones(1 << 21, np.float32), name="gradients")
    elif mode == "wait":
        if rank == 1:
            sys.stdin.readline()  # Never comes: this is the task that the others will lose.
        group.barrier("never")
    elif mode == "busy":
        # Holds the Python lock for longer than the peer timeout, as importing or tracing does.
        sys.setswitchinterval(100.0)
        end = time.monotonic() + 2.5
        while rank == 1 and time.monotonic() < end:
            pass
        group.barrier("after")
        print("fine", flush=True)
    elif mode == "leave":
        if rank > 0:
            sys.exit(0)  # Without close: the end of the program says goodbye.
        sys.stdin.readline()
        print("fine" if group.last_failure is None else "failed", flush=True)
except errors.PeerLostError as error:
    print("lost", time.time(), error.task, error.collective, error.step, "|", error, flush=True)
"""


@contextlib.contextmanager
def running(count, mode):
    """Starts `count` tasks that have formed a group; ends them, whatever happens."""
    addresses = ",".join(free_addresses(count))
    tasks = [
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(rank), addresses, mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )
        for rank in range(count)
    ]
    try:
        for task in tasks:
            assert task.stdout.readline() == "ready\n"
        yield tasks
    finally:
        for task in tasks:
            task.kill()
            task.wait(10)
            task.stdin.close()
            task.stdout.close()


def last_line(task):
    """What a task printed before it ended by itself."""
    output, _ = task.communicate(timeout=20)
    return output.strip().splitlines()[-1].split(maxsplit=2)


@pytest.mark.parametrize("mode", ["train", "wait"])
def test_killed_task_is_named_by_every_survivor_within_two_seconds(mode):
    with running(4, mode) as tasks:
        killed = time.time()
        tasks[1].kill()
        for rank in (0, 2, 3):
            word, when, facts = last_line(tasks[rank])
            assert word == "lost" and float(when) - killed < 2.0
            collective = "gradients" if mode == "train" else "never"
            assert facts.startswith(f"worker:1 {collective} ")
            # Between two operations the loss shows in the next: "worker:0 cannot run ...: worker:1 was lost
            # before".
            assert names(4)[rank] in facts and ("waiting" in facts or "lost before" in facts)


@pytest.mark.parametrize("mode", ["train", "wait"])
def test_stopped_task_is_noticed_after_the_timeout(mode):
    with running(3, mode) as tasks:
        stopped = time.time()
        tasks[1].send_signal(signal.SIGSTOP)
        for rank in (0, 2):
            word, when, facts = last_line(tasks[rank])
            # The peer timeout is 1 s.
            assert word == "lost" and 0.9 < float(when) - stopped < 3.0
            assert facts.startswith("worker:1 ")


def test_task_that_holds_the_python_lock_is_not_lost():
    with running(2, "busy") as tasks:
        assert [last_line(task)[0] for task in tasks] == ["fine", "fine"]


def test_tasks_that_end_normally_disturb_nobody():
    with running(3, "leave") as tasks:
        for task in tasks[1:]:
            assert task.wait(20) == 0
        tasks[0].stdin.write("\n")
        tasks[0].stdin.flush()
        assert last_line(tasks[0])[0] == "fine"
