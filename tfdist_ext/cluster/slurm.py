"""How does what Slurm tells a task become a cluster specification?

TensorFlow's `SlurmClusterResolver` needs `nvidia-smi`, writes CUDA_VISIBLE_DEVICES, sorts hosts by their names (n10
before n2, which is not how Slurm numbers tasks), and builds whatever number of tasks a variable names.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping

from tfdist_ext.cluster import environment as environment_lib
from tfdist_ext.cluster.specification import JOBS, ClusterSpecification, Task
from tfdist_ext.errors import ClusterSpecError

# More are a damaged variable, and not a job.
_MOST_TASKS = 100_000
_LAST_PORT = 65535
_GROUP = re.compile(r"\[([^\[\]]*)\]")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def from_slurm(
    jobs: Mapping[str, int] | None = None, *, first_port: int = 8888, environ: Mapping[str, str] | None = None
) -> ClusterSpecification:
    """Reads the cluster that Slurm has started, inside of one of its tasks (`srun`).

    Runs on: every task. Slurm gives each task its GPUs (`--gpus-per-task`); nothing is set here.

    Args:
        jobs: How many tasks each job has, in the order of Slurm's numbers: `{"worker": 4, "ps": 2}` makes the first
            four workers. By default all are workers.
        first_port: Port of the first task of each host; the next one has the next port.
        environ: Variables to read instead of the process's: SLURM_PROCID, SLURM_STEP_NODELIST,
            SLURM_STEP_TASKS_PER_NODE, SLURM_DISTRIBUTION.

    Returns:
        The specification, with this process's task.

    Raises:
        ClusterSpecError: A variable is missing or damaged, or `jobs` are not the tasks that there are.

    References:
        Slurm's manual pages of `srun` (environment variables, `--distribution`) and `scontrol show hostnames`.

    Example:
        >>> environ = {"SLURM_PROCID": "2", "SLURM_STEP_NODELIST": "n[9-10]", "SLURM_STEP_TASKS_PER_NODE": "2,1"}
        >>> cluster = from_slurm(environ=environ)
        >>> [address for _, address in cluster.members], str(cluster.task)
        (['n9:8888', 'n9:8889', 'n10:8888'], 'worker:2')
    """
    hosts = list(itertools.islice(_hosts(_read(environ, "SLURM_STEP_NODELIST")), _MOST_TASKS + 1))
    counts = _counts(_read(environ, "SLURM_STEP_TASKS_PER_NODE"))
    if len(hosts) != len(counts):
        raise ClusterSpecError(
            f"SLURM_STEP_NODELIST names {len(hosts)} hosts, and SLURM_STEP_TASKS_PER_NODE counts the tasks of "
            f"{len(counts)}. Start the tasks with srun, which sets both."
        )
    addresses = _addresses(hosts, counts, _distribution(environ), first_port)
    rank = _number(environ, "SLURM_PROCID")
    if rank >= len(addresses):
        raise ClusterSpecError(
            f"SLURM_PROCID says that this is task {rank}, and there are {len(addresses)} tasks (from 0). Start the "
            "tasks with srun, which sets both."
        )
    jobs = {"worker": len(addresses)} if jobs is None else dict(jobs)
    return _specification(jobs, addresses, rank)


def _specification(jobs: Mapping[str, int], addresses: list[str], rank: int) -> ClusterSpecification:
    unknown = [name for name in jobs if name not in JOBS]
    if unknown:
        raise ClusterSpecError(f"Job `{unknown[0]}` is none of {', '.join(JOBS)}: correct argument `jobs`.")
    if sum(jobs.values()) != len(addresses) or min(jobs.values(), default=0) < 1:
        raise ClusterSpecError(
            f"Argument `jobs` has {sum(jobs.values())} tasks ({dict(jobs)}), and Slurm has started {len(addresses)}. "
            "Give each job one or more, as many as srun's --ntasks in all."
        )
    rest = iter(enumerate(addresses))
    members: dict[str, dict[int, str]] = {}
    task = None
    for name, count in jobs.items():
        members[name] = {}
        for index, (number, address) in enumerate(itertools.islice(rest, count)):
            members[name][index] = address
            task = Task(name, index) if number == rank else task
    assert task is not None  # rank < len(addresses)
    return ClusterSpecification.from_jobs(members, task=task)


def _addresses(hosts: list[str], counts: list[int], distribution: str, first_port: int) -> list[str]:
    """Returns the address of each task, in the order of Slurm's numbers."""
    if first_port + max(counts) - 1 > _LAST_PORT or first_port < 1:
        raise ClusterSpecError(
            f"Argument `first_port`, {first_port}, leaves no port for each of {max(counts)} tasks of a host."
        )
    tasks = [(host, place) for host, count in zip(hosts, counts, strict=True) for place in range(count)]
    if distribution == "cyclic":
        tasks.sort(key=lambda task: task[1])  # Stable: the first task of each host, then the second ones.
    return [f"{host}:{first_port + place}" for host, place in tasks]


def _distribution(environ: Mapping[str, str] | None) -> str:
    named = (
        (environment_lib.variable("SLURM_DISTRIBUTION", environ) or "block")
        .split(",")[0]
        .split(":")[0]
        .lower()
    )
    if named not in ("block", "cyclic"):
        raise ClusterSpecError(
            f"SLURM_DISTRIBUTION is `{named}`, so that nobody here knows which host has which task. Start srun with "
            "--distribution=block or cyclic, or set TF_CONFIG."
        )
    return named


def _read(environ: Mapping[str, str] | None, name: str) -> str:
    text = (environment_lib.variable(name, environ) or "").strip()
    if not text:
        raise ClusterSpecError(
            f"{name} is not set: start the tasks with srun, or set TF_CONFIG in its place."
        )
    return text


def _number(environ: Mapping[str, str] | None, name: str) -> int:
    text = _read(environ, name)
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII):
        raise ClusterSpecError(f"{name} is `{text[:80]}`, and should be a number from 0.")
    return int(text)


def _counts(text: str) -> list[int]:
    """Expands `2(x3),1` to [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in text.split(","):
        found = _COUNT.fullmatch(part)
        count, times = (int(found[1]), int(found[2] or 1)) if found else (0, 0)
        if not 0 < count * times <= _MOST_TASKS or sum(counts) + count * times > _MOST_TASKS:
            raise ClusterSpecError(
                f"SLURM_STEP_TASKS_PER_NODE is `{text[:80]}`, and should be like `2(x3),1`: the tasks of each host, "
                f"{_MOST_TASKS} in all at most."
            )
        counts += [count] * times
    return counts


def _hosts(text: str) -> Iterator[str]:
    """Expands `a[1-2,08],b` to a1, a2, a08, b."""
    for part in re.split(r",(?![^\[]*\])", text):
        if not part or part.count("[") != part.count("]") or re.search(r"[^\w.\[\],-]", part):
            raise _bad_hosts(text)
        yield from _expanded(part, text)


def _expanded(part: str, text: str) -> Iterator[str]:
    found = _GROUP.search(part)
    if found is None:
        if "[" in part or "]" in part:
            raise _bad_hosts(text)
        yield part
        return
    for number in _numbers(found[1], text):
        for rest in _expanded(part[found.end() :], text) if part[found.end() :] else [""]:
            yield part[: found.start()] + number + rest


def _numbers(ranges: str, text: str) -> Iterator[str]:
    for one in ranges.split(","):
        ends = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", one, re.ASCII)
        if ends is None:
            raise _bad_hosts(text)
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if not 0 <= last - first < _MOST_TASKS:
            raise _bad_hosts(text)
        # Leading zeros are part of the name.
        yield from (str(number).zfill(len(ends[1])) for number in range(first, last + 1))


def _bad_hosts(text: str) -> ClusterSpecError:
    return ClusterSpecError(
        f"SLURM_STEP_NODELIST is `{text[:80]}`, and should be like `node[1-3,08],other`. `scontrol show hostnames` "
        "expands it."
    )
