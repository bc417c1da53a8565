"""Which tasks does a local job have, and what environment does each one get? Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from tfdist_ext.cluster import ClusterSpecification, Task, to_tf_config
from tfdist_ext.cluster import environment as environment_lib

HOST = "127.0.0.1"
INTRA_OP = "TF_NUM_INTRAOP_THREADS"
INTER_OP = "TF_NUM_INTEROP_THREADS"
OPEN_MP = "OMP_NUM_THREADS"
# A ps or worker whose only inter-op thread waits in a blocking op can serve nobody: the job hangs.
MIN_INTER_OP_THREADS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobShape:
    """How many tasks of each type a job has.

    Attributes:
        num_workers: Tasks of type `worker`.
        chief: Whether there is a `chief`.
        num_ps: Tasks of type `ps`.
        evaluator: Whether there is an `evaluator`.
    """

    num_workers: int = 2
    chief: bool = False
    num_ps: int = 0
    evaluator: bool = False

    def __post_init__(self):
        if min(self.num_workers, self.num_ps) < 0:
            raise ValueError(
                f"Arguments `num_workers` and `num_ps` must not be negative; received {self.num_workers} and "
                f"{self.num_ps}."
            )
        if self.num_workers + self.chief == 0:
            raise ValueError("A job needs somebody who trains. Try at least one worker, or a chief.")

    def tasks(self) -> list[Task]:
        """Lists the tasks in the order in which they are started.

        Returns:
            The ps first, because everyone connects to them, and the evaluator last.
        """
        counts = {
            "ps": self.num_ps,
            "chief": int(self.chief),
            "worker": self.num_workers,
            "evaluator": int(self.evaluator),
        }
        return [Task(job, index) for job, count in counts.items() for index in range(count)]


def tasks_with_address(shape: JobShape) -> list[Task]:
    """Lists the tasks that need a port.

    Args:
        shape: The job.

    Returns:
        All tasks but the evaluator, to which nobody connects and which is not in the cluster.
    """
    return [task for task in shape.tasks() if task.type != "evaluator"]


def plan_environments(
    shape: JobShape,
    ports: Sequence[int],
    *,
    num_threads: int,
    inherited: Mapping[str, str],
    secret: str | None = None,
    restart_count: int = 0,
    force: bool = False,
) -> dict[Task, dict[str, str]]:
    """Gives every task its environment.

    Args:
        shape: The job.
        ports: A free port for each of `tasks_with_address(shape)`.
        num_threads: CPU threads to divide among the tasks.
        inherited: The environment to start from. Thread counts that are set in it are the user's and stay,
            except that no task gets fewer than 2 inter-op threads.
        secret: Cluster secret that all tasks share; None leaves them what they inherit.
        restart_count: How often the whole group was started before.
        force: Whether `num_threads` was asked for and beats the environment.

    Returns:
        For each task, in the order of starting, all its variables.
    """
    jobs: dict[str, list[str]] = {}
    for task, port in zip(tasks_with_address(shape), ports, strict=True):
        jobs.setdefault(task.type, []).append(f"{HOST}:{port}")
    tasks = shape.tasks()
    threads = _thread_variables(max(1, num_threads // len(tasks)), {} if force else inherited)
    environments = {}
    for task in tasks:
        cluster = ClusterSpecification.from_jobs(jobs, task=task)
        # Unbuffered, so that lines appear when they are written and none is lost in a crash.
        own = {
            environment_lib.TF_CONFIG: to_tf_config(cluster),
            environment_lib.RESTART_COUNT: str(restart_count),
            "PYTHONUNBUFFERED": "1",
        }
        if secret is not None:
            # By environment, which only the same user can read; a command line can be read by everybody.
            own[environment_lib.CLUSTER_SECRET] = secret
        environments[task] = {**inherited, **threads, **own}
    return environments


def _thread_variables(share: int, users: Mapping[str, str]) -> dict[str, str]:
    inter_op = users.get(INTER_OP, "")
    wanted = int(inter_op) if inter_op.isdecimal() and int(inter_op) else share
    return {
        INTRA_OP: users.get(INTRA_OP) or str(share),
        INTER_OP: str(max(MIN_INTER_OP_THREADS, wanted)),
        OPEN_MP: users.get(OPEN_MP) or str(share),
    }
