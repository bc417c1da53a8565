"""Every task of a local job gets a correct TF_CONFIG, a free port and its share of the CPU."""

import random
import socket
import subprocess
import sys

import hypothesis
import pytest
from hypothesis import strategies as st

from tfdist_ext.cluster import Task, from_tf_config
from tfdist_ext.cluster.environment import restart_count
from tfdist_ext.cluster.ports import ReservedPorts
from tfdist_ext.launch.plan import JobShape, plan_environments, tasks_with_address

shapes = st.builds(
    JobShape,
    num_workers=st.integers(1, 4),
    chief=st.booleans(),
    num_ps=st.integers(0, 3),
    evaluator=st.booleans(),
)


def plan(shape, **arguments):
    ports = range(10_000, 10_000 + len(tasks_with_address(shape)))
    return plan_environments(shape, ports, **{"num_threads": 8, "inherited": {}, **arguments})


@hypothesis.given(shapes)
def test_every_tf_config_is_valid_and_they_describe_one_cluster(shape):
    environments = plan(shape)
    assert list(environments) == shape.tasks()
    clusters = {task: from_tf_config(variables["TF_CONFIG"]) for task, variables in environments.items()}
    assert all(cluster.task == task for task, cluster in clusters.items())
    assert len({cluster.members for cluster in clusters.values()}) == 1
    members = next(iter(clusters.values())).members
    assert len(members) == shape.num_workers + shape.chief + shape.num_ps
    assert len({address for _, address in members}) == len(members)


def test_M14_the_evaluator_is_not_in_the_cluster():
    shape = JobShape(num_workers=2, evaluator=True)
    cluster = from_tf_config(plan(shape)[Task("evaluator", 0)]["TF_CONFIG"])
    assert list(cluster.jobs) == ["worker"]
    assert (cluster.task, cluster.world_size) == (Task("evaluator", 0), 1)


@hypothesis.given(shapes, st.integers(1, 64))
def test_threads_are_divided_and_nobody_gets_fewer_than_2_inter_op_threads(shape, num_threads):
    environments = plan(shape, num_threads=num_threads)
    intra = [int(variables["TF_NUM_INTRAOP_THREADS"]) for variables in environments.values()]
    assert min(intra) >= 1
    assert sum(intra) <= max(num_threads, len(environments))
    assert all(int(variables["TF_NUM_INTEROP_THREADS"]) >= 2 for variables in environments.values())


def test_thread_counts_of_the_users_environment_stay_unless_the_flag_is_given():
    users = {
        "TF_NUM_INTRAOP_THREADS": "3",
        "TF_NUM_INTEROP_THREADS": "1",
        "OMP_NUM_THREADS": "5",
        "HOME": "/h",
    }
    shape = JobShape(num_workers=2)
    variables = plan(shape, inherited=users)[Task("worker", 0)]
    assert variables["TF_NUM_INTRAOP_THREADS"] == "3" and variables["OMP_NUM_THREADS"] == "5"
    assert variables["TF_NUM_INTEROP_THREADS"] == "2"  # 1 hangs: see MIN_INTER_OP_THREADS.
    assert variables["HOME"] == "/h" and variables["PYTHONUNBUFFERED"] == "1"
    forced = plan(shape, inherited=users, force=True)[Task("worker", 0)]
    assert forced["TF_NUM_INTRAOP_THREADS"] == "4"  # 8 threads for 2 tasks.


def test_every_task_learns_how_often_the_group_was_started_before():
    # What the launcher itself was given is about another group.
    environments = plan(JobShape(evaluator=True), inherited={"TFDIST_RESTART_COUNT": "7"}, restart_count=2)
    assert [restart_count(variables) for variables in environments.values()] == [2, 2, 2]
    assert restart_count({}) == restart_count({"TFDIST_RESTART_COUNT": "soon"}) == 0


@pytest.mark.parametrize(
    "arguments", [{"num_workers": 0}, {"num_workers": -1, "chief": True}, {"num_ps": -1}]
)
def test_impossible_shapes(arguments):
    with pytest.raises(ValueError, match="Try at least one worker|must not be negative"):
        JobShape(**arguments)


def test_reserved_ports_are_distinct_held_and_free_after_the_release():
    first, second = ReservedPorts(5), ReservedPorts(5)
    assert len(set(first.ports + second.ports)) == 10
    with socket.socket() as other, pytest.raises(OSError):
        other.bind(("127.0.0.1", first.ports[0]))
    first.release()
    second.release()
    for port in first.ports:
        with socket.socket() as task:
            task.bind(("127.0.0.1", port))
            task.listen()


class Draws:
    """A chooser that draws what it is told, then at random."""

    def __init__(self, *ports):
        self.ports = list(ports)

    def randrange(self, start, stop):
        return self.ports.pop(0) if self.ports else random.randrange(start, stop)


DRAW_IN_ANOTHER_PROCESS = """
import sys
from tests.launch.test_plan import Draws, ReservedPorts

print(ReservedPorts(1, chooser=Draws(int(sys.argv[1]))).ports[0])
"""


def test_a_released_port_is_drawn_again_neither_here_nor_by_another_process():
    # Between the release and the moment when a task listens, seconds pass.
    first = ReservedPorts(1)
    first.release()
    (port,) = first.ports
    second = ReservedPorts(1, chooser=Draws(port))
    second.release()
    assert second.ports != [port]
    elsewhere = subprocess.run(
        [sys.executable, "-c", DRAW_IN_ANOTHER_PROCESS, str(port)], stdout=subprocess.PIPE, check=True
    )
    assert int(elsewhere.stdout) != port
