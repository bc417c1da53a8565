"""The pool itself, with functions that return, raise, hang and die."""

import os
import time

import numpy as np
import pytest

from tests.testing import programs
from tfdist_ext.errors import CollectiveError, PeerLostError
from tfdist_ext.testing import WorkerJobError, WorkerJobTimeout, WorkerPool, start_processes


@pytest.fixture(scope="module")
def pool():
    # One that no other test has used: here the processes are counted.
    with WorkerPool(max_idle_processes=2) as pool:
        yield pool


def is_alive(pid):
    try:
        os.kill(pid, 0)
        return True
    except ProcessLookupError:
        return False


def test_results_by_rank_and_a_fresh_tf_config_for_each_job(pool):
    first = pool.run("tests.testing.programs:describe", scale=1.5, per_worker=[{}, {"offset": 3}])
    second = pool.run(programs.describe, scale=2.5)
    for rank, result in enumerate(first):
        assert result["tf_config"]["task"] == {"type": "worker", "index": rank}
        assert result["devices"] == 1 and result["threads"] == ["2", "1"]
        assert result["nested"]["values"] == [3.0, (3 if rank else 0.0, None)]
        assert result["nested"][7].tolist() == [0, 1, 2] and result["nested"][7].dtype == np.int16
    # The same processes, other ports.
    assert [result["pid"] for result in first] == [result["pid"] for result in second]
    assert [result["num_calls"] for result in second] == [2, 2]
    ports = [set(results[0]["tf_config"]["cluster"]["worker"]) for results in (first, second)]
    assert len(ports[0]) == len(ports[1]) == 2 and not ports[0] & ports[1]


def test_a_job_finds_nothing_of_the_one_before(pool):
    first, second = (pool.run(programs.leave_traces)[0] for _ in range(2))
    for found in (first, second):
        assert found["floatx"] == "float32" and not found["eager"]
        assert found["layer"] == ["dense", "float64"]
    # Not seeded: the seed that the first job set would make the draws of the second one those after 1.
    assert first["draws"] != second["draws"]


def test_an_exception_comes_back_with_its_facts_and_the_processes_are_replaced(pool):
    before = [result["pid"] for result in pool.run(programs.describe, scale=1.0)]
    with pytest.raises(WorkerJobError, match="worker 1 raised PeerLostError") as caught:
        pool.run(programs.fail_on, rank=1)
    returned, failed = caught.value.outcomes
    assert returned.succeeded and returned.result == 1
    failure = failed.failure
    assert (failure.type_name, failure.module) == ("PeerLostError", "tfdist_ext.errors")
    assert failure.message == "worker:1 is gone" and "in fail_on" in failure.traceback
    assert failure.attributes == {
        "task": "worker:1",
        "collective": "gradients/3",
        "step": 7,
        "waited_seconds": 2.5,
    }
    assert failure.is_a(PeerLostError) and failure.is_a(CollectiveError) and not failure.is_a(ValueError)
    assert not any(is_alive(pid) for pid in before)
    after = [result["pid"] for result in pool.run(programs.describe, scale=1.0)]
    assert not set(before) & set(after)


def test_a_function_that_hangs_is_killed_with_its_stacks(pool):
    # Long enough to get into the function on a busy machine.
    begin = time.monotonic()
    with pytest.raises(WorkerJobTimeout, match="in hang_on") as caught:
        pool.run(programs.hang_on, rank=0, timeout_seconds=5.0)
    assert time.monotonic() - begin < 30
    late, returned = caught.value.outcomes
    assert late.timed_out and "in hang_on" in late.stacks and returned.succeeded
    assert isinstance(caught.value, TimeoutError)


def test_a_process_that_dies_is_reported_with_its_signal_and_last_words(pool):
    with pytest.raises(WorkerJobError, match="worker 1 died with exit code -9") as caught:
        pool.run(programs.die_on, rank=1)
    assert caught.value.outcomes[1].last_lines[-1] == "the last words"
    assert caught.value.outcomes[0].succeeded


def test_a_result_that_cannot_cross_is_named(pool):
    (outcome,) = pool.outcomes(programs.return_unsendable, num_workers=1)
    assert outcome.failure.is_a(TypeError) and "the result['a'][1] is a object" in outcome.failure.message


def test_idle_processes_are_bounded_and_layouts_share_them(pool):
    pids = {result["pid"] for result in pool.run(programs.describe, scale=1.0, num_workers=2)}
    single = pool.run(programs.describe, scale=1.0, num_workers=1)[0]
    assert single["pid"] in pids  # A job of one takes a process of the job of two.
    other = pool.run(programs.describe, scale=1.0, num_workers=1, devices=3)[0]
    assert other["devices"] == 3
    # Two may stay: the new one, and the one used last.
    assert [pid for pid in pids if is_alive(pid)] == [single["pid"]] and is_alive(other["pid"])
    fresh = pool.run(programs.describe, scale=1.0, num_workers=1, fresh=True)[0]
    assert fresh["num_calls"] == 1 and not is_alive(fresh["pid"])


def test_workers_reach_each_other(worker_pool):
    results = worker_pool.run(
        programs.all_reduce, per_worker=[{"values": [1.0, 2.0]}, {"values": [10.0, 20.0]}]
    )
    assert [result.tolist() for result in results] == [[11.0, 22.0]] * 2


def test_a_local_function_is_refused(pool):
    with pytest.raises(ValueError, match="at the top of a module"):
        pool.run(lambda: None)
    with pytest.raises(ValueError, match="`per_worker` must have one entry"):
        pool.run(programs.fail_on, per_worker=[{}])


def test_started_processes_can_be_killed_stopped_and_resumed(tmp_path):
    path = tmp_path / "told"
    with start_processes(programs.talk_until_told, num_workers=3, path=str(path)) as group:
        lines = group.wait_for("step 1")
        assert lines == [f"step 1 of worker {rank}" for rank in range(3)]
        group.kill(2)
        group.stop(1)
        path.write_text("go")
        outcomes = group.outcomes(timeout_seconds=1.0)
        assert outcomes[0].result == "go"
        assert outcomes[1].timed_out and outcomes[1].stacks == ""  # It cannot even say where it is.
        assert outcomes[2].exit_code == -9
        assert group.close() == [0, 0, -9]
        with pytest.raises(TimeoutError, match="No line with 'never'"):
            group.wait_for("never", rank=0, timeout_seconds=0.1)
    assert not any(is_alive(process.pid) for process in group.processes)
