"""The chief says whom it waits for, and names all who did not come."""

import socket
import threading

import pytest

from tfdist_ext.cluster import ClusterSpecification, Task, listening, wait_for_tasks
from tfdist_ext.cluster.ports import ReservedPorts
from tfdist_ext.cluster.reachability import RollCall
from tfdist_ext.errors import ClusterSpecError, StartupTimeoutError

WORKERS = {Task("worker", index): f"10.0.0.{index}:2222" for index in range(3)}


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.fixture
def closed_ports():
    """Two ports at which nothing listens, and nothing will."""
    reserved = ReservedPorts(2)
    yield reserved.ports
    reserved.release()


def address_of(listener):
    return f"127.0.0.1:{listener.getsockname()[1]}"


def test_the_roll_call_is_quiet_at_first_then_names_who_is_missing():
    roll = RollCall(WORKERS, timeout_seconds=100, started=50)
    assert roll.words(51.9) is None
    roll.answered([Task("worker", 1)])
    expected = "waiting for worker:0 at 10.0.0.0:2222, worker:2 at 10.0.0.2:2222 (2 s)"
    assert roll.words(52.0) == expected
    assert roll.words(81.9) is None
    roll.answered([Task("worker", 2), Task("worker", 1)])
    assert roll.words(82.0) == "waiting for worker:0 at 10.0.0.0:2222 (32 s)"
    assert roll.error(149.9) is None
    error = roll.error(150.0)
    assert error.missing == ("worker:0 at 10.0.0.0:2222",)
    assert error.waited_seconds == 100
    assert "After 100.0 s nothing listens at the address of worker:0 at 10.0.0.0:2222. Start it" in str(error)


def test_the_roll_call_ends_when_all_have_answered():
    roll = RollCall(WORKERS, timeout_seconds=1, started=0)
    roll.answered(WORKERS)
    assert roll.words(5) is None and roll.error(5) is None


def test_listening(listener, closed_ports):
    assert listening(address_of(listener))
    assert not listening(f"127.0.0.1:{closed_ports[0]}")
    assert not listening("no-such-host.invalid:2222")


def test_m8_absent_tasks_are_announced_and_all_named(listener, closed_ports):
    jobs = {
        "chief": [f"127.0.0.1:{closed_ports[0]}"],
        "worker": [address_of(listener), f"127.0.0.1:{closed_ports[1]}"],
        "ps": ["no-such-host.invalid:2222"],
    }
    cluster = ClusterSpecification.from_jobs(jobs, task=Task("chief", 0))
    said = []
    with pytest.raises(StartupTimeoutError) as caught:
        wait_for_tasks(cluster, timeout_seconds=2.5, announce=said.append)
    missing = (f"worker:1 at 127.0.0.1:{closed_ports[1]}", "ps:0 at no-such-host.invalid:2222")
    assert caught.value.missing == missing
    # A round of probes takes a second at most.
    assert 2.5 <= caught.value.waited_seconds < 4.5
    assert len(said) == 1 and all(name in said[0] for name in missing)


def test_a_task_that_comes_late_is_waited_for(closed_ports):
    cluster = ClusterSpecification.from_jobs(
        {"chief": ["127.0.0.1:1"], "ps": [f"127.0.0.1:{closed_ports[0]}"]}, task=Task("chief", 0)
    )
    came = threading.Event()

    def come(sentence):
        """Starts to listen once this test's task is known to be waited for."""
        server = socket.create_server(("127.0.0.1", closed_ports[0]), reuse_port=False)
        threading.Thread(target=lambda: (server.accept(), server.close(), came.set()), daemon=True).start()

    wait_for_tasks(cluster, [Task("ps", 0)], timeout_seconds=30, announce=come)
    assert came.wait(5)


def test_whom_to_wait_for_is_checked():
    cluster = ClusterSpecification.from_jobs({"chief": ["127.0.0.1:1"]}, task=Task("chief", 0))
    wait_for_tasks(cluster, timeout_seconds=0)
    with pytest.raises(ClusterSpecError, match="worker:7 is not in the cluster"):
        wait_for_tasks(cluster, [Task("worker", 7)])


def test_by_default_the_sentence_goes_to_standard_error(closed_ports, capsys):
    jobs = {"worker": [f"127.0.0.1:{closed_ports[0]}"], "chief": ["127.0.0.1:1"]}
    cluster = ClusterSpecification.from_jobs(jobs, task=Task("chief", 0))
    with pytest.raises(StartupTimeoutError):
        wait_for_tasks(cluster, timeout_seconds=2.1)
    assert capsys.readouterr().err.startswith("[tfdist-ext] waiting for worker:0 at 127.0.0.1:")
