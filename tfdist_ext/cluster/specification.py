"""Which tasks does a job have, and which one is this process?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from tfdist_ext.cluster import addresses as addresses_lib
from tfdist_ext.errors import ClusterSpecError

# Also the order of ranks: the chief first, then the workers.
JOBS = ("chief", "worker", "ps", "evaluator")
TRAINING_JOBS = ("chief", "worker")


@dataclasses.dataclass(frozen=True)
class Task:
    """One process of the cluster.

    Attributes:
        type: `"chief"`, `"worker"`, `"ps"` or `"evaluator"`.
        index: Number within its job, from 0.

    Example:
        >>> str(Task("worker", 1))
        'worker:1'
    """

    type: str
    index: int

    def __post_init__(self):
        if self.type not in JOBS:
            raise ClusterSpecError(
                f"Argument `type` of a task must be one of {', '.join(JOBS)}; received {self.type!r}."
            )
        if not isinstance(self.index, int) or isinstance(self.index, bool) or self.index < 0:
            raise ClusterSpecError(
                f"Argument `index` of a task must be a number from 0; received {self.index!r}."
            )

    def __str__(self) -> str:
        return f"{self.type}:{self.index}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterSpecification:
    """The validated, frozen description of a job, as one of its tasks sees it.

    Attributes:
        members: Every task that has an address, with that address; chief, workers, ps, evaluators, each by
            index. Empty for a job of one task. Jobs may have gaps in their indices, as TensorFlow allows.
        task: The task that this process is. An evaluator need not be a member.
        environment: TF_CONFIG's own `environment` entry, for instance `"cloud"`; kept, not used.
        rpc_layer: TF_CONFIG's own `rpc_layer` entry; kept for TensorFlow's servers.

    Raises:
        ClusterSpecError: The parts do not fit; the message says which, and how to mend it.

    Example:
        >>> cluster = ClusterSpecification.from_jobs(
        ...     {"chief": ["10.0.0.1:2222"], "worker": ["10.0.0.2:2222"]}, task=Task("worker", 0))
        >>> cluster.rank, cluster.world_size, cluster.is_chief
        (1, 2, False)
    """

    members: tuple[tuple[Task, str], ...] = ()
    task: Task = Task("worker", 0)
    environment: str = ""
    rpc_layer: str = ""

    def __post_init__(self):
        ordered = sorted(self.members, key=lambda member: (JOBS.index(member[0].type), member[0].index))
        object.__setattr__(self, "members", tuple(ordered))
        for fault in faults_of(self.members, self.task):
            raise ClusterSpecError(fault)

    @classmethod
    def from_jobs(
        cls,
        jobs: Mapping[str, Sequence[str] | Mapping[int, str]],
        *,
        task: Task,
        environment: str = "",
        rpc_layer: str = "",
    ) -> ClusterSpecification:
        """Makes a specification from lists of addresses.

        Args:
            jobs: Job name to addresses, in the order of the task indices, or to `{index: address}`.
            task: The task that this process is.
            environment: Kept as is.
            rpc_layer: Kept as is.

        Returns:
            The specification.

        Raises:
            ClusterSpecError: The parts do not fit.
        """
        members: list[tuple[Task, str]] = []
        for job, entries in jobs.items():
            pairs = entries.items() if isinstance(entries, Mapping) else enumerate(entries)
            members.extend((Task(job, index), address) for index, address in pairs)
        return cls(members=tuple(members), task=task, environment=environment, rpc_layer=rpc_layer)

    @property
    def jobs(self) -> dict[str, dict[int, str]]:
        """For each job that has members, in order, its addresses by index."""
        found: dict[str, dict[int, str]] = {}
        for task, address in self.members:
            found.setdefault(task.type, {})[task.index] = address
        return found

    @property
    def training_tasks(self) -> tuple[Task, ...]:
        """The tasks that this one trains with, in the order of their ranks, first the chief, then the workers.

        Evaluators and ps are never among them. An evaluator trains with nobody and gets only itself; so does
        the task of a job of one.
        """
        if self.task.type == "evaluator" or not self.members:
            return (self.task,)
        return tuple(task for task, _ in self.members if task.type in TRAINING_JOBS)

    @property
    def world_size(self) -> int:
        """How many tasks train together."""
        return len(self.training_tasks)

    @property
    def rank(self) -> int:
        """Position of this task among `training_tasks`; a `ps` has none and raises ClusterSpecError."""
        if self.task not in self.training_tasks:
            raise ClusterSpecError(f"Task {self.task} serves variables and computes nothing: it has no rank.")
        return self.training_tasks.index(self.task)

    @property
    def is_chief(self) -> bool:
        """Whether this task has rank 0, as the chief has, else worker:0, or an evaluator in its own small world."""
        return self.task in self.training_tasks and self.rank == 0

    @property
    def has_parameter_servers(self) -> bool:
        """Whether the cluster has a `ps` job."""
        return "ps" in self.jobs

    @property
    def address(self) -> str | None:
        """Address of this task, or None if nobody connects to it."""
        return dict(self.members).get(self.task)

    def address_of(self, task: Task) -> str:
        """Looks up where a task is.

        Args:
            task: A member of the cluster.

        Returns:
            Host and port, as one string.

        Raises:
            ClusterSpecError: It is no member.
        """
        for member, address in self.members:
            if member == task:
                return address
        raise ClusterSpecError(f"Task {task} is not in the cluster, which has {_describe(self.jobs)}.")

    def require_parameter_servers(self, wanted_by: str = "ParameterServerStrategy") -> None:
        """Refuses a cluster without a `ps` job.

        Args:
            wanted_by: Who needs it, for the message.

        Raises:
            ClusterSpecError: There is none.
        """
        if not self.has_parameter_servers:
            raise ClusterSpecError(
                f"{wanted_by} needs a `ps` job, and the cluster has {_describe(self.jobs)}. Add "
                '"ps": ["host:port"] to the cluster, or start the script on a local one: `tfdist-ext run --chief '
                "--workers 2 --ps 1 -- python train.py`, or in this process: `tfdist_ext.cluster.in_process(2, 1)`. "
                "MultiWorkerMirroredStrategy needs no ps."
            )


def _describe(jobs: Mapping[str, Mapping[int, str]]) -> str:
    """Says "worker (2 tasks: 0, 1)" for each job."""
    if not jobs:
        return "no jobs"
    parts = []
    for job, tasks in jobs.items():
        indices = ", ".join(map(str, tasks)) if len(tasks) < 9 else f"{min(tasks)} to {max(tasks)}"
        parts.append(f"{job} ({len(tasks)} task{'s' if len(tasks) > 1 else ''}: {indices})")
    return " and ".join(parts)


def faults_of(members: Sequence[tuple[Task, str]], task: Task | None) -> Iterator[str]:
    """Finds what does not fit together; pure.

    Args:
        members: Every task that has an address, in order, with that address.
        task: The task that this process is; None leaves it out.

    Yields:
        A sentence for each fault, with its fix.
    """
    yield from _faults_of_addresses(members)
    yield from _faults_of_chief(members)
    if members and task is not None:
        jobs: dict[str, dict[int, str]] = {}
        for member, address in members:
            jobs.setdefault(member.type, {})[member.index] = address
        yield from _faults_of_task(task, jobs)


def _faults_of_addresses(members: Sequence[tuple[Task, str]]) -> Iterator[str]:
    places: dict[tuple[str, int], Task] = {}
    for number, (task, address) in enumerate(members):
        if number and members[number - 1][0] == task:
            yield f"Task {task} is in the cluster twice. Remove one of its addresses."
        try:
            place = addresses_lib.same_place(address)
        except ClusterSpecError as error:
            yield f"Wrong address of {task}: {error}"
            continue
        if place in places:
            yield (
                f"Tasks {places[place]} and {task} have the same address {address!r}. Give each task a "
                "port of its own."
            )
        places[place] = task


def _faults_of_chief(members: Sequence[tuple[Task, str]]) -> Iterator[str]:
    chiefs = [task for task, _ in members if task.type == "chief"]
    if len(chiefs) > 1:
        yield (
            f"The cluster has {len(chiefs)} chiefs; a job has one. Keep the first, and list the "
            "others as `worker`."
        )
    if chiefs and chiefs[0].index != 0:
        yield f"The chief has the index {chiefs[0].index}; give the only chief the index 0."


def _faults_of_task(task: Task, jobs: Mapping[str, Mapping[int, str]]) -> Iterator[str]:
    """Finds a task that is no member; an evaluator may be left out of the cluster."""
    if task.index in jobs.get(task.type, {}) or (task.type == "evaluator" and "evaluator" not in jobs):
        return
    if task.type in jobs:
        yield (
            f"This task is {task}, but the cluster has {_describe({task.type: jobs[task.type]})}. Set the "
            f"index to one of these, or add the address of {task} to the cluster."
        )
        return
    if task.type == "chief" and "worker" in jobs:
        fix = (
            'Either set the task to {"type": "worker", "index": 0} (without a chief, worker 0 leads), or add '
            '"chief": ["host:port"] to the cluster of every task.'
        )
    else:
        fix = (
            f'Either set the task\'s "type" to one of the jobs present, or add "{task.type}": ["host:port"] '
            "to the cluster of every task."
        )
    yield f"This task is {task}, but the cluster has only {_describe(jobs)}. {fix}"
