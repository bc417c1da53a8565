"""`tfdist-ext doctor`: what is this task, what is wrong with TF_CONFIG, and how do I mend it?"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Sequence

from tfdist_ext import builds
from tfdist_ext.cluster import ClusterSpecification, environment, from_tf_config
from tfdist_ext.cluster.addresses import SERVERS_LISTEN_EVERYWHERE, is_loopback
from tfdist_ext.cluster.tf_config import EXAMPLE, faults_in
from tfdist_ext.launch.connection import ADVICE, ANSWERS, Probe, probe_all


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What the doctor found.

    Attributes:
        facts: What is so, a sentence each.
        problems: What is wrong, each with its fix. All is well if there is none.
    """

    facts: tuple[str, ...]
    problems: tuple[str, ...] = ()


def main(argv: Sequence[str]) -> int:
    """Runs the subcommand.

    Args:
        argv: Its flags.

    Returns:
        0 if all is well, else 1.
    """
    arguments = _parser().parse_args(list(argv))
    about_builds = _complaints_about_builds()
    try:
        text = _tf_config(arguments.tf_config)
    except OSError as error:
        return _tell(Diagnosis((), (str(error), *about_builds)))
    faults = () if text is None else faults_in(text)
    if faults:
        return _tell(Diagnosis((), (*faults, *about_builds)))
    cluster = None if text is None else from_tf_config(text)
    secret = environment.cluster_secret()
    diagnosis = diagnose(cluster, has_secret=secret is not None)
    complaints = (*_complaints_about_secret(secret), *about_builds)
    diagnosis = dataclasses.replace(diagnosis, problems=(*diagnosis.problems, *complaints))
    if arguments.connect and cluster is not None:
        others = [member for member in cluster.members if member[0] != cluster.task]
        probes = probe_all(others, timeout_seconds=arguments.timeout_seconds)
        diagnosis = dataclasses.replace(
            diagnosis,
            facts=(*diagnosis.facts, *_table(probes)),
            problems=(*diagnosis.problems, *_problems_of(probes)),
        )
    return _tell(diagnosis)


def diagnose(cluster: ClusterSpecification | None, *, has_secret: bool) -> Diagnosis:
    """Explains a valid cluster; pure.

    Args:
        cluster: The cluster, or None if TF_CONFIG is unset.
        has_secret: Whether the environment has a cluster secret.

    Returns:
        Facts and problems.
    """
    if cluster is None or not cluster.members:
        return Diagnosis(_facts_of_one_task(cluster))
    problems: tuple[str, ...] = ()
    facts = [_identity(cluster), *_partners(cluster)]
    remote = [address for _, address in cluster.members if not is_loopback(address)]
    if not remote and not cluster.has_parameter_servers:
        facts.append(f"All addresses are loopback: no other machine can join. {_about_users(has_secret)}")
    elif cluster.has_parameter_servers and not remote:
        facts.append(f"All addresses are loopback. {SERVERS_LISTEN_EVERYWHERE}")
    elif cluster.has_parameter_servers:
        facts.append(f"Addresses reach beyond this machine. {SERVERS_LISTEN_EVERYWHERE}")
    elif has_secret:
        facts.append(f"Addresses reach beyond this machine, and {environment.CLUSTER_SECRET} is set.")
    elif cluster.world_size > 1:
        problems = (
            f"The address {remote[0]} reaches beyond this machine, and {environment.CLUSTER_SECRET} is not "
            "set. Set it to the same long random text in every task (for instance from `openssl rand -hex "
            "32`), unless the script passes `cluster_secret`.",
        )
    return Diagnosis(tuple(facts), problems)


def _about_users(has_secret: bool) -> str:
    if has_secret:
        return f"{environment.CLUSTER_SECRET} is set, so no other user of this one can."
    return (
        f"Other users of this one can, unless the tasks share a {environment.CLUSTER_SECRET}; `tfdist-ext run` draws "
        "one for its tasks."
    )


def _complaints_about_builds() -> tuple[str, ...]:
    complaint = builds.MISSING if builds.is_missing() else builds.complaint_about(builds.installed_builds())
    return (complaint,) if complaint else ()


def _complaints_about_secret(secret: str | None) -> tuple[str, ...]:
    if secret is None or len(secret) >= environment.MIN_SECRET_LENGTH:
        return ()
    return (
        f"{environment.CLUSTER_SECRET} has {len(secret)} characters, and who tries them all finds it: give at least "
        f"{environment.MIN_SECRET_LENGTH}. `openssl rand -hex 32` makes one.",
    )


def _facts_of_one_task(cluster: ClusterSpecification | None) -> tuple[str, ...]:
    if cluster is not None and cluster.task.type == "evaluator":
        return (f"This task is {cluster.task}, alone in its cluster: training never waits for it.",)
    return (
        "TF_CONFIG is not set." if cluster is None else "TF_CONFIG names no cluster.",
        "This process trains alone: rank 0 of 1, chief. That is right for one process.",
        f"For a cluster, set TF_CONFIG in each task, for instance: {EXAMPLE}",
        "For a cluster on this machine, try: tfdist-ext run --workers 2 -- python train.py",
    )


def _identity(cluster: ClusterSpecification) -> str:
    task = cluster.task
    if task.type == "ps":
        return f"This task is {task}: it serves variables, computes nothing and has no rank."
    if task.type == "evaluator":
        return f"This task is {task}: it runs alone, and training never waits for it."
    role = "chief" if cluster.is_chief else "not the chief"
    return f"This task is {task}: global rank {cluster.rank} of {cluster.world_size}, {role}."


def _partners(cluster: ClusterSpecification) -> list[str]:
    facts = []
    if cluster.address is not None:
        facts.append(f"It will listen at {cluster.address}, where the others connect to it.")
    others = [
        f"{task} at {address}"
        for task, address in cluster.members
        if task != cluster.task and "evaluator" not in (task.type, cluster.task.type)
    ]
    return [*facts, f"It will talk to {', '.join(others) or 'nobody'}."]


def _table(probes: Sequence[Probe]) -> list[str]:
    width = max((len(probe.address) for probe in probes), default=0)
    return [
        f"  {str(probe.task):<13} {probe.address:<{width}}  {probe.outcome:<12} {probe.seconds:6.3f} s"
        for probe in probes
    ]


def _problems_of(probes: Sequence[Probe]) -> list[str]:
    return [
        f"{probe.task} at {probe.address}: {probe.outcome}. "
        f"Likely {ADVICE.get(probe.outcome, 'there is no route to it')}."
        for probe in probes
        if probe.outcome != ANSWERS and probe.task.type != "evaluator"
    ]


def _tf_config(argument: str | None) -> str | None:
    """Takes the flag's text, or the file that it names, or the environment's."""
    if argument is None:
        return environment.tf_config()
    if argument.lstrip().startswith("{"):
        return argument
    return pathlib.Path(argument).read_text(encoding="utf-8")


def _tell(diagnosis: Diagnosis) -> int:
    for fact in diagnosis.facts:
        sys.stdout.write(f"{fact}\n")
    for problem in diagnosis.problems:
        sys.stdout.write(f"PROBLEM: {problem}\n")
    if not diagnosis.problems:
        sys.stdout.write("All is well.\n")
    return 1 if diagnosis.problems else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tfdist-ext doctor",
        description="Says what this task is, what is wrong with TF_CONFIG and how to mend it.",
        epilog="The exit code is 0 only if all is well.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--tf-config", metavar="JSON|FILE", help="TF_CONFIG as text or file (default: the environment's)")
    add("--connect", action="store_true", help="try a TCP connection to every other task")
    add(
        "--timeout-seconds",
        type=float,
        default=3.0,
        metavar="S",
        help="deadline of each connection (default 3)",
    )
    return parser
