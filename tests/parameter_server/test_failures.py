"""What do `fit`, `evaluate` and `predict` make of workers that die, stop, or come back? Real processes, real signals.

The weights of the model count how often each row was applied; see `programs.counting_model`.
"""

import signal

import pytest

from tests.parameter_server.cluster import Cluster

# 120 rows in batches of 2.
NUM_BATCHES = 60
STEPS = {"Asynchronous": 60, "BoundedStaleness": 60, "Synchronous": 30}


def check_joined(cluster, facts, expected):
    """Each call that is tried again, since its worker still listens, leaves and joins once more if time is left."""
    tried_again = sum("trying again" in line for line in cluster.chief_lines())
    assert expected <= facts["total"]["num_joined"] <= expected + tried_again, facts


def check_each_row_once(facts, policy):
    assert facts["counts"] == [1.0]
    assert facts["iterations"] == STEPS[policy]
    assert (facts["total"]["applied"], facts["total"]["dropped"]) == (NUM_BATCHES, 0)
    assert sum(facts["applied"].values()) == NUM_BATCHES


@pytest.mark.parametrize("policy", STEPS)
def test_p12_a_killed_worker_comes_back_and_works_and_every_row_is_applied_once(cluster, policy):
    # TF#7767.
    cluster.begin("lose_workers", policy=policy, victims=[1], returns=[1])
    cluster.wait_for("signalled 1")
    cluster.restart("worker", 1)
    facts = cluster.result()
    check_each_row_once(facts, policy)
    # Two workers at first, and the one that came back.
    check_joined(cluster, facts, 3)
    assert facts["applied"][1] > facts["applied_before"][1]
    assert {("worker_lost", "worker:1"), ("worker_returned", "worker:1")} <= set(facts["events"])


def test_p12_with_both_workers_dead_training_waits_says_for_whom_and_goes_on_with_one(cluster):
    cluster.begin("lose_workers", policy="Synchronous", victims=[0, 1], returns=[])
    cluster.wait_for("signalled 0 1")
    said = cluster.wait_for("none of 2 is there")
    for index in (0, 1):
        assert f"worker:{index} at {cluster.jobs['worker'][index]}" in said
    # The connection to the other one is still missing while this one is made.
    cluster.restart("worker", 0)
    facts = cluster.result()
    check_each_row_once(facts, "Synchronous")
    check_joined(cluster, facts, 3)
    cluster.restart("worker", 1)


@pytest.mark.parametrize("moment", ["held", "delivered"])
def test_p12_the_batch_of_a_set_that_died_with_its_worker_is_computed_again(cluster, moment):
    cluster.begin("lose_a_worker_with_its_set", moment=moment)
    cluster.wait_for("signalled 1")
    facts = cluster.result()
    check_each_row_once(facts, "BoundedStaleness")
    assert facts["total"]["lost"] >= 1
    cluster.restart("worker", 1)


@pytest.mark.parametrize(
    ("policy", "seed"), [("Asynchronous", 1), ("BoundedStaleness", 2), ("Synchronous", 3)]
)
def test_p12_a_worker_killed_at_a_random_moment_and_gone_for_good(cluster, policy, seed):
    cluster.begin("lose_a_worker_at_any_moment", policy=policy, seed=seed)
    cluster.wait_for("signalled 1")
    facts = cluster.result()
    cluster.restart("worker", 1)
    check_each_row_once(facts, policy)
    check_joined(cluster, facts, 2)


def test_p12_evaluate_and_predict_count_every_row_once_and_keep_the_order(cluster):
    cluster.begin("evaluate_while_a_worker_dies")
    cluster.wait_for("signalled 1")
    cluster.restart("worker", 1)
    # All weights are 0, and the labels the row numbers: the mean of 0 ... 79.
    assert cluster.result() == 39.5
    cluster.begin("predict_while_a_worker_dies")
    cluster.wait_for("signalled 1")
    # Weight i is i.
    assert cluster.result() == list(range(80))
    cluster.restart("worker", 1)


def test_a_fault_of_the_user_is_raised_once_with_its_own_text_and_training_can_go_on(cluster):
    outcomes = cluster.run("fail_in_user_code")
    assert "labels are too large" in outcomes["train_step"]["text"]
    assert "row 13 is odd" in outcomes["input"]["text"]
    assert outcomes["tracing"]["text"] == "'no such feature'"
    assert [outcomes[name]["type"] for name in ("train_step", "input", "tracing")] == [
        "InvalidArgumentError",
        "InvalidArgumentError",
        "KeyError",
    ]
    for outcome in outcomes.values():
        assert outcome["seconds"] < 10
        # 24 rows in batches of 2, by both workers.
        assert outcome["afterwards"] == [[1.0], 12]
        assert outcome["workers"] == [0, 1]
    # None of them is a worker's fault.
    assert not [line for line in cluster.chief_lines() if "trying again" in line or " is lost" in line]


@pytest.mark.parametrize(("policy", "rows_a_step"), [("BoundedStaleness", 2), ("Synchronous", 4)])
def test_nothing_is_applied_while_callbacks_run(cluster, policy, rows_a_step):
    # 48 rows a epoch.
    seen = cluster.run("watch_the_fences", policy=policy)
    assert len(seen["pauses"]) == 8
    for before, after in seen["pauses"]:
        assert before == after
        version, iterations, total = before
        assert version - seen["version_at_first"] == iterations and total == -rows_a_step * iterations
    assert seen["complete"] == [[2.0], 2 * 48 / rows_a_step]
    # Batches 0, 1, 2, 3.
    assert seen["stopped"] == [4 * rows_a_step, 4]
    assert seen["after"] == [1.0]


def test_a_stopped_worker_is_cut_off_its_batch_goes_to_another_and_what_it_sends_later_is_not_used(cluster):
    arguments = {"signum": int(signal.SIGSTOP), "worker_timeout_seconds": 1.0}
    facts = cluster.run("lose_workers", policy="BoundedStaleness", victims=[1], returns=[], **arguments)
    check_each_row_once(facts, "BoundedStaleness")
    assert facts["total"]["lost"] >= 1
    cluster.signal("worker", 1, signal.SIGCONT)
    assert cluster.run("count_when_all_are_back") == [1.0]


def test_a_worker_that_is_stopped_while_functions_are_new_is_cut_off_too(cluster):
    arguments = {"signum": int(signal.SIGSTOP), "worker_timeout_seconds": 1.0, "at": 0}
    facts = cluster.run("lose_workers", policy="Asynchronous", victims=[1], returns=[], **arguments)
    check_each_row_once(facts, "Asynchronous")
    cluster.signal("worker", 1, signal.SIGCONT)
    assert cluster.run("count_when_all_are_back") == [1.0]


@pytest.mark.parametrize("what", ["constant", "variable", "function", "end of a function"])
def test_the_chiefs_threads_run_while_it_sends_something_to_a_stopped_worker(cluster, what):
    # TensorFlow's own calls keep the interpreter's lock: the thread that wakes the worker would never run.
    assert cluster.run("send_to_a_stopped_worker", what=what) == 3.0


def test_a_stopped_ps_is_waited_for_and_named(cluster):
    cluster.begin("train_while_a_ps_is_stopped")
    cluster.wait_for("stopped ps:0")
    said = cluster.wait_for("does not answer")
    assert f"ps:0 at {cluster.jobs['ps'][0]} does not answer (" in said
    cluster.signal("ps", 0, signal.SIGCONT)
    facts = cluster.result()
    assert facts["counts"] == [1.0]
    assert (facts["total"]["applied"], facts["total"]["lost"]) == (20, 0)


def test_the_chief_ends_by_itself_though_a_worker_was_stopped_and_nobody_has_noticed():
    with Cluster(spare=False) as cluster:
        assert cluster.run("train_and_stop_a_worker") == [1.0]
        assert cluster.finish(15) == 0
        assert (cluster.exit_code("worker", 0), cluster.exit_code("ps", 0)) == (0, 0)


def test_the_chief_ends_by_itself_though_a_worker_is_stopped(cluster):
    """The last test: it ends the cluster."""
    arguments = {"signum": int(signal.SIGSTOP), "worker_timeout_seconds": 1.0}
    facts = cluster.run("lose_workers", policy="Asynchronous", victims=[1], returns=[], **arguments)
    check_each_row_once(facts, "Asynchronous")
    # A goodbye may take 5 s; the rest is the usual end of a process.
    assert cluster.finish(15) == 0
    assert (cluster.exit_code("worker", 0), cluster.exit_code("ps", 0)) == (0, 0)
