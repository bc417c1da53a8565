"""The ps and workers serve until the chief's process ends, and say with which code it did."""

import errno
import json
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.cluster.processes import Job, environment_of_a_task
from tfdist_ext.cluster import ClusterSpecification, ServingExit, Task, serve_until_chief_ends
from tfdist_ext.cluster.control import Control, Goodbye, goodbye_text
from tfdist_ext.cluster.reachability import Listening, how_it_listens
from tfdist_ext.cluster.serving import ChiefWatch
from tfdist_ext.cluster.stopping import StopWatch
from tfdist_ext.errors import ClusterSpecError

CHIEF = "chief:0 at 10.0.0.1:2222"


def watch():
    return ChiefWatch(CHIEF, startup_timeout_seconds=600, chief_timeout_seconds=20, started=0)


# --- The decisions --------------------------------------------------------------------------------------------
def test_a_chief_that_never_comes_is_named_and_given_up():
    waits = watch()
    assert waits.words(1.9) is None
    assert waits.words(2.0) == f"waiting for {CHIEF} (2 s)"
    assert waits.words(31.9) is None
    assert waits.words(32.0) == f"waiting for {CHIEF} (32 s)"
    assert waits.probed(False, 599.9) is None
    ending = waits.probed(False, 600.0)
    assert ending.code is ServingExit.CHIEF_NEVER_CAME
    assert ending.message.startswith(f"{CHIEF} did not come within 600 s")


def test_a_chief_that_is_away_for_long_is_lost_and_one_that_comes_back_is_not():
    lost = watch()
    assert lost.probed(True, 100.0) is None
    assert lost.words(100.0) is None
    assert lost.probed(False, 119.9) is None
    assert lost.probed(True, 119.95) is None
    assert lost.probed(False, 139.9) is None
    lost.heard(None, 139.95)
    assert lost.probed(False, 159.9) is None
    ending = lost.probed(False, 159.95)
    assert ending.code is ServingExit.CHIEF_LOST
    assert ending.message.startswith(f"{CHIEF} has been gone for 20 s and said no goodbye")


def test_g12_a_chief_whose_machine_is_silent_is_waited_for_as_long_as_it_waits_for_a_ps():
    """600 s on both sides: `startup_timeout_seconds`. One whose process is gone is waited for 20 s."""
    waits = watch()
    assert waits.probed(True, 10) is None
    assert waits.probed(False, 609, is_silent=True) is None
    ending = waits.probed(False, 610, is_silent=True)
    assert ending.code == 82 and "startup_timeout_seconds" in ending.message
    waits = watch()
    assert waits.probed(True, 10) is None
    assert waits.probed(False, 100, is_silent=True) is None
    assert waits.probed(True, 101) is None
    assert waits.probed(False, 120.9) is None
    assert waits.probed(False, 121).code == 82


def test_g12_a_refused_connection_is_told_from_a_silent_machine(monkeypatch):
    """With a link that is down a connection times out, or there is no way to the other host."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        assert how_it_listens(f"127.0.0.1:{port}") is Listening.REFUSED
        probe.listen()
        assert how_it_listens(f"127.0.0.1:{port}") is Listening.ACCEPTED
    for error in (TimeoutError("timed out"), OSError(errno.EHOSTUNREACH, "no route to host")):

        def connect(*args, error=error, **kwargs):
            raise error

        monkeypatch.setattr(socket, "create_connection", connect)
        assert how_it_listens("10.0.0.1:2222") is Listening.SILENT


@pytest.mark.parametrize(
    ("goodbye", "code", "message"),
    [
        (Goodbye(), ServingExit.CHIEF_ENDED, f"{CHIEF} has ended"),
        (Goodbye(True, "ValueError: x"), ServingExit.CHIEF_FAILED, f"{CHIEF} has failed: ValueError: x"),
        (
            Goodbye(stopped=True),
            ServingExit.STOPPED,
            f"{CHIEF} has saved and ended, because of SIGTERM",
        ),
    ],
)
def test_after_a_goodbye_the_task_serves_until_the_chief_is_gone(goodbye, code, message):
    ends = watch()
    ends.probed(True, 10.0)
    ends.heard(goodbye, 11.0)
    ends.heard(Goodbye(), 11.1)
    assert ends.probed(True, 20.9) is None
    ending = ends.probed(False, 20.95)
    assert (ending.code, ending.message) == (code, message)
    # A chief that does not end after its goodbye is not waited for longer than 10 s.
    assert ends.probed(True, 21.0) == ending


def test_a_task_that_was_asked_to_stop_waits_for_the_chief_while_that_is_there():
    asked = watch()
    asked.probed(True, 10.0)
    asked.asked_to_stop()
    assert asked.probed(True, 30.0) is None
    # Nobody can save any more: 143 is 128 + SIGTERM.
    ending = asked.probed(False, 30.1)
    assert (ending.code, ending.message) == (143, f"SIGTERM, and {CHIEF} is not there")


def test_a_task_says_whether_it_was_asked_to_stop():
    heard, answers = [], iter([False, True])
    control = Control(Task("worker", 1), heard.append, lambda: next(answers))
    asked = [json.loads(control(b'{"command": "about stop"}'))["asked_to_stop"] for _ in range(2)]
    assert asked == [False, True]
    assert "asked_to_stop" not in json.loads(control(b'{"command": "ping"}'))
    assert heard == [None, None, None]


def test_the_chief_learns_who_was_asked_to_stop_though_another_task_is_gone():
    pauses = []

    def ask(task):
        if task.index == 0:
            raise OSError("gone")
        return {"asked_to_stop": len(pauses) > 3}

    stops = StopWatch([Task("worker", 0), Task("worker", 1)], ask, lambda seconds: pauses.append(seconds))
    stops.start()
    for thread in stops._threads:
        thread.join(10)
    assert stops.task == Task("worker", 1)
    # 0.5 s between two questions, and more after a failure.
    assert set(pauses) == {0.5, 2.0}


def test_a_task_obeys_three_commands_and_nothing_else():
    heard = []
    control = Control(Task("worker", 1), heard.append)
    identity = json.loads(control(b'{"command": "ping"}'))
    assert identity["task"] == "worker:1" and identity["pid"] > 0
    goodbye = Goodbye(True, "ValueError: two\n\x1b[31m lines" + "." * 400)
    assert json.loads(control(goodbye_text(goodbye).encode())) == identity
    ping, received = heard
    assert ping is None
    assert received.failed and received.reason.startswith("ValueError: two [31m lines...")
    assert len(received.reason) == 300
    for wrong in (b'{"command": "eval"}', b"{", b"[]", b"\xff", b'"goodbye"', 7):
        assert json.loads(control(wrong)) == {"error": "unknown command"}
    assert len(heard) == 2


@pytest.mark.parametrize(
    ("jobs", "task", "text"),
    [
        ({"chief": ["a:1"], "worker": ["b:1"]}, Task("chief", 0), "Only ps and workers .* is chief:0"),
        (
            {"chief": ["a:1"], "worker": ["b:1"]},
            Task("evaluator", 0),
            "Only ps and workers .* is evaluator:0",
        ),
        ({"ps": ["a:1"], "worker": ["b:1"]}, Task("ps", 0), "the cluster has no chief"),
    ],
)
def test_who_may_serve(jobs, task, text):
    with pytest.raises(ClusterSpecError, match=text):
        serve_until_chief_ends(ClusterSpecification.from_jobs(jobs, task=task))


# --- Real processes -------------------------------------------------------------------------------------------
def test_p12_a_killed_worker_serves_again_at_its_address_and_a_clean_end_gives_0():
    with Job(chief=1, worker=1, ps=1) as job:
        ps, worker, chief = job.start("ps"), job.start("worker"), job.start("chief")
        chief.read("connected")
        chief.tell("ping ps 0")
        assert json.loads(chief.read("answer "))["pid"] == ps.pid
        chief.tell("ping worker 0")
        assert json.loads(chief.read("answer "))["pid"] == worker.pid
        worker.send_signal(signal.SIGKILL)
        assert worker.wait() == -signal.SIGKILL
        worker = job.start("worker")
        chief.tell("reconnect worker 0")
        assert chief.read("sum ") == "5.0"
        chief.tell("ping worker 0")
        assert json.loads(chief.read("answer "))["pid"] == worker.pid
        chief.tell("ping ps 0")
        assert json.loads(chief.read("answer "))["pid"] == ps.pid
        twin = job.start("worker")
        assert twin.wait() == 1
        assert "OSError" in twin.text and "Task worker:0 cannot listen at 127.0.0.1:" in twin.text
        chief.tell("end")
        assert chief.wait() == 0
        assert (ps.wait(15), worker.wait(15)) == (0, 0)
        assert "ends with exit code" not in ps.text + worker.text


def test_an_exception_of_the_chief_is_told_also_when_a_worker_hangs():
    with Job(chief=1, worker=2) as job:
        worker, stopped, chief = job.start("worker", 0), job.start("worker", 1), job.start("chief")
        chief.read("connected")
        stopped.send_signal(signal.SIGSTOP)
        begin = time.monotonic()
        chief.tell("raise")
        assert chief.wait() == 1
        # Five seconds for all goodbyes, and the usual end of a process.
        assert time.monotonic() - begin < 12
        assert "no goodbye reached worker:1" in chief.text
        assert worker.wait(15) == ServingExit.CHIEF_FAILED
        expected = f"worker:0 ends with exit code 81: chief:0 at {job.jobs['chief'][0]} has failed: "
        assert expected + "ValueError: a mistake of the script" in worker.text


def test_a_killed_chief_is_named_with_how_long_it_was_gone():
    with Job(chief=1, worker=1) as job:
        worker, chief = job.start("worker", chief_timeout_seconds=3), job.start("chief")
        chief.read("connected")
        chief.tell("ping worker 0")
        chief.read("answer ")
        begin = time.monotonic()
        chief.tell("die")
        assert chief.wait() == -signal.SIGKILL
        assert worker.wait(30) == ServingExit.CHIEF_LOST
        # 3 s, a probe and the time between two of them.
        assert 1 < time.monotonic() - begin < 12
        assert (
            f"worker:0 ends with exit code 82: chief:0 at {job.jobs['chief'][0]} has been gone for"
            in worker.text
        )


def test_a_process_serves_once_and_gives_up_a_chief_that_never_comes():
    with Job(chief=1, worker=1) as job:
        worker = job.start("worker", twice=True)
        assert worker.read("refused ") == "This process serves already, as worker:0; a process serves once."
        worker.read(f"[tfdist-ext] waiting for chief:0 at {job.jobs['chief'][0]}")
        assert worker.wait() == ServingExit.CHIEF_NEVER_CAME


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)])
def test_a_signal_ends_a_server_at_once(signum, code):
    with Job(chief=1, ps=1) as job:
        ps = job.start("ps")
        ps.read("[tfdist-ext] waiting for chief:0")
        ps.send_signal(signum)
        assert ps.wait(5) == code


def test_m14_a_supervised_job_with_an_evaluator_ends_with_0():
    launcher = [sys.executable, "-m", "tfdist_ext.launch.command", "run"]
    flags = ["--chief", "--workers", "2", "--ps", "1", "--evaluator"]
    done = subprocess.run(
        [*launcher, *flags, "--", sys.executable, "-m", "tests.cluster.tasks"],
        env=environment_of_a_task(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[chief:0] sum 5.0") == 3
    assert "[chief:0] ends" in done.stdout and "[evaluator:0] evaluates alone" in done.stdout
    # Nobody had to be stopped, and nobody complained.
    assert "ends with exit code" not in done.stderr and "no goodbye" not in done.stderr
