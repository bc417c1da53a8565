"""A specification is frozen, valid, and ranks its tasks."""

import dataclasses

import pytest

from tfdist_ext.cluster import ClusterSpecification, Task, from_tf_config
from tfdist_ext.errors import ClusterSpecError

JOBS = {"worker": ["h1:1", "h2:1"], "chief": ["h0:1"], "ps": ["h3:1"]}


def as_task(type_, index, jobs=None):
    return ClusterSpecification.from_jobs(jobs or JOBS, task=Task(type_, index))


def test_chief_and_worker_0_have_distinct_global_ranks():
    ranks = {str(task): as_task(task.type, task.index).rank for task in as_task("chief", 0).training_tasks}
    assert ranks == {"chief:0": 0, "worker:0": 1, "worker:1": 2}
    assert as_task("worker", 0).world_size == 3


@pytest.mark.parametrize(
    ("task", "jobs", "expected"),
    [
        (Task("chief", 0), JOBS, True),
        (Task("worker", 0), JOBS, False),
        (Task("worker", 0), {"worker": ["h1:1", "h2:1"]}, True),
        (Task("worker", 1), {"worker": ["h1:1", "h2:1"]}, False),
        (Task("ps", 0), JOBS, False),
        (Task("evaluator", 0), JOBS, True),
    ],
)
def test_who_is_chief(task, jobs, expected):
    assert ClusterSpecification.from_jobs(jobs, task=task).is_chief is expected


def test_a_ps_has_no_rank():
    with pytest.raises(ClusterSpecError, match="ps:0 serves variables"):
        _ = as_task("ps", 0).rank


def test_without_members_it_is_a_job_of_one():
    cluster = ClusterSpecification()
    assert (cluster.world_size, cluster.rank, cluster.is_chief, cluster.address) == (1, 0, True, None)


def test_addresses_are_looked_up_by_task():
    cluster = as_task("worker", 1)
    assert cluster.address == "h2:1"
    assert cluster.address_of(Task("chief", 0)) == "h0:1"
    with pytest.raises(ClusterSpecError, match=r"worker:7 is not in the cluster.*worker \(2 tasks: 0, 1\)"):
        cluster.address_of(Task("worker", 7))


def test_members_are_ordered_whatever_the_order_given():
    assert list(as_task("ps", 0).jobs) == ["chief", "worker", "ps"]


def test_it_is_frozen_and_hashable():
    cluster = as_task("chief", 0)
    assert hash(cluster) == hash(as_task("chief", 0))
    with pytest.raises(dataclasses.FrozenInstanceError):
        cluster.task = Task("worker", 0)


@pytest.mark.parametrize("listed", [True, False])
def test_M14_evaluator_runs_alone_and_training_never_waits_for_it(listed):
    jobs = {"worker": ["h1:1", "h2:1"]} | ({"evaluator": ["h9:1"]} if listed else {})
    evaluator = as_task("evaluator", 0, jobs)
    assert (evaluator.world_size, evaluator.rank) == (1, 0)
    assert evaluator.training_tasks == (Task("evaluator", 0),)
    worker = as_task("worker", 1, jobs)
    assert worker.training_tasks == (Task("worker", 0), Task("worker", 1))


def test_M14_an_evaluator_that_is_missing_from_a_listed_job_is_an_error():
    with pytest.raises(ClusterSpecError, match=r"evaluator \(1 task: 0\)"):
        as_task("evaluator", 3, {"worker": ["h1:1"], "evaluator": ["h9:1"]})


def test_P19_parameter_servers_asked_for_without_a_ps_job():
    cluster = as_task("worker", 0, {"worker": ["h1:1", "h2:1"]})
    with pytest.raises(ClusterSpecError, match="ParameterServerStrategy needs a `ps` job.*worker.*Add"):
        cluster.require_parameter_servers()
    as_task("worker", 0).require_parameter_servers()


@pytest.mark.parametrize("task", [("boss", 0), ("worker", -1), ("worker", True), ("worker", "0")])
def test_a_task_is_validated(task):
    with pytest.raises(ClusterSpecError, match="Argument"):
        Task(*task)


def test_gaps_in_the_indices_keep_ranks_dense():
    cluster = from_tf_config(
        {"cluster": {"worker": {"0": "h:1", "5": "h:2"}}, "task": {"type": "worker", "index": 5}}
    )
    assert (cluster.rank, cluster.world_size, cluster.address) == (1, 2, "h:2")
