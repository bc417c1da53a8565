"""How does TF_CONFIG become a cluster specification, and back?

Everything TensorFlow accepts is accepted, and what TensorFlow takes silently and fails on minutes later is an
error that names the mistake and the fix.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

from absl import logging

from tfdist_ext.cluster.specification import JOBS, ClusterSpecification, Task, faults_of
from tfdist_ext.errors import ClusterSpecError

EXAMPLE = '{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}'
# Stands for an address that is none, so that its task is still known.
_UNREADABLE = ""
Fault = Callable[[str], None]
# Spellings from elsewhere that difflib does not bring home.
_OTHER_SPELLINGS = {
    "server": "ps",
    "servers": "ps",
    "parameter_server": "ps",
    "parameter_servers": "ps",
    "coordinator": "chief",
    "leader": "chief",
    "eval": "evaluator",
}


def from_tf_config(config: str | Mapping[str, Any]) -> ClusterSpecification:
    """Reads TF_CONFIG.

    Args:
        config: The JSON text, or what it decodes to. Jobs are `chief` (or, from TensorFlow 1, `master`),
            `worker`, `ps`, `evaluator`; each a list of `"host:port"` or `{index: "host:port"}`. Without
            cluster and task it is a job of one.

    Returns:
        The specification.

    Raises:
        ClusterSpecError: It describes no usable cluster; the message says what is wrong and how to mend it.

    Example:
        >>> cluster = from_tf_config(
        ...     '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": "1"}}')
        >>> str(cluster.task), cluster.rank
        ('worker:1', 1)
    """
    jobs, task, environment, rpc_layer = _read(config, _raise)
    return ClusterSpecification.from_jobs(
        jobs, task=task or Task("worker", 0), environment=environment, rpc_layer=rpc_layer
    )


def faults_in(config: str | Mapping[str, Any]) -> tuple[str, ...]:
    """Finds everything that is wrong with TF_CONFIG, where `from_tf_config` stops at the first fault.

    Args:
        config: As for `from_tf_config`.

    Returns:
        A sentence for each fault, with its fix; what only follows from another one is left out.

    Example:
        >>> len(faults_in('{"cluster": {"worker": ["a:1", "a:1"]}, "task": {"type": "worker", "index": 2}}'))
        2
    """
    found: list[str] = []
    jobs, task, _, _ = _read(config, found.append)
    members = [(Task(job, index), address) for job in jobs for index, address in jobs[job].items()]
    members.sort(key=lambda member: (JOBS.index(member[0].type), member[0].index))
    # With a job that could not be read, a task that is not there may be one of that.
    seems_absent = bool(found) and task is not None and task.type not in jobs
    named = [member for member in members if member[1] is not _UNREADABLE]
    found += faults_of(named, None)
    if task is not None and not seems_absent:
        found += set(faults_of(members, task)) - set(faults_of(members, None))
    return tuple(found)


def _read(
    config: str | Mapping[str, Any], fault: Fault
) -> tuple[dict[str, dict[int, str]], Task | None, str, str]:
    """Reads jobs, task, environment and rpc_layer; `fault` raises, or notes and lets the reading go on."""
    try:
        decoded = _decode(config) if isinstance(config, str) else config
    except ClusterSpecError as error:
        fault(str(error))
        return {}, None, "", ""
    if not isinstance(decoded, Mapping):
        fault(f"TF_CONFIG must be a JSON object such as {EXAMPLE}; received {_kind(decoded)}.")
        return {}, None, "", ""
    is_misplaced = _find_misplaced(decoded, fault)
    jobs = _read_jobs(decoded.get("cluster"), fault)
    task = _read_task(decoded.get("task"), jobs, fault) if not is_misplaced else None
    cluster = decoded.get("cluster") or {}
    names_nobody = isinstance(cluster, Mapping) and not any(cluster.values())
    if not jobs and names_nobody and task is not None and task.type != "evaluator":
        fault(
            f"TF_CONFIG says that this task is {task}, but its cluster is empty. List the addresses of every "
            f"task, as in {EXAMPLE}, or unset TF_CONFIG to train with one process."
        )
    return jobs, task, _read_text(decoded, "environment", fault), _read_text(decoded, "rpc_layer", fault)


def _raise(sentence: str) -> None:
    raise ClusterSpecError(sentence)


def to_tf_config(cluster: ClusterSpecification) -> str:
    """Writes TF_CONFIG; `from_tf_config` reads the same specification back.

    Args:
        cluster: The specification.

    Returns:
        JSON text.
    """
    jobs: dict[str, Any] = {}
    for job, tasks in cluster.jobs.items():
        dense = list(tasks) == list(range(len(tasks)))
        jobs[job] = list(tasks.values()) if dense else {str(index): tasks[index] for index in tasks}
    config: dict[str, Any] = {}
    if jobs or cluster.task.type == "evaluator":
        config = {"cluster": jobs, "task": {"type": cluster.task.type, "index": cluster.task.index}}
    if cluster.environment:
        config["environment"] = cluster.environment
    if cluster.rpc_layer:
        config["rpc_layer"] = cluster.rpc_layer
    return json.dumps(config)


def _decode(text: str) -> Any:
    if not text.strip():
        return {}
    try:
        return json.loads(text)
    except ValueError as error:
        position = getattr(error, "pos", 0)
        around = text[max(0, position - 20) : position + 20]
        hint = " JSON wants double quotes, not single ones." if "'" in text else ""
        raise ClusterSpecError(
            f"TF_CONFIG is not JSON: {error}; there it reads {around!r}.{hint} An example: {EXAMPLE}"
        ) from None


def _find_misplaced(decoded: Mapping[str, Any], fault: Fault) -> bool:
    """Finds a misspelt `cluster` or `task`, which would silently mean a job of one."""
    found = False
    for key in decoded:
        if key in JOBS or key == "master":
            found = True
            fault(f'TF_CONFIG has the job {key!r} outside "cluster". Write it as in {EXAMPLE}.')
        for wanted in ("cluster", "task"):
            if key != wanted and wanted not in decoded and _close(str(key), [wanted]):
                found = True
                fault(f"TF_CONFIG has the key {key!r}. Did you mean {wanted!r}?")
    return found


def _read_jobs(cluster: Any, fault: Fault) -> dict[str, dict[int, str]]:
    if cluster is None:
        return {}
    if not isinstance(cluster, Mapping):
        fault(
            f'The "cluster" of TF_CONFIG must map job names to addresses, as in {EXAMPLE}; received '
            f"{_kind(cluster)}."
        )
        return {}
    jobs: dict[str, dict[int, str]] = {}
    for name, entries in cluster.items():
        job = _job_name(name, fault)
        if job in jobs:
            other = "both `master` and `chief`. Keep `chief`" if job == "chief" else f"the job {job!r} twice"
            fault(f"The cluster has {other}.")
        elif job is not None:
            jobs[job] = _read_addresses(job, entries, fault)
    return {job: addresses for job, addresses in jobs.items() if addresses}


def _job_name(name: Any, fault: Fault) -> str | None:
    """Returns the job that is meant, None if nobody knows."""
    if name == "master":
        _notice_master()
        return "chief"
    if isinstance(name, str) and name in JOBS:
        return name
    suggestion = _suggest_job(str(name))
    fix = f"Did you mean {suggestion!r}?" if suggestion else f"The jobs are {', '.join(JOBS)}."
    fault(f"TF_CONFIG names an unknown job {name!r}. {fix}")
    return suggestion


def _suggest_job(name: str) -> str | None:
    """Finds the job behind `ps_hosts`, `Workers`, `wroker` and the like."""
    plain = name.lower().replace("-", "_")
    for suffix in ("_hosts", "_host", "_list", "_addresses"):
        plain = plain.removesuffix(suffix)
    if plain in JOBS:
        return plain
    return _OTHER_SPELLINGS.get(plain) or _close(plain, list(JOBS))


def _read_addresses(job: str, entries: Any, fault: Fault) -> dict[int, str]:
    if isinstance(entries, str):
        fault(
            f"The job {job!r} must be a list of addresses; received one text. Write [{json.dumps(entries)}]."
        )
        return {0: entries}
    if isinstance(entries, Mapping):
        pairs = [
            (_read_index(index, f"an index of the job {job!r}", fault), entries[index]) for index in entries
        ]
    elif isinstance(entries, (list, tuple)):
        pairs = list(enumerate(entries))
    else:
        fault(f"The job {job!r} must be a list of addresses; received {_kind(entries)}.")
        return {}
    for number, (index, address) in enumerate(pairs):
        if not isinstance(address, str):
            fault(
                f"The address of {job}:{index} must be a text such as 'host:2222'; received {_kind(address)}."
            )
            pairs[number] = (index, _UNREADABLE)
    readable = {index: address for index, address in pairs if index is not None}
    if len(readable) < sum(index is not None for index, _ in pairs):
        fault(f"The job {job!r} gives one index twice. Number its tasks 0, 1, 2, ...")
    return readable


def _read_task(task: Any, jobs: Mapping[str, Mapping[int, str]], fault: Fault) -> Task | None:
    if not task and not jobs:
        return None
    if not task:
        fault(
            'TF_CONFIG does not say which task this process is. Add for instance "task": '
            f'{{"type": "{next(iter(jobs))}", "index": 0}}; each process has a task of its own.'
        )
        return None
    if not isinstance(task, Mapping) or "type" not in task:
        fault(
            'The "task" of TF_CONFIG must be an object such as {"type": "worker", "index": 0}; received '
            f"{_kind(task)}{'' if not isinstance(task, Mapping) else ' without a type'}."
        )
        return None
    job = _job_name(task["type"], fault)
    # Alone in its job, a task needs no number.
    alone = job == "evaluator" or len(jobs.get(job or "", ())) == 1
    if task.get("index") is None and job is not None and not alone:
        fault(
            f'The task of TF_CONFIG has the type {job!r} but no index. Add "index": 0, or its '
            "number in the job."
        )
        return None
    index = _read_index(task.get("index") or 0, "the index of the task", fault)
    return None if job is None or index is None else Task(job, index)


def _read_index(index: Any, what: str, fault: Fault) -> int | None:
    """Accepts 1 and "1"."""
    if isinstance(index, str) and index.strip().isascii() and index.strip().isdigit():
        return int(index)
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        fault(f"TF_CONFIG gives {index!r} as {what}; it must be a number from 0.")
        return None
    return index


def _read_text(decoded: Mapping[str, Any], key: str, fault: Fault) -> str:
    value = decoded.get(key) or ""
    if not isinstance(value, str):
        fault(f'The "{key}" of TF_CONFIG must be a text; received {_kind(value)}.')
        return ""
    return value


def _kind(value: Any) -> str:
    """Says what a JSON value is, and shows it if it is short."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "a boolean",
        int: "a number",
        type(None): "null",
    }
    text = repr(value)
    return f"{names.get(type(value), 'a ' + type(value).__name__)}{f' ({text})' if len(text) <= 40 else ''}"


def _close(word: str, words: list[str]) -> str | None:
    return next(iter(difflib.get_close_matches(word.lower(), words, n=1, cutoff=0.7)), None)


@functools.cache
def _notice_master() -> None:
    logging.warning("TF_CONFIG calls the chief `master`, its name in TensorFlow 1. It is read as `chief`.")
