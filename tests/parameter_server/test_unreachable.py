"""What does the chief do with a worker that something keeps from working? The calls are made to fail."""

import queue
import socket
import threading
import time

import pytest
import tensorflow as tf

import tfdist_ext
from tfdist_ext.cluster import ClusterSpecification, Task
from tfdist_ext.cluster.ports import ReservedPorts
from tfdist_ext.cluster.reachability import answers, hang_up, listening
from tfdist_ext.training import worker_threads
from tfdist_ext.training.worker_threads import WorkerThreads

DEADLINE_SECONDS = 20.0


class Impostor:
    """Accepts every connection and closes it at once, as the proxy before a dead server does."""

    def __enter__(self):
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        return self

    def _serve(self):
        while True:
            try:
                self._server.accept()[0].close()
            except OSError:
                return

    def __exit__(self, *exception):
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join(DEADLINE_SECONDS)


class Owner:
    """Gives the worker its job again whenever it is there, as a driver does, and keeps what it is told."""

    def __init__(self, error):
        self.error, self.told, self.attempts = error, queue.SimpleQueue(), []

    def run(self, worker):
        self.attempts.append(time.monotonic())
        raise self.error

    def lost(self, worker):
        pass

    def failed(self, *arguments):
        self.worker_joined = lambda index: None
        self.told.put(arguments[-1])

    def worker_lost(self, index):
        pass

    def worker_joined(self, index):
        self.threads.submit(index, self)

    def close(self):
        pass


def outcome(worker, ps, error):
    """Has a job fail on the only worker until training ends; returns what ends it, and when it was tried."""
    jobs = {"chief": ["127.0.0.1:1"], "worker": [worker.address], "ps": [ps.address]}
    owner = Owner(error)
    owner.threads = WorkerThreads(ClusterSpecification.from_jobs(jobs, task=Task("chief", 0)), None)
    owner.threads.take_over(owner, DEADLINE_SECONDS, 10 * DEADLINE_SECONDS)
    owner.threads.submit(0, owner)
    return owner.told.get(timeout=DEADLINE_SECONDS), owner.attempts


UNAVAILABLE = tf.errors.UnavailableError(None, None, "the peer is not available")


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    """Connecting works, whatever listens there: TensorFlow knows no task of these tests."""
    monkeypatch.setattr(worker_threads.compat, "update_cluster", lambda *arguments: None)


def test_p14_an_address_where_no_worker_listens_is_tried_a_few_times_and_named():
    # TF#45088.
    with Impostor() as impostor, Impostor() as ps:
        assert listening(impostor.address) and not answers(impostor.address)
        began = time.monotonic()
        told, attempts = outcome(impostor, ps, UNAVAILABLE)
        assert isinstance(told, tfdist_ext.WorkersLostError)
        assert str(told).startswith(
            f"worker:0 at {impostor.address} listens, but 5 connections in a row were of no use"
        )
        assert "the peer is not available" in str(told)
        assert told.tasks == (f"worker:0 at {impostor.address}",)
        # The job failed once; then pauses of 0.2, 0.4, 0.8 and 1.6 s between connections.
        assert len(attempts) == 1
        assert 3.0 <= time.monotonic() - began < 10


def test_p14_a_worker_that_answers_but_whose_calls_fail_for_ever_is_tried_ever_more_slowly(monkeypatch):
    # The worker cannot reach the ps, for instance.
    monkeypatch.setattr(worker_threads, "answers", lambda address: True)
    monkeypatch.setattr(worker_threads, "_FIRST_PAUSE_SECONDS", 0.01)
    with Impostor() as worker, Impostor() as ps:
        told, attempts = outcome(worker, ps, UNAVAILABLE)
    assert isinstance(told, tfdist_ext.WorkersLostError)
    # Five failures make one connection, and five connections are enough.
    assert len(attempts) == 25
    pauses = [after - before for before, after in zip(attempts, attempts[1:], strict=False)]
    # 0.02, 0.04, 0.08 and 0.16 s, each with some time for the call itself.
    for number, pause in enumerate(pauses[:4], start=1):
        assert pause >= 0.01 * 2**number


def test_an_error_of_the_function_itself_is_not_tried_again():
    error = tf.errors.InvalidArgumentError(None, None, "a bad value")
    with pytest.MonkeyPatch.context() as patch, Impostor() as worker, Impostor() as ps:
        patch.setattr(worker_threads, "answers", lambda address: True)
        assert outcome(worker, ps, error)[0] is error


def test_a_call_to_a_process_that_does_not_answer_is_cut_off():
    # A listener that nobody serves: the kernel takes the connection, as it does for a stopped process.
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert listening(address) and not answers(address, 0.2)
        with socket.create_connection(silent.getsockname()) as waits:
            with socket.create_connection(other.getsockname()) as stays:
                waits.settimeout(DEADLINE_SECONDS)
                hang_up(address)
                assert waits.recv(1) == b""
                stays.sendall(b"x")
                assert other.accept()[0].recv(1) == b"x"


def test_m8_a_worker_that_was_not_started_is_named_by_the_strategy():
    # TF#39922.
    reserved = ReservedPorts(3)
    chief, worker, ps = (f"127.0.0.1:{port}" for port in reserved.ports)
    reserved.release()
    jobs = {"chief": [chief], "worker": [worker], "ps": [ps]}
    specification = ClusterSpecification.from_jobs(jobs, task=Task("chief", 0))
    host, port = ps.split(":")
    with socket.create_server((host, int(port))):
        began = time.monotonic()
        with pytest.raises(tfdist_ext.StartupTimeoutError, match=f"worker:0 at {worker}") as caught:
            tfdist_ext.ParameterServerStrategy(specification, startup_timeout_seconds=1.0)
        assert caught.value.missing == (f"worker:0 at {worker}",)
        assert 1.0 <= time.monotonic() - began < 5
