"""The supervisor's rules, without processes: time and exits are arguments."""

import signal

import hypothesis
import pytest
from hypothesis import strategies as st

from tfdist_ext.cluster import Task
from tfdist_ext.launch.decisions import (
    Failure,
    Finish,
    JobDecisions,
    Phase,
    Restart,
    Rules,
    SendSignal,
    exit_status,
)
from tfdist_ext.launch.plan import JobShape

CHIEF, EVALUATOR, PS = Task("chief", 0), Task("evaluator", 0), Task("ps", 0)
WORKER0, WORKER1 = Task("worker", 0), Task("worker", 1)
RULES = Rules(grace_seconds=10, worker_restarts=2)


def test_all_workers_end_well():
    job = JobDecisions([WORKER0, WORKER1], RULES)
    assert job.task_exited(WORKER0, 0, time=1) == []
    assert job.deadline is None
    assert job.task_exited(WORKER1, 0, time=2) == [Finish(0, None)]


def test_one_failure_stops_all_and_names_the_first():
    job = JobDecisions([WORKER0, WORKER1], RULES)
    assert job.task_exited(WORKER1, -9, time=1) == [SendSignal(WORKER0, signal.SIGTERM)]
    # The survivor fails too, as a consequence: it is not the cause.
    assert job.task_exited(WORKER0, 1, time=2) == [Finish(137, Failure(WORKER1, -9))]
    assert job.failed_at == 1 and not job.was_interrupted


def test_a_task_that_ignores_sigterm_is_killed_after_the_grace():
    job = JobDecisions([WORKER0, WORKER1], RULES)
    job.task_exited(WORKER1, 3, time=5)
    assert job.tick(time=14.9) == []
    assert job.tick(time=15) == [SendSignal(WORKER0, signal.SIGKILL)]
    assert job.task_exited(WORKER0, -9, time=16) == [Finish(3, Failure(WORKER1, 3))]


def test_a_worker_with_ps_is_restarted_alone_a_bounded_number_of_times():
    job = JobDecisions([PS, CHIEF, WORKER0], RULES)
    assert job.task_exited(WORKER0, -9, time=1) == [Restart(WORKER0, 1)]
    assert job.task_exited(WORKER0, 1, time=2) == [Restart(WORKER0, 2)]
    actions = job.task_exited(WORKER0, 1, time=3)
    assert actions == [SendSignal(PS, signal.SIGTERM), SendSignal(CHIEF, signal.SIGTERM)]
    assert job.first_failure == Failure(WORKER0, 1)


@pytest.mark.parametrize("task", [PS, CHIEF])
def test_ps_and_chief_are_never_restarted(task):
    job = JobDecisions([PS, CHIEF, WORKER0], RULES)
    assert SendSignal(WORKER0, signal.SIGTERM) in job.task_exited(task, 1, time=1)


def test_when_the_chief_of_a_job_with_ps_has_ended_the_others_get_grace_and_no_blame():
    job = JobDecisions([PS, CHIEF, WORKER0], RULES)
    assert job.task_exited(CHIEF, 0, time=100) == []
    assert job.task_exited(WORKER0, 1, time=101) == []  # It lost its chief: no restart, no failure.
    assert job.tick(time=110) == [SendSignal(PS, signal.SIGTERM)]
    assert job.task_exited(PS, -15, time=111) == [Finish(0, None)]


def test_without_a_chief_the_workers_of_a_job_with_ps_are_waited_for():
    job = JobDecisions([PS, WORKER0, WORKER1], RULES)
    job.task_exited(WORKER0, 0, time=1)
    assert job.phase is Phase.TRAINING
    job.task_exited(WORKER1, 0, time=2)
    assert (job.phase, job.deadline) == (Phase.DRAINING, 12)


def test_a_chief_that_ends_before_its_fellow_workers_does_not_end_synchronous_training():
    job = JobDecisions([CHIEF, WORKER0], RULES)
    assert job.task_exited(CHIEF, 0, time=1) == []
    assert job.phase is Phase.TRAINING


def test_M14_training_does_not_wait_for_an_evaluator_but_its_own_failure_counts():
    job = JobDecisions([WORKER0, EVALUATOR], RULES)
    job.task_exited(WORKER0, 0, time=1)
    assert job.tick(time=11) == [SendSignal(EVALUATOR, signal.SIGTERM)]
    assert job.task_exited(EVALUATOR, -15, time=12) == [Finish(0, None)]
    job = JobDecisions([WORKER0, EVALUATOR], RULES)
    job.task_exited(WORKER0, 0, time=1)
    assert job.task_exited(EVALUATOR, 4, time=2) == [Finish(4, Failure(EVALUATOR, 4))]


def test_a_first_signal_is_passed_on_and_a_second_one_kills():
    job = JobDecisions([WORKER0, WORKER1], RULES)
    assert job.interrupted(signal.SIGINT, time=1) == [
        SendSignal(WORKER0, signal.SIGINT),
        SendSignal(WORKER1, signal.SIGINT),
    ]
    job.task_exited(WORKER0, 1, time=2)
    assert job.interrupted(signal.SIGINT, time=3) == [SendSignal(WORKER1, signal.SIGKILL)]
    # Who was asked to stop has not failed; the job did not end well either: 128 + 2.
    assert job.task_exited(WORKER1, -9, time=4) == [Finish(130, None)]
    assert job.was_interrupted


def test_a_signal_that_comes_while_a_failed_job_stops_is_remembered():
    job = JobDecisions([WORKER0, WORKER1], RULES)
    job.task_exited(WORKER0, 1, time=1)
    assert job.interrupted(signal.SIGTERM, time=2) == [SendSignal(WORKER1, signal.SIGKILL)]
    assert job.was_interrupted


@pytest.mark.parametrize(("code", "status"), [(0, 0), (3, 3), (-9, 137), (-15, 143)])
def test_exit_status(code, status):
    assert exit_status(code) == status


@pytest.mark.parametrize("arguments", [{"grace_seconds": -1}, {"worker_restarts": -1}])
def test_rules_are_validated(arguments):
    with pytest.raises(ValueError, match="must not be negative"):
        Rules(**arguments)


shapes = st.builds(
    JobShape,
    num_workers=st.integers(1, 3),
    chief=st.booleans(),
    num_ps=st.integers(0, 2),
    evaluator=st.booleans(),
)
codes = st.sampled_from([0, 0, 1, 3, -9, -15])


@hypothesis.given(shapes, st.integers(0, 2), st.data())
def test_any_history_ends_once_with_the_first_unmended_failure(shape, worker_restarts, data):
    tasks = shape.tasks()
    job = JobDecisions(tasks, Rules(grace_seconds=5, worker_restarts=worker_restarts))
    running, restarts, finishes, time = set(tasks), [], [], 0.0
    failures, interrupted, was_stopping = [], False, False
    while not finishes:
        time += data.draw(st.floats(0, 4), label="time passes")
        event = data.draw(st.sampled_from(["exit", "exit", "exit", "tick", "signal"]), label="event")
        if event == "exit":
            task = data.draw(st.sampled_from(sorted(running, key=str)), label="task")
            code = data.draw(codes, label="code")
            phase = job.phase
            actions = job.task_exited(task, code, time)
            running.remove(task)
            if code and not any(isinstance(action, Restart) for action in actions):
                if phase is Phase.TRAINING or (phase is Phase.DRAINING and task.type == "evaluator"):
                    failures.append(Failure(task, code))
        elif event == "tick":
            actions = job.tick(time)
        else:
            interrupted = interrupted or not was_stopping
            actions = job.interrupted(signal.SIGTERM, time)
        for action in actions:
            if isinstance(action, Restart):
                assert shape.num_ps and action.task.type == "worker" and not was_stopping
                restarts.append(action.task)
                running.add(action.task)
            elif isinstance(action, SendSignal):
                was_stopping = True
                assert action.task in running
            else:
                finishes.append(action)
        assert set(job.running) == running
    assert not running and len(finishes) == 1
    assert all(restarts.count(task) <= worker_restarts for task in tasks)
    (finish,) = finishes
    assert finish.first_failure == (failures[0] if failures else None)
    assert (finish.code == 0) == (not failures and not interrupted)
    assert job.tick(time + 100) == [] and job.interrupted(signal.SIGINT, time) == []


@hypothesis.given(shapes, st.data())
def test_once_stopping_everything_is_killed_within_the_grace(shape, data):
    tasks = shape.tasks()
    job = JobDecisions(tasks, Rules(grace_seconds=5, worker_restarts=0))
    failed = data.draw(st.sampled_from(tasks))
    job.task_exited(failed, 1, time=10)
    if job.running:
        assert job.deadline == 15
        assert {action.task for action in job.tick(15)} == set(tasks) - {failed}
